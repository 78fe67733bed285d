"""`asrkit train`: models of every kind, which transcribe, and what it refuses in one line."""

import json

import pytest
import soundfile
import torch

from asrkit.cli import main
from asrkit.models import AEDModel, CTCModel, TransducerModel, load_checkpoint


@pytest.fixture
def command(tmp_path):
    """The command, with a manifest of two utterances of noise."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for name in ("one", "two"):
        noise = 0.1 * torch.randn(16_000, generator=generator)
        soundfile.write(str(tmp_path / f"{name}.wav"), noise.numpy(), 16_000)
        row = {"audio": f"{name}.wav", "text": name, "split": "train", "speaker": name}
        rows.append(row | {"duration": 1.0})
    manifest = tmp_path / "m.jsonl"
    manifest.write_text("\n".join(map(json.dumps, rows)))
    command = ["train", "--manifest", str(manifest), "--steps", "2", "--no-progress"]
    return [*command, "--out", str(tmp_path / "run")]


@pytest.mark.parametrize(
    ("arguments", "kind", "joint"),
    [
        (["--joint", "full"], TransducerModel, "full"),
        (["--joint", "lean"], TransducerModel, "lean"),
        (["--durations", "0", "1", "2"], TransducerModel, "lean"),
        (
            ["--head", "ctc", "--encoder", "jasper", "--optimizer", "novograd"],
            CTCModel,
            None,
        ),
        (
            ["--head", "ctc", "--encoder", "fastconformer", "--accumulate", "2"],
            CTCModel,
            None,
        ),
        (
            ["--head", "attention", "--smoothing", "0.1"],
            AEDModel,
            None,
        ),
    ],
)
def test_it_trains_a_model_that_transcribes(
    command, tmp_path, capsys, arguments, kind, joint
):
    assert main([*command, "--json", *arguments]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 2 and summary.get("joint") == joint
    assert type(load_checkpoint(tmp_path / "run").model) is kind
    assert (
        main(
            ["transcribe", str(tmp_path / "one.wav"), "--model", str(tmp_path / "run")]
        )
        == 0
    )
    assert "1 of 1 file transcribed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, said", [
    ("--seconds 0", "--seconds: expected above 0, math.inf for no limit, got 0.0"),
    ("--head ctc --durations 0 1", "--durations: expected none with --head ctc"),
    ("--head attention --joint lean", "--joint: expected none with --head attention"),
    ("--smoothing 0.2", "--smoothing: expected none with --head transducer, got 0.2"),
    ("--head attention --smoothing 0.6", "--smoothing: expected a share from 0 to 0.5, got 0.6"),
    ("--durations -1 2", "durations: expected"),
    ("--hold-out eve", "--hold-out: expected a speaker of a manifest, such as "),
])  # fmt: skip
def test_what_it_cannot_do_is_refused_in_one_line(
    command, tmp_path, capsys, arguments, said
):
    assert main([*command, *arguments.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error
    assert not (tmp_path / "run").exists()
