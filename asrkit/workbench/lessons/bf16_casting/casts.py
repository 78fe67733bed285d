"""Studies of half precision: what casts move, how long a cast and its product take at best, and
which numbers round badly.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrkit.features import FeatureConfig
from asrkit.models import FastConformer, FastConformerConfig
from asrkit.models.fastconformer import relative_positions
from asrkit.workbench.bench.suites import precision
from asrkit.workbench.measure import cast_profile

FLOAT32_B = 4
HALF_B = 2
CAST_B = FLOAT32_B + HALF_B  # a cast reads one and writes the other
CAST = "cast of input and weight"
CAST_OF_INPUT = "cast of the input alone"
PRODUCT = "product"
LARGEST_BATCH = 10**6  # frames up to which a product is looked for


def casts_by_operand(module: torch.nn.Module, x: Tensor, calls: int = 1) -> dict[str, int]:
    """How often autocast casts weights and activations, within one region.

    Args:
        module: What is called.
        x: Its input.
        calls: Calls within the region.
    """
    profile = cast_profile(module, (x,), "autocast", calls=calls, repeats=1, warmup=0)
    operands = [cast.operand for cast in profile.casts]
    return {f"cast of {name}": operands.count(name) for name in ("weight", "activation")}


def encoder_cast_bytes(
    config: FastConformerConfig, batches: Sequence[int], frames: int
) -> dict[str, list[float]]:
    """Bytes that casts under CUDA's autocast read and write, by operand, one for each batch size.

    They are counted on fake tensors for the smallest and the largest batch; between the two they
    grow linearly.

    Args:
        config: Of the encoder.
        batches: Utterances, ascending.
        frames: Feature frames of each utterance.
    """
    smallest, *_, largest = batches
    encoder = partial(FastConformer, config)
    ends = []
    for B in (smallest, largest):
        counted: dict[str, float] = {}
        for cast in precision.autocast_casts(encoder, B, frames, config.bins, device="cuda"):
            counted[cast.operand] = counted.get(cast.operand, 0) + cast.bytes
        ends.append(counted)
    at_smallest, at_largest = ends
    found = {}
    for operand, low in at_smallest.items():
        slope = (at_largest[operand] - low) / (largest - smallest)
        found[operand] = [low + slope * (B - smallest) for B in batches]
    return found


def layer_us(
    N: Any, *, inputs: int, outputs: int, memory_GB_per_s: float, bfloat16_TFLOP_per_s: float
) -> dict[str, Any]:
    """Least microseconds of the casts and the product of a linear layer, at a card's rates.

    A cast is limited by memory; the product by memory or arithmetic, whichever takes longer.

    Args:
        N: Frames, a number or an array.
        inputs: Width of a frame.
        outputs: Width of the result.
        memory_GB_per_s: Bandwidth of the card's memory.
        bfloat16_TFLOP_per_s: Rate of its products in bfloat16.
    """
    bytes_per_us = memory_GB_per_s * 1e3
    input_us = CAST_B * N * inputs / bytes_per_us
    weight_us = CAST_B * inputs * outputs / bytes_per_us
    memory_us = HALF_B * (N * inputs + inputs * outputs + N * outputs) / bytes_per_us
    arithmetic_us = 2 * N * inputs * outputs / (bfloat16_TFLOP_per_s * 1e6)
    product_us = np.maximum(memory_us, arithmetic_us)
    return {CAST: input_us + weight_us, CAST_OF_INPUT: input_us, PRODUCT: product_us}


def frames_for_product(least_us: float, times_of: Callable[[int], Mapping[str, float]]) -> int:
    """The fewest frames whose product takes `least_us` microseconds.

    Args:
        least_us: Microseconds.
        times_of: Frames -> times, see `layer_us`; the product's rises with the frames.
    """
    low = 1
    high = LARGEST_BATCH
    while low < high:
        middle = (low + high) // 2
        if times_of(middle)[PRODUCT] >= least_us:
            high = middle
        else:
            low = middle + 1
    return low


def rounded_stages(
    speech: precision.Speech, formats: Mapping[str, torch.dtype]
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """What rounding the waveform, the log-mel energies or the features does, each alone.

    Returns:
        A row for each stage and format, and the mean error of each mel bin by "stage, format".

    Args:
        speech: A trained model, and what it reads.
        formats: Name -> dtype to round to.
    """
    features, frames = speech.features()
    read = precision.reader(speech.checkpoint.model, "float32")
    exact_texts = read(features, frames).tokens
    config = FeatureConfig(**speech.checkpoint.features)
    rows = []
    error_of_bins = {}
    for where in precision.ROUNDED:
        for name, dtype in formats.items():
            rounded = precision.rounded_features(
                speech.waveforms, speech.lengths, dtype, where=where, config=config
            )
            error = rounded - features
            output = read(rounded, frames)
            pairs = zip(exact_texts, output.tokens, strict=True)
            rows.append(
                {
                    "rounded": where,
                    "to": name,
                    "relative error": float(error.norm() / features.norm()),
                    "largest, deviations": float(error.abs().max()),
                    "WER": speech.rates(output)[0].rate,
                    "texts changed": sum(a != b for a, b in pairs),
                }
            )
            error_of_bins[f"{where}, {name}"] = error.abs().sum((0, 1)) / frames.sum()
    return rows, error_of_bins


def what_rounds_badly() -> dict[str, tuple[str, str]]:
    """Quantity -> how it comes out all in bfloat16, and as torch and asrkit compute it.

    Distances that stay different, sines of their angles, a long sum and log-probs, of random
    values.
    """
    low = torch.bfloat16
    distances = torch.arange(999, -1, -1)
    rates = torch.exp(torch.arange(0, 64, 2) * (-torch.log(torch.tensor(10_000.0)) / 64))
    sines = relative_positions(999, 0, 64, torch.zeros(1))[:, ::2]
    sines_in_half = (distances.to(low)[:, None] * rates.to(low)).sin()
    terms = 1 + torch.rand(1024)
    in_half = terms.to(low)
    one_by_one = reduce(torch.add, in_half)
    logits = 4 * torch.randn(1000, 1025).to(low)
    exact = logits.double().log_softmax(-1)
    in_float32 = logits.log_softmax(-1, dtype=torch.float32)
    return {
        "different distances of 0 to 999": (
            f"{len(distances.to(low).unique())}",
            f"{len(distances.unique())}",
        ),
        "sine of their angles, largest error": (
            _largest_error(sines_in_half, sines),
            _largest_error(sines.to(low), sines),
        ),
        f"sum of 1024 numbers, exactly {float(terms.double().sum()):.0f}": (
            f"{float(one_by_one):.0f}",
            f"{float(in_half.sum()):.0f}",
        ),
        "log-probs of 1025 tokens, largest error": (
            _largest_error(logits.log_softmax(-1), exact),
            _largest_error(in_float32, exact),
        ),
    }


def _largest_error(values: Tensor, exact: Tensor) -> str:
    return f"{float((values.double() - exact.double()).abs().max()):.1g}"
