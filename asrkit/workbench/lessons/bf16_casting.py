"""Notebook 04: bytes and least time of casts, magnitudes of a recogniser's numbers, and the
transcripts of recorded speech in several precisions.
"""

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from asrkit.decoders.attention import Suppressing
from asrkit.features import FeatureConfig
from asrkit.models import Checkpoint, FastConformer, FastConformerConfig
from asrkit.models.prompts import SUPPRESSED, PromptFormat
from asrkit.shapes import valid_mask
from asrkit.transcribe import PipelineConfig, PromptOptions, Recognizer
from asrkit.workbench.lessons.shared import precision
from asrkit.workbench.measure import cast_profile
from asrkit.workbench.plots import colour

FLOAT32_B = 4
HALF_B = 2
CAST_B = FLOAT32_B + HALF_B  # a cast reads one and writes the other
CAST = "cast of input and weight"
CAST_OF_INPUT = "cast of the input alone"
PRODUCT = "product"


def casts_by_operand(module: nn.Module, x: Tensor, calls: int = 1) -> dict[str, int]:
    """Number of casts of weights and of activations by autocast, for calls within one region."""
    profile = cast_profile(module, (x,), "autocast", calls=calls, repeats=1, warmup=0)
    operands = [cast.operand for cast in profile.casts]
    return {f"cast of {name}": operands.count(name) for name in ("weight", "activation")}


def encoder_cast_bytes(
    config: FastConformerConfig, batches: Sequence[int], frames: int
) -> dict[str, np.ndarray]:
    """Bytes that casts under CUDA's autocast read and write, by operand and batch size.

    They are counted on fake tensors for the smallest and the largest batch, between which they grow
    linearly.

    Args:
        config: Configuration of the encoder.
        batches: Batch sizes in utterances, ascending.
        frames: Feature frames of each utterance.
    """
    ends = (batches[0], batches[-1])
    counted: dict[str, dict[int, float]] = {}
    for B in ends:
        encoder = partial(FastConformer, config)
        for cast in precision.autocast_casts(encoder, B, frames, config.bins, device="cuda"):
            by_batch = counted.setdefault(cast.operand, dict.fromkeys(ends, 0.0))
            by_batch[B] += cast.bytes
    return {
        operand: np.interp(batches, ends, [*by_batch.values()])
        for operand, by_batch in counted.items()
    }


def layer_us(
    N: Any, *, inputs: int, outputs: int, memory_GB_per_s: float, bfloat16_TFLOP_per_s: float
) -> dict[str, Any]:
    """Least microseconds of the casts and the product of a linear layer, at a card's rates.

    A cast is limited by memory, the product by memory or arithmetic, whichever takes longer.

    Args:
        N: Number of frames, or an array of numbers.
        inputs: Width of a frame.
        outputs: Width of the result.
        memory_GB_per_s: Bandwidth of the card's memory.
        bfloat16_TFLOP_per_s: Rate of the card's products in bfloat16.
    """
    bytes_per_us = memory_GB_per_s * 1e3
    input_us = CAST_B * N * inputs / bytes_per_us
    weight_us = CAST_B * inputs * outputs / bytes_per_us
    memory_us = HALF_B * (N * inputs + inputs * outputs + N * outputs) / bytes_per_us
    arithmetic_us = 2 * N * inputs * outputs / (bfloat16_TFLOP_per_s * 1e6)
    product_us = np.maximum(memory_us, arithmetic_us)
    return {CAST: input_us + weight_us, CAST_OF_INPUT: input_us, PRODUCT: product_us}


def cast_against_product(
    frames: np.ndarray, times_us: Mapping[str, Any], ax: Axes, *, published_us: float
) -> Axes:
    """Draw microseconds of a layer's casts and product over the frames, on logarithmic axes.

    Args:
        frames: Number of frames in the batch.
        times_us: Result of `layer_us`.
        ax: Axes to draw on; returned.
        published_us: Published time for both, drawn as a dotted line.
    """
    things = {CAST: "cast", CAST_OF_INPUT: "cast of input", PRODUCT: "matrix product"}
    for name, thing in things.items():
        ax.plot(frames, times_us[name], color=colour(thing), label=name)
    ax.axhline(published_us, color="black", lw=1, ls=":", label="published, for both")
    ax.set(xscale="log", yscale="log", xlabel="frames in the batch, N")
    ax.set_ylabel("µs, A100 data sheet (arithmetic)")
    ax.legend(frameon=False, fontsize=8)
    return ax


@torch.inference_mode()
def magnitudes(speech: precision.Speech, most: int = 16) -> dict[str, Tensor]:
    """Absolute values of each quantity in a flat tensor, without zeros and padding.

    Args:
        speech: A trained model and its input.
        most: Largest number of utterances.
    """
    config = FeatureConfig(**speech.checkpoint.features)
    features, frames = (part[:most] for part in speech.features())
    waves = speech.waveforms[:most]
    power = power_spectrum(waves, config)
    model = speech.checkpoint.model
    values = {
        "waveform": waves[valid_mask(speech.lengths[:most], waves.shape[1])],
        "power": power[valid_mask(frames, power.shape[1])],
        "features": features[valid_mask(frames, features.shape[1])],
        "weights": torch.cat([part.flatten() for part in model.parameters()]),
        "activations": activations(model, features, frames),
    }
    return {name: part[part != 0].abs() for name, part in values.items()}


def power_spectrum(waveforms: Tensor, config: FeatureConfig) -> Tensor:
    """Power of waveforms (B, S) at the mel filterbank's input, (B, T, fft / 2 + 1)."""
    emphasised = waveforms[:, 1:] - config.preemphasis * waveforms[:, :-1]
    emphasised = torch.cat([waveforms[:, :1], emphasised], 1)
    window = torch.hann_window(config.window_samples, periodic=config.periodic)
    spectrum = torch.stft(
        emphasised,
        config.fft,
        config.hop_samples,
        len(window),
        window,
        pad_mode="constant",
        return_complex=True,
    )
    return spectrum.abs().square().transpose(1, 2)


def activations(model: Any, features: Tensor, frames: Tensor) -> Tensor:
    """Outputs of all norms of a TDNN encoder for features (B, T, F), flat and without padding."""
    outputs = list[Tensor]()

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        outputs.append(output.transpose(1, 2))

    model = copy.deepcopy(model)
    for norm in model.encoder.norms:
        norm.register_forward_hook(keep)
    lengths = model.encode(features, frames)[1]
    return torch.cat([out[valid_mask(lengths, out.shape[1])].flatten() for out in outputs])


class Reading(NamedTuple):
    """A Whisper's output for one recording in one precision.

    Attributes:
        tokens: Tokens of greedy decoding.
        log_probs: Log-probabilities (N,) in nats of the first precision's tokens, and of the end.
        margins: Difference (N,) in nats of each of them to the best other token.
        seconds: Time from samples to tokens.
    """

    tokens: list[int]
    log_probs: Tensor
    margins: Tensor
    seconds: float


def recognizers(checkpoint: Checkpoint, precisions: Iterable[Any]) -> dict[str, Recognizer]:
    """Greedy recognisers with a Whisper, one for each precision that this CPU supports."""
    prompt = PromptOptions(fallback=False)
    by_precision = {}
    for name in precisions:
        with suppress(ValueError):  # int8 needs a CPU and a model that support it
            config = PipelineConfig(precision=name, prompt=prompt)
            by_precision[name] = Recognizer.from_checkpoint(checkpoint, config)
    return by_precision


def read_in_turns(
    recognizers: Mapping[str, Recognizer],
    notes: Mapping[str, Any],
    waveforms: Sequence[Tensor],
    *,
    fewer: Mapping[str, int],
) -> dict[str, dict[int, Reading]]:
    """Readings of recordings in all precisions in turn: precision -> number -> reading.

    Args:
        recognizers: Recognisers by precision. All of them score the tokens of the first one.
        notes: Notes of the checkpoint.
        waveforms: Recordings, (S,) each.
        fewer: Precision -> number of recordings, the first ones, that it reads instead of all. The
            first precision reads all.
    """
    readings: dict[str, dict[int, Reading]] = {name: {} for name in recognizers}
    first = next(iter(recognizers))
    assert first not in fewer
    for number, waveform in enumerate(waveforms):
        for name, recognizer in recognizers.items():
            if number >= fewer.get(name, len(waveforms)):
                continue
            start = time.perf_counter()
            features = recognizer.features(waveform[None], torch.tensor([len(waveform)]))
            encoded, ends = recognizer.encode(*features)
            (tokens,) = recognizer.decode(encoded, ends).tokens()
            seconds = time.perf_counter() - start
            if name == first:
                text = tokens
            scores = forced(recognizer, notes, encoded, ends, text)
            readings[name][number] = Reading(tokens, *scores, seconds)
    return readings


@torch.inference_mode()
def forced(
    recognizer: Recognizer,
    notes: Mapping[str, Any],
    encoded: Tensor,
    ends: Tensor,
    text: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (N,) of a text's tokens and of its end under teacher forcing.

    The second result is the margin (N,) of each over the best other token.

    Args:
        recognizer: A recogniser with a Whisper.
        notes: Notes of its checkpoint, which have the prompt and the suppressed tokens.
        encoded: Frames (1, T, D) from `Recognizer.encode`.
        ends: Number of valid frames (1,).
        text: Tokens of the text.
    """
    format_ = PromptFormat.from_notes(notes)
    assert format_ is not None
    prompt = format_.tokens()
    model = Suppressing(recognizer.model, **notes[SUPPRESSED], prompt_tokens=len(prompt))
    memory = model.prefill(encoded.to(recognizer.dtype), ends)
    tokens = torch.tensor([[*prompt, *text]])
    K = tokens.shape[1]
    logits, _ = model.step(tokens, model.init_state(memory, K), memory, reach=K)
    log_probs = logits[0, len(prompt) - 1 :].float().log_softmax(-1)
    wanted = torch.tensor([*text, model.eos])[:, None]
    chosen = log_probs.gather(1, wanted)[:, 0]
    return chosen, chosen - log_probs.scatter(1, wanted, -torch.inf).amax(1)
