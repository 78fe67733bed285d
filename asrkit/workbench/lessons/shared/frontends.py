"""A CTC model from waveforms to labels, with its steps utterance by utterance or batched."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.decoders import Hypotheses
from asrkit.features import log_mel
from asrkit.models import CTCModel
from asrkit.transcribe.recognizer import ModelVariants
from asrkit.workbench.lessons.shared.file_recognizer import Variant, VariantRecognizer

BLANK_SHARE = 0.72  # share of blank frames in speech
variant = partial(Variant, encoder="eager")  # only front end and decoder differ
VARIANTS = {  # normalisation and CTC decoding, each utterance by utterance or batched
    "both_sequential": variant(normalization="one_by_one", strategy="one_by_one"),
    "sequential_ctc": variant(normalization="batched", strategy="one_by_one"),
    "sequential_norm": variant(normalization="one_by_one", strategy="batched"),
    "both_batched": variant(normalization="batched", strategy="batched"),
}


@torch.inference_mode()
def run(model: nn.Module, *inputs: Tensor) -> Any:
    """The outputs of the model, in inference mode."""
    return model(*inputs)


def frontends(
    model: CTCModel, waveforms: Tensor, lengths: Tensor
) -> dict[str, Callable[[], Hypotheses]]:
    """Arms from waveforms to labels, by the names of VARIANTS.

    Args:
        model: model on the device of the waveforms.
        waveforms: (B, S).
        lengths: (B,) samples.
    """
    variants = ModelVariants(model)
    return {
        name: partial(VariantRecognizer(variants, config), waveforms, lengths)
        for name, config in VARIANTS.items()
    }


def log_probs_of(model: CTCModel, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs (B, T, V) float32 and lengths (B,) in frames.

    Args:
        model: model on the device of the waveforms.
        waveforms: (B, S).
        lengths: (B,) samples.
    """
    features, frames = log_mel(waveforms, lengths)
    return run(model, features.to(model.output.weight.dtype), frames)


@torch.inference_mode()
def set_blank_share(model: CTCModel, scores: Tensor) -> None:
    """Set the bias of the blank so that BLANK_SHARE of the frames with these scores are blank."""
    margin = scores[..., :-1].amax(-1) - scores[..., -1]
    model.output.bias[-1] += margin.quantile(BLANK_SHARE).to(model.output.bias.dtype)
