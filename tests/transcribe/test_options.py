"""Bad options of the recogniser: one line that names the option."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asrkit.models import AEDModel, TransducerModel, presets
from asrkit.transcribe import (
    BeamOptions,
    PipelineConfig,
    PromptOptions,
    Recognizer,
    WindowOptions,
)
from asrkit.transcribe.options import ShardOptions

BAD = [
    (WindowOptions, {"batch_s": 0}, "batch_s: expected more than 0 seconds, got 0"),
    (WindowOptions, {"batch_s": math.inf}, "batch_s: expected a finite number"),
    (WindowOptions, {"batch_s": "30"}, "batch_s: expected a finite number, got '30'"),
    (WindowOptions, {"window_s": 0.5}, "window_s: expected 1 to 86,400 seconds, got 0.5"),
    (WindowOptions, {"overlap_s": 16}, "overlap_s: expected 0 to half a window, got 16"),
    (WindowOptions, {"readers": 0}, "readers: expected 1 to 256 threads, got 0"),
    (BeamOptions, {"beam": 0}, "beam: expected 1 to 1000 hypotheses, got 0"),
    (BeamOptions, {"label_bonus": 1e7}, "label_bonus: expected a number from -1,000,000 to 1,000,000"),
    (BeamOptions, {"ctc_weight": -0.1}, "ctc_weight: expected a share from 0 to 1, or None"),
    (BeamOptions, {"lm_weight": 1.0}, "lm_weight: expected an n-gram model with it, got 1.0"),
    (BeamOptions, {"word_bonus": 1.0}, "word_bonus: expected an n-gram model over words with it"),
    (PromptOptions, {"language": ""}, "language: expected a language's code, or None, got ''."),
    (PromptOptions, {"target_language": 7}, "target_language: expected str or None"),
    (PromptOptions, {"task": "sing"}, "task: expected one of 'transcribe', 'translate', or None, got"),
    (PromptOptions, {"punctuation": "yes"}, "punctuation: expected bool or None"),
    (PipelineConfig, {"max_symbols": 0}, "max_symbols: expected at least 1, or None, got 0"),
    (PipelineConfig, {"encoder": "fast"}, "encoder: expected one of 'auto', 'eager', 'optimized', "),
    (PipelineConfig, {"graphs": "full", "strategy": "label_looping"}, "graphs: expected 'auto' or"),
    (PipelineConfig, {"search": 8}, "search: expected BeamOptions or None"),
    (PipelineConfig, {"search": BeamOptions(), "strategy": "one_by_one"},
     "search: expected None with a strategy or graphs of greedy decoding, got BeamOptions"),
    (ShardOptions, {"part": "2/2"}, "part: expected K/N with K from 0 to N - 1, such as 0/8, got '2/2'"),
    (ShardOptions, {"part": "one"}, "part: expected K/N"),
]  # fmt: skip


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
