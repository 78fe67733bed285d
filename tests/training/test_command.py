"""`asrkit train`: models of every kind, which transcribe, and its refusals in one line."""

import json
import sys
from pathlib import Path

import pytest

from asrkit.cli import main
from asrkit.models import AEDModel, CTCModel, TransducerModel, load_checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from trainings import noise_corpus


@pytest.fixture
def command(tmp_path):
    """The command, with a manifest of two utterances of noise."""
    manifest = noise_corpus(tmp_path, "one", "two")
    command = ["train", "--manifest", manifest, "--steps", "2", "--no-progress"]
    return [*command, "--out", str(tmp_path / "run")]


@pytest.mark.parametrize("arguments, kind, joint", [
    ("--joint full --batching bucketed --batch-seconds 60", TransducerModel, "full"),
    ("--durations 0 1 2", TransducerModel, "lean"),
    ("--head ctc --encoder jasper --optimizer novograd", CTCModel, None),
    ("--head ctc --encoder fastconformer --accumulate 2", CTCModel, None),
    ("--head attention --smoothing 0.1", AEDModel, None),
    ("--precision float16 --joint full --steps 9", TransducerModel, "full"),
])  # fmt: skip
def test_it_trains_a_model_that_transcribes(
    command, tmp_path, capsys, arguments, kind, joint
):
    assert main([*command, "--json", *arguments.split()]) == 0
    summary = json.loads(capsys.readouterr().out)
    half = "float16" in arguments
    assert summary["steps"] == (9 if half else 2)
    assert (0 < summary.get("overflows", 0) < 9) == half
    assert 0 <= summary["padding"] < 1
    assert summary.get("joint") == joint
    assert type(load_checkpoint(tmp_path / "run").model) is kind
    sound = str(tmp_path / "0.wav")
    model = str(tmp_path / "run")
    assert main(["transcribe", sound, "--model", model]) == 0
    assert "1 of 1 file transcribed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, message", [
    ("--seconds 0", "--seconds: expected above 0, math.inf for no limit, got 0.0"),
    ("--head ctc --durations 0 1", "--durations: expected none with --head ctc"),
    ("--head attention --joint lean", "--joint: expected none with --head attention"),
    ("--smoothing 0.2", "--smoothing: expected none with --head transducer, got 0.2"),
    ("--head attention --smoothing 0.6", "--smoothing: expected a share from 0 to 0.5, got 0.6"),
    ("--durations -1 2", "durations: expected"),
    ("--memory 0", "--memory: expected above 0, got 0.0"),
    ("--memory 1 --bucket-sizes a.json", "--bucket-sizes: expected none with --memory"),
    ("--buckets 0", "--buckets: expected at least 1, got 0"),
    ("--tokens-per-second 0", "--tokens-per-second: expected above 0, got 0.0"),
    ("--hold-out eve", "--hold-out: expected a speaker of a manifest, such as "),
])  # fmt: skip
def test_invalid_options_are_refused_in_one_line(
    command, tmp_path, capsys, arguments, message
):
    assert main([*command, *arguments.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert not (tmp_path / "run").exists()
