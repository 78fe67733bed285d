"""Padded batches of (waveform, targets): once over a set (`batches`) or without end
(`training_stream`).

For speech that fits in memory; cuts that are read while training goes on are LengthSampler's. Every
batch follows from the seed and its number, so that a run resumes without replaying what went
before, as lhotse's samplers have to.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from asrkit.data.batching.lengths import Lengths
from asrkit.data.batching.padding import at_most_seconds
from asrkit.data.batching.strategies import cut
from asrkit.shapes import expect
from asrkit.text import Tokenizer

RATE_HZ = 16_000


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B padded utterances; zero beyond their lengths."""

    waveforms: Tensor  # (B, S) float32 in -1..1, 16 kHz
    sample_lengths: Tensor  # (B,) int64
    targets: Tensor  # (B, U) int64
    target_lengths: Tensor  # (B,) int64
    texts: list[str]
    ids: list[str]


@dataclass(frozen=True, kw_only=True)
class Utterances:
    """Speech held in memory: for each utterance a 16 kHz int16 tensor (S,), an id, a text and a
    speaker.
    """

    waveforms: Sequence[Tensor]
    ids: Sequence[str]
    texts: Sequence[str]
    speakers: Sequence[str]

    @classmethod
    def load(
        cls, cuts: Iterable[Any], *, workers: int | None = None, progress: bool = True
    ) -> "Utterances":
        """All of `cuts` (lhotse, 16 kHz, with text; channels are averaged), in their order, read by
        `workers` threads.
        """
        cuts = list(cuts)
        with ThreadPoolExecutor(workers) as pool:
            reading = tqdm(
                pool.map(_pcm, cuts), "reading speech", len(cuts), unit="utt", disable=not progress
            )
            waveforms = list(reading)
        said = [sorted(cut.supervisions, key=lambda one: one.start) for cut in cuts]
        texts = [" ".join(one.text for one in several if one.text) for several in said]
        speakers = [str(several[0].speaker) if several else "" for several in said]
        return cls(
            waveforms=waveforms, ids=[cut.id for cut in cuts], texts=texts, speakers=speakers
        )

    def __post_init__(self) -> None:
        sizes = len(self.waveforms), len(self.ids), len(self.texts), len(self.speakers)
        expect(len(set(sizes)) == 1, "waveforms, ids, texts, speakers", "equally many", sizes)
        empty = [
            id_ for id_, waveform in zip(self.ids, self.waveforms, strict=True) if not len(waveform)
        ]
        expect(not empty, "waveforms", "samples in each", f"none in {empty[:3]}")
        expect(
            len(set(self.ids)) == len(self.ids),
            "ids",
            "all different",
            f"{len(set(self.ids))} among {len(self.ids)}",
        )

    def __len__(self) -> int:
        return len(self.waveforms)

    @property
    def durations(self) -> list[float]:
        """Seconds of each utterance."""
        return [len(waveform) / RATE_HZ for waveform in self.waveforms]

    @property
    def total_seconds(self) -> float:
        """Seconds of speech in all."""
        return sum(self.durations)

    def batch(self, rows: Iterable[int], tokenizer: Tokenizer) -> Batch:
        """The utterances numbered `rows`, padded."""
        rows = [int(row) for row in rows]
        waveforms, texts = [self.waveforms[row] for row in rows], [self.texts[row] for row in rows]
        targets = [torch.tensor(tokenizer.encode(text), dtype=torch.int64) for text in texts]
        return Batch(
            waveforms=pad_sequence(waveforms, batch_first=True) / 32768,
            sample_lengths=torch.tensor([len(waveform) for waveform in waveforms]),
            targets=pad_sequence(targets, batch_first=True),
            target_lengths=torch.tensor([len(row) for row in targets]),
            texts=texts,
            ids=[self.ids[row] for row in rows],
        )


def _pcm(cut: Any) -> Tensor:
    rate_hz = cut.sampling_rate
    expect(
        rate_hz == RATE_HZ,
        "cuts",
        "16 kHz",
        f"{rate_hz} Hz in {cut.id!r}",
        "Call cuts.resample(16000).",
    )
    try:
        audio = cut.load_audio().mean(
            0
        )  # here: lhotse's own downmix sums channels, reads them at once and repeats the text
    except Exception as error:  # lhotse wraps what a decoder raises, in classes of several modules
        raise ValueError(
            f"cuts: {cut.id!r} cannot be read ({' '.join(str(error).split()):.300})."
        ) from None
    expect(
        bool(np.isfinite(audio).all()), "cuts", "finite samples", f"NaN or infinity in {cut.id!r}"
    )
    return torch.from_numpy(np.rint(audio * 32768).clip(-32768, 32767).astype(np.int16))


def _blurred(rows: np.ndarray, samples: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """`rows` from long to short, lengths blurred by 10 % so that an utterance meets others each
    time.
    """
    return rows[np.argsort(-samples[rows] * random.uniform(0.9, 1.1, len(rows)))]


def _samples(utterances: Utterances) -> Lengths:
    """Samples of each in the place of seconds: whole numbers, so that budgets are kept exactly."""
    samples = np.array([len(waveform) for waveform in utterances.waveforms], dtype=np.float64)
    return Lengths(samples, np.zeros(len(samples)))


def batches(
    utterances: Utterances | Iterable[Any],
    tokenizer: Tokenizer,
    *,
    batch_seconds: float,
    seed: int = 0,
    epoch: int = 0,
    order: Literal["shuffled", "sorted", "as_given"] = "shuffled",
    max_seconds: float | None = None,
) -> Iterator[Batch]:
    """Every utterance (or lhotse cut, read first) once, in batches of at most `batch_seconds`,
    padding included.

    shuffled: similar lengths together, batches in random order, a function of (seed, epoch).
    sorted: longest first. An utterance longer than `batch_seconds` is a batch of its own; one
    longer than `max_seconds` is left out.
    """
    expect(batch_seconds > 0, "batch_seconds", "> 0", batch_seconds)
    expect(
        order in ("shuffled", "sorted", "as_given"),
        "order",
        "shuffled, sorted or as_given",
        repr(order),
    )
    held = (
        utterances
        if isinstance(utterances, Utterances)
        else Utterances.load(utterances, progress=False)
    )
    lengths, limit = _samples(held), at_most_seconds(batch_seconds * RATE_HZ)
    samples = lengths.seconds
    rows = np.flatnonzero(samples <= (np.inf if max_seconds is None else max_seconds * RATE_HZ))
    random = np.random.default_rng([seed, epoch])
    if order != "as_given":
        rows = (
            _blurred(rows, samples, random)
            if order == "shuffled"
            else rows[np.argsort(-samples[rows], kind="stable")]
        )
    plan = cut(rows, lengths, limit)
    for number in random.permutation(len(plan)) if order == "shuffled" else range(len(plan)):
        yield held.batch(plan[number], tokenizer)


def training_stream(
    utterances: Utterances,
    tokenizer: Tokenizer,
    *,
    batch_seconds: float,
    seed: int = 0,
    start_step: int = 0,
    max_seconds: Callable[[int], float] | None = None,
) -> Iterator[Batch]:
    """Endless batches of at most `batch_seconds` padded; that of step k depends on (seed, k,
    max_seconds(k)) alone.

    So a resumed run goes on bit for bit from `start_step`, with nothing replayed. Each step plans
    an epoch and takes one of its batches, whereby every utterance is equally likely.
    max_seconds(k): longest utterance admitted at step k, a length curriculum; one batch of the
    shortest always is.
    """
    expect(batch_seconds > 0, "batch_seconds", "> 0", batch_seconds)
    expect(len(utterances) > 0, "utterances", "at least one", "none")
    lengths, limit = _samples(utterances), at_most_seconds(batch_seconds * RATE_HZ)
    samples = lengths.seconds
    ascending = np.sort(samples)
    shortest = ascending[: np.searchsorted(np.cumsum(ascending), batch_seconds * RATE_HZ) + 1][-1]
    for step in itertools.count(start_step):
        random = np.random.default_rng([seed, step])
        longest = np.inf if max_seconds is None else max(shortest, max_seconds(step) * RATE_HZ)
        plan = cut(_blurred(np.flatnonzero(samples <= longest), samples, random), lengths, limit)
        yield utterances.batch(plan[random.integers(len(plan))], tokenizer)
