"""Whisper with its published weights on recorded speech: times of its parts, and drafts.

The times are compared with the least time that a step can take.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.cpu import fast_dtype
from asrkit.decoders import aed_greedy
from asrkit.decoders.attention import Suppressing
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import AEDConfig, AEDModel, Checkpoint, optimize
from asrkit.models.inference import cast_copy
from asrkit.models.prompts import SUPPRESSED, PromptFormat
from asrkit.workbench.measure import Timing, measure

CHOICE = "choice of the token"
Frames = tuple[Tensor, Tensor]  # encoder frames (B, T, D), and their lengths (B,)


class Stopwatch:
    """Milliseconds of the parts of a run; each part ends where the next one begins.

    Attributes:
        ms: Milliseconds by the name of the part.
        calls: Number of calls of the decoder.
        steps: Number of calls without the first one of each text.
    """

    def __init__(self) -> None:
        self.ms = defaultdict[str, float](float)
        self.calls = 0
        self.steps = 0
        self.part = ""
        self.since = time.perf_counter()

    def begin(self, part: str) -> None:
        """Begin a part. The time of the part "" is discarded."""
        now = time.perf_counter()
        if self.part:
            self.ms[self.part] += 1e3 * (now - self.since)
        self.part, self.since = part, now

    @property
    def total_ms(self) -> float:
        """Milliseconds of all parts."""
        return sum(self.ms.values())


@contextmanager
def watched(model: Any, watch: Stopwatch) -> Iterator[None]:
    """Time the parts of a decoder with a stopwatch while it decodes one batch.

    The first call of the decoder, which takes the prompt, is the part "prefill". In later calls,
    parts begin at layer norms, because a packed model still has those.
    """
    before = watch.calls

    def begin(part: str, *_: Any) -> None:
        watch.begin(part if watch.calls > before + 1 else "prefill")

    def count(*_: Any) -> None:
        watch.calls += 1
        watch.steps += watch.calls > before + 1

    def score(x: Tensor) -> Tensor:
        begin("output layer")
        logits = type(model).score(model, x)
        begin(CHOICE)
        return logits

    hooked = [(model.embedding, count)]
    for layer in model.layers:
        hooked.append((layer.self_norm, partial(begin, "self-attention")))
        hooked.append((layer.cross_norm, partial(begin, "cross-attention")))
        hooked.append((layer.feed_forward_norm, partial(begin, "feed-forward")))
    hooks = [module.register_forward_pre_hook(hook) for module, hook in hooked]
    model.score = score
    try:
        yield
    finally:
        del model.score
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True, kw_only=True)
class Whisper:
    """A Whisper that decodes greedily and without timestamps.

    Attributes:
        model: The checkpoint's model, which may be packed or in another dtype.
        checkpoint: The checkpoint, with the settings of features, prompt and suppressed tokens.
    """

    model: AEDModel
    checkpoint: Checkpoint

    @cached_property
    def prompt(self) -> list[int]:
        """Tokens before the text."""
        form = PromptFormat.from_notes(self.checkpoint.notes)
        assert form is not None
        return form.tokens()

    @cached_property
    def decoder(self) -> Suppressing:
        """The model with its suppressed tokens masked."""
        suppressed = self.checkpoint.notes[SUPPRESSED]
        return Suppressing(self.model, **suppressed, prompt_tokens=len(self.prompt))

    @torch.inference_mode()
    def encode(self, waveform: Tensor, watch: Stopwatch) -> Frames:
        """Frames (1, T, D) of a waveform (S,), and their number (1,)."""
        watch.begin("features")
        config = FeatureConfig(**self.checkpoint.features)
        features, ends = log_mel(waveform[None], torch.tensor([len(waveform)]), config=config)
        watch.begin("encoder")
        encoded, lengths, _ = self.model.encode(features, ends)
        watch.begin("")
        return encoded, lengths

    def decode(
        self, frames: Frames, watch: Stopwatch, draft: Hypotheses | None = None
    ) -> Hypotheses:
        """The text of encoder frames, which may have another dtype."""
        encoded, lengths = frames
        encoded = encoded.to(self.model.positions.dtype)
        with watched(self.model, watch):
            watch.begin("prefill")
            text = aed_greedy(self.decoder, encoded, lengths, prompt=self.prompt, draft=draft)
        watch.begin("")
        return text

    def as_draft(self, text: str) -> Hypotheses:
        """A written text as a draft."""
        labels = [(token, -1, 0) for token in self.checkpoint.tokenizer.encode(f" {text}")]
        return Hypotheses.from_lists([labels], [torch.zeros(())], "written")


def whispers(checkpoint: Checkpoint) -> dict[str, Whisper]:
    """The model in float32, eager and packed, and packed in this CPU's fastest dtype."""
    model: Any = checkpoint.model.float()
    models = {"eager, float32": model}
    for dtype in dict.fromkeys(("float32", fast_dtype())):
        models[f"packed, {dtype}"] = optimize(cast_copy(model, getattr(torch, dtype)))
    return {name: Whisper(model=one, checkpoint=checkpoint) for name, one in models.items()}


def time_parts(
    arms: Mapping[str, Whisper], waveforms: Sequence[Tensor], *, passes: int
) -> tuple[dict[str, Stopwatch], dict[str, Timing]]:
    """Transcribe recordings one by one with each arm, interleaved.

    Args:
        arms: Models by name.
        waveforms: Recordings, (S,) each.
        passes: Number of passes of each arm over all recordings.

    Returns:
        The parts of each arm's fastest pass, and the times of all passes.
    """

    def run(whisper: Whisper, watch: Stopwatch) -> None:
        for waveform in waveforms:
            whisper.decode(whisper.encode(waveform, watch), watch)

    return _timed({name: partial(run, whisper) for name, whisper in arms.items()}, passes)


def _timed(
    arms: Mapping[str, Callable[[Stopwatch], None]], passes: int
) -> tuple[dict[str, Stopwatch], dict[str, Timing]]:
    watches = defaultdict[str, list[Stopwatch]](list)

    def run(name: str) -> None:
        watches[name].append(Stopwatch())
        arms[name](watches[name][-1])

    timings = measure({name: partial(run, name) for name in arms}, repeats=passes, warmup=0)
    fastest = {name: min(runs, key=lambda watch: watch.total_ms) for name, runs in watches.items()}
    return fastest, timings


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """Texts that were decoded with or without drafts.

    Attributes:
        texts: Tokens of each text.
        watch: Calls and times of the decoder in its fastest pass.
    """

    texts: list[list[int]]
    watch: Stopwatch

    @property
    def kept(self) -> float:
        """Share of the texts' tokens that were accepted from drafts.

        Each call accepts some tokens of a draft and adds one more, which may be the end.
        """
        tokens = sum(map(len, self.texts))
        return (tokens + len(self.texts) - self.watch.calls) / max(1, tokens)


def time_drafts(
    arms: Mapping[str, tuple[Whisper, Sequence[Hypotheses | None]]],
    speech: Sequence[Frames],
    *,
    passes: int,
) -> dict[str, Drafted]:
    """Decode recordings one by one with several kinds of drafts, interleaved.

    Args:
        arms: Name -> the verifying model, and its draft of each recording or None.
        speech: Frames of the recordings.
        passes: Number of passes of each arm over all recordings.
    """
    texts: dict[str, list[list[int]]] = {}

    def run(name: str, watch: Stopwatch) -> None:
        whisper, drafts = arms[name]
        pairs = zip(speech, drafts, strict=True)
        decoded = [whisper.decode(frames, watch, draft) for frames, draft in pairs]
        texts[name] = [text for hypotheses in decoded for text in hypotheses.tokens()]

    fastest, _ = _timed({name: partial(run, name) for name in arms}, passes)
    return {name: Drafted(texts=texts[name], watch=watch) for name, watch in fastest.items()}


def bytes_a_step(config: AEDConfig, T: int) -> dict[str, int]:
    """Bytes that a step of one utterance has to read in float32, by part.

    They are the weights and, for cross-attention, the keys and values of T frames.
    """
    D = config.width
    layer = {
        "self-attention": 4 * D * D,
        "cross-attention": 2 * D * D + 2 * T * D,
        "feed-forward": 2 * config.expansion * D * D,
    }
    numbers = {name: config.layers * count for name, count in layer.items()}
    numbers["output layer"] = config.vocab_size * D
    return {name: 4 * count for name, count in numbers.items()}


def read_rate(MiB: int = 256) -> float:
    """Bytes per second that this machine reads for a product of one row with a weight.

    The weight has `MiB` and should not fit in any cache.
    """
    weight = torch.ones(MiB * 256, 1024)
    read = partial(F.linear, weight[:1], weight)
    with torch.inference_mode():
        timing = measure({"read": read}, repeats=7, warmup=2)["read"]
    return 1e3 * weight.nbytes / min(timing.samples_ms)
