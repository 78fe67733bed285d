"""Parakeet RNN-T 1.1B on one core of a CPU, in every way in which asrkit computes it there.

Its encoder has 42 blocks of one size, which take long to make and much memory. So two recognisers
are timed that have all of its width and a few of its blocks; a line through both gives the rest:

    seconds of all = seconds of few + (42 - few) (seconds of more - seconds of few) / (more - few)

What is no block is in both times: features, subsampling, and the decoding of planted labels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrkit.cpu import has_int8
from asrkit.models import FastConformerConfig, TransducerConfig
from asrkit.models.packed import multiplies
from asrkit.shapes import expect
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.pipeline import ModelVariants, Recognizer
from asrkit.workbench.bench.agreement import apart
from asrkit.workbench.bench.suites.encoders import one_utterance
from asrkit.workbench.cost import Range, Speed
from asrkit.workbench.machine import this_machine
from asrkit.workbench.measure import measure

AS_LOADED = "float32"
OPTIMIZED = PipelineConfig(encoder="optimized", graphs="off")
WAYS: Mapping[str, PipelineConfig] = {
    AS_LOADED: PipelineConfig(precision="float32", encoder="eager", graphs="off"),
    "optimized_float32": replace(OPTIMIZED, precision="float32"),
    "optimized_bfloat16": replace(OPTIMIZED, precision="bfloat16"),
    "optimized_int8": replace(OPTIMIZED, precision="int8"),
}
Recognise = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class WayOnCore:
    """What one way of computing takes on a core.

    Attributes:
        name: Of `WAYS`.
        rtfx: Seconds of speech in a second of the core, by the whole model: an estimate from each
            repeat.
        error: Distance of the encoded frames from those of float32, over the norm of these; of the
            larger recogniser that is timed.
    """

    name: str
    rtfx: tuple[float, ...]
    error: float

    @property
    def label(self) -> str:
        """The name as pictures and tables show it."""
        if self.name == AS_LOADED:
            return "eager float32"
        return self.name.replace("_", " ")

    @property
    def middle(self) -> float:
        """Median of the RTFx."""
        return median(self.rtfx)

    def speed(self, model: str) -> Speed:
        """The RTFx of a core of this machine with its quartiles, to compute costs with.

        Args:
            model: Name of the preset that was timed.
        """
        low, middle, high = np.quantile(self.rtfx, (0.25, 0.5, 0.75)).tolist()
        return Speed(
            rtfx=Range(low, middle, high),
            per="core",
            origin="estimated here",
            device=this_machine()["cpu_model"],
            model=model,
            batch=1,
            note=f"{self.label}, weights random, from a few of the encoder's blocks",
        )


def ways_here() -> list[str]:
    """Those of `WAYS` that this CPU computes: bfloat16 where its oneDNN multiplies that, int8 where
    it has instructions for it.
    """
    computed = {
        "optimized_bfloat16": multiplies(torch.bfloat16),
        "optimized_int8": has_int8(),
    }
    return [name for name in WAYS if computed.get(name, True)]


def time_ways(
    config: TransducerConfig, *, seconds: float, few: int, more: int, repeats: int
) -> list[WayOnCore]:
    """One utterance on one core in each of `ways_here`, in alternation; random weights, CPU time.

    Args:
        config: A model with a FastConformer and an LSTM predictor.
        seconds: Of the utterance.
        few: Blocks of the smaller recogniser that is timed.
        more: Blocks of the larger one, at most as many as `config` has: then nothing is estimated.
        repeats: Of each timing.
    """
    encoder = config.encoder
    wanted = "a model with a FastConformer"
    known = isinstance(encoder, FastConformerConfig)
    expect(known, "config", wanted, f"one with a {type(encoder).__name__}")
    assert isinstance(encoder, FastConformerConfig)
    expect(0 < few < more, "few", f"1 or more, and fewer than more={more}", few)
    expect(more <= encoder.layers, "more", f"at most the {encoder.layers} of the model", more)
    small = _recognisers(_with_blocks(config, few), seconds)
    large = _recognisers(_with_blocks(config, more), seconds)
    for call in small.values():
        call()  # warms up, as the next line does
    frames = {name: call()[0] for name, call in large.items()}
    arms = {f"{name}, few": call for name, call in small.items()}
    arms |= {f"{name}, more": call for name, call in large.items()}
    timings = measure(arms, repeats=repeats, warmup=0)
    found = []
    for name in small:
        fewer_ms = timings[f"{name}, few"].cpu_ms
        more_ms = timings[f"{name}, more"].cpu_ms
        assert fewer_ms is not None and more_ms is not None  # on a CPU
        all_ms = [
            of_all_blocks(one, other, few=few, more=more, blocks=encoder.layers)
            for one, other in zip(fewer_ms, more_ms, strict=True)
        ]
        rtfx = tuple(1e3 * seconds / ms for ms in all_ms)
        difference, size = apart(frames[AS_LOADED], frames[name])
        found.append(WayOnCore(name=name, rtfx=rtfx, error=difference / size))
    return found


def of_all_blocks(
    time_of_few: float, time_of_more: float, *, few: int, more: int, blocks: int
) -> float:
    """The time of a model with `blocks` alike, from those of models with `few` and with `more`;
    never less than with `more`, whatever noise says.

    >>> of_all_blocks(3.0, 5.0, few=1, more=3, blocks=42)
    44.0
    """
    of_a_block = (time_of_more - time_of_few) / (more - few)
    return max(time_of_few + (blocks - few) * of_a_block, time_of_more)


def _with_blocks(config: TransducerConfig, blocks: int) -> TransducerConfig:
    """`config` with so many blocks in its encoder."""
    encoder: Any = config.encoder
    return replace(config, encoder=replace(encoder, layers=blocks))


def _recognisers(config: TransducerConfig, seconds: float) -> dict[str, Recognise]:
    """Name of a way, and a call that recognises an utterance so; all with the same weights."""
    utterance = one_utterance(config, seconds)
    variants = ModelVariants(utterance.model)
    return {
        name: partial(utterance.recognise, Recognizer(variants, WAYS[name])) for name in ways_here()
    }
