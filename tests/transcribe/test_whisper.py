"""`asrkit transcribe` with a Whisper folder: prompts, windows, what is refused."""

import importlib.util
import json
from pathlib import Path

import pytest
import soundfile
import torch

from asrkit.cli import main
from asrkit.decoders import Suppressing, aed_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import load_checkpoint
from asrkit.models.prompts import PromptFormat
from asrkit.transcribe import Recognizer

HERE = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location(
    "whisper_cases", HERE / "models" / "whisper_cases.py"
)
known = importlib.util.module_from_spec(spec)
spec.loader.exec_module(known)

WINDOWS = ["--window", "2", "--overlap", "0.5"]


@pytest.fixture(params=known.CASES)
def any_folder(request, tmp_path):
    """The folder of each case."""
    return written(tmp_path, request.param)


@pytest.fixture
def folder(tmp_path):
    """The folder of a multilingual model."""
    return written(tmp_path, "whisper")


@pytest.fixture
def english(tmp_path):
    """The folder of an English model."""
    return written(tmp_path, "whisper-en")


def written(tmp_path, name):
    shapes = json.loads((HERE / "golden" / "whisper.json").read_text())[name]["shapes"]
    weights = known.fill({key: torch.zeros(shape) for key, shape in shapes.items()})
    known.write_folder(tmp_path / name, known.CASES[name], weights)
    return tmp_path / name


@pytest.fixture
def talk(tmp_path):
    """A file of 1.5 s, and one of 4.4 s."""
    files = []
    for name, samples in (("short", 24_005), ("long", 70_000)):
        waveforms, _ = known.speech((samples,))
        soundfile.write(
            tmp_path / f"{name}.wav", waveforms[0].numpy(), 16_000, subtype="FLOAT"
        )
        files.append(str(tmp_path / f"{name}.wav"))
    return files


def said(capsys, *arguments):
    """The texts that the command prints, by file."""
    assert main(["transcribe", "--dtype", "float32", *arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["file"]: row["text"] for row in rows}


def by_hand(folder, path, **asked):
    """The text of a file of one window, by the parts."""
    checkpoint = load_checkpoint(folder)
    prompt = PromptFormat.from_notes(checkpoint.notes).tokens(**asked)
    samples = torch.from_numpy(soundfile.read(path, dtype="float32")[0])
    config = FeatureConfig(**checkpoint.features)
    features, frames = log_mel(
        samples[None], torch.tensor([len(samples)]), config=config
    )
    model = checkpoint.model
    with torch.no_grad():
        encoded, ends, _ = model.encode(features, frames)
    quiet = Suppressing(
        model, **checkpoint.notes["suppressed"], prompt_tokens=len(prompt)
    )
    found = aed_greedy(quiet, encoded, ends, prompt=prompt).tokens()[0]
    texts = [token for token in found if token < checkpoint.tokenizer.vocab_size]
    return checkpoint.tokenizer.decode(texts)


def test_a_file_of_one_window_says_what_its_parts_say(any_folder, talk, capsys):
    found = said(capsys, *talk, "--model", str(any_folder), *WINDOWS)
    assert found[talk[0]] == by_hand(any_folder, talk[0])
    assert found[talk[1]]


def test_language_and_task_go_into_the_prompt(folder, talk, capsys):
    plain = said(capsys, talk[0], "--model", str(folder), *WINDOWS)[talk[0]]
    texts = set()
    for asked in (
        {"language": "de"},
        {"language": "de", "task": "translate"},
        {"language": "en"},
    ):
        options = [
            part for name, value in asked.items() for part in (f"--{name}", value)
        ]
        found = said(capsys, talk[0], "--model", str(folder), *WINDOWS, *options)[
            talk[0]
        ]
        assert found == by_hand(folder, talk[0], **asked)
        texts.add(found)
    assert plain in texts
    assert len(texts) > 1


def test_what_the_prompt_has_no_place_for_is_refused(folder, english, talk, capsys):
    for model, options, wanted in (
        (folder, ["--language", "fr"], "--language: expected one of 'de', 'en', got 'fr'."),
        (english, ["--language", "de"], "--language: expected one of 'en', got 'de'."),
        (english, ["--task", "translate"], "--target-language: expected another language than language='en'"),
        (folder, ["--no-punctuation"], "punctuation: expected none, since the model's prompt has no place for it"),
    ):  # fmt: skip
        assert (
            main(
                [
                    "transcribe",
                    "--dtype",
                    "float32",
                    talk[0],
                    "--model",
                    str(model),
                    *WINDOWS,
                    *options,
                ]
            )
            == 2
        )
        assert wanted in capsys.readouterr().err


def test_windows_longer_than_the_model_has_positions_for_are_refused(
    folder, talk, capsys
):
    assert (
        main(["transcribe", "--dtype", "float32", talk[0], "--model", str(folder)]) == 2
    )
    wanted = "expected at most 2 seconds, as the model has positions, got 30.0."
    assert wanted in capsys.readouterr().err


def test_labels_have_times_within_their_file(folder, talk, capsys):
    arguments = [*talk, "--model", str(folder), *WINDOWS, "--json", "--timestamps"]
    assert main(["transcribe", "--dtype", "float32", *arguments]) == 0
    for line in capsys.readouterr().out.splitlines():
        row = json.loads(line)
        assert row["words"]
        for word in row["words"]:
            assert 0 <= word["start_s"] <= word["end_s"] <= row["audio_s"] + 0.02


def test_a_batch_counts_the_silence_that_fills_its_windows(
    folder, talk, capsys, monkeypatch
):
    sizes = []
    features = Recognizer.features

    def counted(self, waveforms, lengths):
        found = features(self, waveforms, lengths)
        sizes.append(found[0].shape[:2])
        return found

    monkeypatch.setattr(Recognizer, "features", counted)
    files = [talk[0]] * 3  # 4.5 s, but 6 s once they are filled up
    options = ["--batch-seconds", "5", "--model", str(folder), *WINDOWS]
    assert main(["transcribe", "--dtype", "float32", *files, *options]) == 0
    assert sizes == [(2, 200), (1, 200)]


@pytest.mark.parametrize(
    "damaged",
    [[5], {"always": [5]}, {"always": 5, "first": []}, {"always": [400], "first": []}],
)
def test_notes_of_suppressed_tokens_that_are_damaged_are_refused(folder, damaged):
    checkpoint = load_checkpoint(folder)
    notes = checkpoint.notes | {"suppressed": damaged}
    with pytest.raises(ValueError, match="^(suppressed|always): expected"):
        Recognizer.from_checkpoint(checkpoint._replace(notes=notes))


def test_a_beam_decodes_whisper_too(any_folder, talk, capsys):
    greedy = said(capsys, talk[0], "--model", str(any_folder), *WINDOWS)[talk[0]]
    one = said(capsys, talk[0], "--model", str(any_folder), *WINDOWS, "--beam", "1")[
        talk[0]
    ]
    assert one == greedy
    assert said(capsys, talk[0], "--model", str(any_folder), *WINDOWS, "--beam", "4")[
        talk[0]
    ]
