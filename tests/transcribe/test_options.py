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
    transcribe,
)

BAD = [
    (WindowOptions, {"batch_s": math.inf}, "batch_s: expected a finite number"),
    (WindowOptions, {"window_s": 0.5}, "window_s: expected 1 to 86,400 seconds, got 0.5"),
    (WindowOptions, {"overlap_s": 16}, "overlap_s: expected 0 to half a window, got 16"),
    (WindowOptions, {"readers": 0}, "readers: expected 1 to 256 threads, got 0"),
    (BeamOptions, {"beam": 0}, "beam: expected 1 to 1000 hypotheses, got 0"),
    (BeamOptions, {"ctc_weight": -0.1}, "ctc_weight: expected a share from 0 to 1, got -0.1"),
    (PipelineConfig, {"precision": "int8", "encoder": "eager"}, "encoder: expected 'auto' or 'optimized' with int8, got 'eager'"),
    (PipelineConfig, {"search": 8}, "search: expected BeamOptions or None"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "wanted"), BAD)
def test_wrong_options_are_refused(kind, options, wanted):
    with pytest.raises(ValueError) as error:
        kind(**options)
    assert str(error.value).startswith(wanted)
    assert "\n" not in str(error.value)


def test_a_path_in_place_of_a_checkpoint_is_refused(speech):
    for call in (Recognizer.from_checkpoint, lambda path: [*transcribe(path, speech)]):
        with pytest.raises(ValueError) as error:
            call("m.safetensors")
        wanted = (
            "checkpoint: expected a Checkpoint, got str. Pass load_checkpoint(path)."
        )
        assert str(error.value) == wanted


NO_HEAD = "expected none for AEDModel without a CTC head, got"
REFUSED = [
    ("none", {}, "model: expected one of TransducerModel, CTCModel, AEDModel, got Identity"),
    ("ctc", {"strategy": "label_looping"}, "strategy: expected one of 'fastest', "),
    ("rnnt", {"search": BeamOptions()}, "beam: expected none for TransducerModel, got 8."),
    ("ctc", {"search": BeamOptions(ctc_weight=0.5)}, "ctc_weight: expected none for"),
    ("aed", {"search": BeamOptions(ctc_weight=0.5)}, f"ctc_weight: {NO_HEAD} 0.5"),
    ("aed", {"search": BeamOptions(lm=Path("words.arpa"))}, f"lm: {NO_HEAD}"),
    ("aed", {"prompt": PromptOptions(fallback=False)}, "fallback: expected none, since this AEDModel has no prompt"),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(learned):
    """One model of each kind; the encoder-decoder has no CTC head."""
    return {
        "none": torch.nn.Identity(),
        "ctc": learned.model,
        "rnnt": TransducerModel(presets.tiny(vocab_size=28)).eval(),
        "aed": AEDModel(replace(presets.tiny_aed(), ctc=False)).eval(),
    }


@pytest.mark.parametrize(("kind", "config", "wanted"), REFUSED)
def test_options_that_a_model_does_not_support_are_refused(
    models, kind, config, wanted
):
    with pytest.raises(ValueError) as error:
        Recognizer(models[kind], PipelineConfig(**config))
    assert str(error.value).startswith(wanted)
