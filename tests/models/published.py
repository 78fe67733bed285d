"""Files of other programs, made from small models of known weights, for tests of readers and of parity."""

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asrkit.features import FeatureConfig, mel_bands
from asrkit.models import Checkpoint, load_checkpoint, save_checkpoint
from benchmarks.peers.processes import PYTHON

HERE = Path(__file__).resolve().parent
GONE = object()  # as a value: takes its key away
CLOSE = {"rtol": 0, "atol": 1e-4}
# Tolerances for numbers that another processor rounds differently.
ROUNDED = ("features", "published", "encoded", "log_probs", "joint", "logits")


def golden(name: str) -> dict[str, Any]:
    """The committed numbers of a peer."""
    return json.loads((HERE.parent / "golden" / f"{name}.json").read_text())


def zeros(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Tensors of these shapes by name."""
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def featurizer(preprocessor: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The window and the mel bands that NeMo saves, of this section of an archive's config."""
    make_window = getattr(torch, f"{preprocessor['window']}_window")
    samples = int(preprocessor["window_size"] * preprocessor["sample_rate"])
    bands = mel_bands(FeatureConfig(bins=preprocessor["features"]))
    return {
        "preprocessor.featurizer.window": make_window(samples, periodic=False),
        "preprocessor.featurizer.fb": bands.T[None].contiguous(),
    }


def without_gone(values: dict[str, Any]) -> dict[str, Any]:
    """A dict without the keys whose value is GONE."""
    return {key: value for key, value in values.items() if value is not GONE}


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`values` with changed values at dotted keys."""
    values = copy.deepcopy(values)
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = values
        for name in sections:
            section = section[name]
        section[last] = value
        if value is GONE:
            del section[last]
    return values


def edit(path: Path, changes: dict[str, Any]) -> None:
    """Change values at dotted keys of a JSON file."""
    values = changed(json.loads(path.read_text("utf-8")), changes)
    path.write_text(json.dumps(values), "utf-8")


def change_weights(folder: Path, changes: dict[str, Any]) -> None:
    """Change tensors of a Hugging Face folder."""
    path = folder / "model.safetensors"
    save_file(without_gone(load_file(path) | changes), path)


def refused(path: Path, message: str) -> None:
    """Loading is refused in one short line that holds `message`."""
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path)
    text = str(caught.value)
    assert message in text, text
    assert "\n" not in text
    assert len(text) < 700


def expect_a_copy_to_be_the_same(checkpoint: Checkpoint, folder: Path) -> None:
    """AssertionError unless asrkit's own checkpoint keeps everything."""
    save_checkpoint(folder / "own.safetensors", checkpoint)
    own = load_checkpoint(folder / "own.safetensors")
    assert own.model.config == checkpoint.model.config
    assert own[1:] == checkpoint[1:]
    weights = own.model.state_dict()
    for name, value in checkpoint.model.state_dict().items():
        assert torch.equal(weights[name], value), name


def filled_by_peers(folder: Path, worker: str, *arguments: str) -> Path:
    """The folder, to which a worker of the peers' environment has written; skips where there is none."""
    if not PYTHON.exists():
        pytest.skip("needs .venv-peers: `make peers` installs NeMo and transformers")
    command = [PYTHON, "-P", "-W", "ignore", HERE / worker, *arguments, folder]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def expect_committed(numbers: dict[str, Any], kept: dict[str, Any]) -> None:
    """AssertionError unless the numbers of a peer are the committed ones: {"peer": version, case: {name: numbers}}."""
    assert numbers.keys() == kept.keys()
    assert numbers["peer"] == kept["peer"]
    for case in kept.keys() - {"peer"}:
        assert numbers[case].keys() == kept[case].keys()
        for name, wanted in kept[case].items():
            found = numbers[case][name]
            if name in ROUNDED:
                found, wanted = torch.tensor(found), torch.tensor(wanted)
                torch.testing.assert_close(found, wanted, **CLOSE, msg=name)
            else:
                assert found == wanted, (case, name)
