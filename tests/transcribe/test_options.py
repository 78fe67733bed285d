"""Bad options of the recogniser and of `asrkit transcribe`: one line that names the option."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asrkit.cli import main
from asrkit.models import AEDModel, TransducerModel, presets, save_checkpoint
from asrkit.transcribe import (
    BeamOptions,
    PipelineConfig,
    PromptOptions,
    Recognizer,
    WindowOptions,
)

SECONDS = ": expected a number of seconds, got "
SHARE = "ctc_weight: expected a share from 0 to 1, or None"
READERS = "readers: expected 1 to 256 threads, got "
BAD = [
    (WindowOptions, {"batch_s": 0}, "batch_s: expected more than 0 seconds, got 0"),
    (WindowOptions, {"batch_s": math.inf}, "batch_s: expected a finite number"),
    (WindowOptions, {"batch_s": "30"}, f"batch_s{SECONDS}"),
    (
        WindowOptions,
        {"window_s": 0.5},
        "window_s: expected 1 to 86,400 seconds, got 0.5",
    ),
    (
        WindowOptions,
        {"overlap_s": 16},
        "overlap_s: expected 0 to half a window, got 16",
    ),
    (WindowOptions, {"readers": 0}, READERS),
    (BeamOptions, {"ctc_weight": -0.1}, SHARE),
    (
        PromptOptions,
        {"language": ""},
        "language: expected a language's code, or None, got ''.",
    ),
    (
        PromptOptions,
        {"target_language": 7},
        "target_language: expected a language's code, or None",
    ),
    (
        PromptOptions,
        {"task": "sing"},
        "task: expected 'transcribe', 'translate' or None, got",
    ),
    (
        PromptOptions,
        {"punctuation": "yes"},
        "punctuation: expected True, False or None, got",
    ),
    (
        PipelineConfig,
        {"max_symbols": 0},
        "max_symbols: expected at least 1, or None, got 0",
    ),
    (
        PipelineConfig,
        {"encoder": "fast"},
        "encoder: expected one of 'auto', 'eager', 'optimized', ",
    ),
    (
        PipelineConfig,
        {"graphs": "full", "strategy": "label_looping"},
        "graphs: expected 'auto' or",
    ),
    (PipelineConfig, {"search": 8}, "search: expected BeamOptions or None, got 8"),
    (
        PipelineConfig,
        {"prompt": {"language": "de"}},
        "prompt: expected PromptOptions or None",
    ),
    (
        PipelineConfig,
        {"search": BeamOptions(), "strategy": "one_by_one"},
        "search: expected None with a strategy or graphs of greedy decoding, got a beam",
    ),
]


@pytest.mark.parametrize(("kind", "options", "wanted"), BAD)
def test_options_that_cannot_be_are_refused(kind, options, wanted):
    with pytest.raises(ValueError) as error:
        kind(**options)
    assert str(error.value).startswith(wanted)
    assert "\n" not in str(error.value)


NO_HEAD = "ctc_weight: expected none but for an encoder-decoder model with a CTC head, got 0.3 for"
REFUSED = [
    (
        "ctc",
        {"encoder_graphs": "per_shape"},
        "encoder_graphs: expected 'off' on a CPU, got",
    ),
    ("ctc", {"graphs": "full"}, "graphs: expected 'auto' or 'off' for a CTCModel"),
    ("rnnt", {"graphs": "full"}, "graphs: expected 'off' on a CPU, got 'full'"),
    ("aed", {"graphs": "step"}, "graphs: expected 'auto' or 'off' for an AEDModel"),
    (
        "ctc",
        {"precision": "autocast", "encoder": "optimized"},
        "encoder: expected 'eager' on a CPU with precision='autocast', got 'optimized'.",
    ),
    (
        "rnnt",
        {"search": BeamOptions()},
        "beam: expected none for a TransducerModel, got 8.",
    ),
    ("aed", {"search": BeamOptions(ctc_weight=0.3)}, f"{NO_HEAD} an AEDModel"),
    (
        "aed",
        {"search": BeamOptions(lm=Path("words.arpa"))},
        "lm: expected none for an AEDModel",
    ),
    (
        "aed",
        {"prompt": PromptOptions(language="de")},
        "language: expected none, since this AEDModel has no prompt",
    ),
]


@pytest.fixture(scope="module")
def models(learned):
    """One model of each kind; the encoder-decoder has no CTC head."""
    return {
        "ctc": learned.model,
        "rnnt": TransducerModel(presets.tiny(vocab_size=28)).eval(),
        "aed": AEDModel(replace(presets.tiny_aed(), ctc=False)).eval(),
    }


@pytest.mark.parametrize(("kind", "config", "wanted"), REFUSED)
def test_what_a_model_or_a_device_cannot_do_is_refused(models, kind, config, wanted):
    with pytest.raises(ValueError) as error:
        Recognizer(models[kind], PipelineConfig(**config))
    assert str(error.value).startswith(wanted)


def test_a_model_or_a_config_of_another_type_is_refused(learned):
    with pytest.raises(
        ValueError, match="^model: expected one of TransducerModel.*, got Identity"
    ):
        Recognizer(torch.nn.Identity())
    for config in ("bfloat16", {}, WindowOptions()):
        with pytest.raises(
            ValueError, match="^config: expected PipelineConfig or None, got "
        ):
            Recognizer.from_checkpoint(learned, config)


BEAM = ["--beam", "4"]
NO_PROMPT = "expected none, since this CTCModel has no prompt with a place for it, got"
COMMANDS = [
    (
        ["--batch-seconds", "0"],
        "--batch-seconds: expected more than 0 seconds, got 0.0.",
    ),
    (
        ["--format", "vtt"],
        "--format: expected txt or json without --out, got vtt. Pass --out DIR.",
    ),
    (
        ["--format", "txt", "--json"],
        "--json: expected --out DIR, or transcripts in JSON, got --format txt.",
    ),
    (
        ["--timestamps"],
        "--timestamps: expected a --format with times: json, srt, vtt or ctm, got txt.",
    ),
    (
        ["--lm", "x.arpa"],
        "--lm: expected a beam search with it, got x.arpa. Pass --beam 8.",
    ),
    (
        [*BEAM, "--lm-weight", "1"],
        "--lm-weight: expected an n-gram model with it, got 1.0. Pass --lm FILE.",
    ),
    (
        [*BEAM, "--lm", "none.arpa"],
        "--lm: expected a file in ARPA format, got none.arpa.",
    ),
    (
        [*BEAM, "--label-bonus", "nan"],
        "--label-bonus: expected a number from -1,000,000 to 1,000,000, got nan.",
    ),
    (
        [*BEAM, "--word-bonus", "1"],
        "--word-bonus: expected an n-gram model over words with it, got 1.0.",
    ),
    (
        ["--language", "de"],
        f"--language: {NO_PROMPT} 'de'. Some encoder-decoder models have one.",
    ),
    (
        ["--context", "4", "4"],
        "--model: expected one with a FastConformer, got ConvEncoder.",
    ),
]


@pytest.fixture(scope="module")
def saved(learned, tmp_path_factory):
    """The trained model of CTC as a file."""
    path = tmp_path_factory.mktemp("options") / "model.safetensors"
    save_checkpoint(path, learned)
    return path


@pytest.mark.parametrize(("arguments", "message"), COMMANDS)
def test_bad_arguments_of_the_command_are_one_line(
    speech, saved, arguments, message, capsys
):
    assert main(["transcribe", str(speech[0]), "--model", str(saved), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"asrkit transcribe: {message}\n"
