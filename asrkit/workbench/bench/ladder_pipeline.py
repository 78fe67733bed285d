"""The recogniser on sound files, stage by stage: what the ladder measures."""

import time
import wave
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from asrkit.decoders import Hypotheses
from asrkit.features import FeatureConfig
from asrkit.models import CTCModel, TransducerModel
from asrkit.shapes import expect, whole
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.pipeline import ModelVariants, Recognizer, prefetched, weight_dtype

STAGES = ("loading", "frontend", "encoder", "decoder")


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """N sound files, the model that transcribes them, and the batch size.

    Recognisers of one task share the model's variants and the encoder's CUDA graphs.
    """

    model: TransducerModel | CTCModel  # float32, in eval mode, on `device`
    files: Sequence[Path]  # WAV, one channel of int16 at the rate of `features`
    samples: Sequence[int]  # of each file
    batch: int  # files transcribed at once
    features: FeatureConfig = field(default_factory=FeatureConfig)
    # (N, T, D) float32, added to the frames that the decoder reads: see
    # asrkit.workbench.bench.suites.ladder
    script: Tensor | None = None
    labels: Sequence[Sequence[int]] | None = None  # of each file, where they are known
    device: str = "cpu"
    variants: ModelVariants = field(init=False)
    scripts: dict[torch.dtype, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.samples)
        as_many = len(self.files) == count > 0
        expect(as_many, "files, samples", "as many of each, not none", count)
        expect(whole(self.batch, 1), "batch", "at least 1", self.batch)
        object.__setattr__(self, "variants", ModelVariants(self.model))

    def script_in(self, dtype: torch.dtype) -> Tensor | None:
        """The script in this dtype, converted once."""
        if self.script is None:
            return None
        if dtype not in self.scripts:
            self.scripts[dtype] = self.script.to(dtype)
        return self.scripts[dtype]


class Transcribed(NamedTuple):
    """The hypotheses of N files, in their order, whatever the batches were. On the CPU."""

    labels: Tensor  # (N, U) int64, padded with -1
    counts: Tensor  # (N,) labels of each file
    frames: Tensor  # (N, U) int64, the encoder frame of each label
    ends: Tensor  # (N,) encoder frames
    likelihoods: Tensor  # (N,) float32, probability of its labels
    impl: str  # how the decoder ran

    def tokens(self) -> list[list[int]]:
        """The labels as one list a file."""
        rows = self.labels.tolist()
        counts = self.counts.tolist()
        return [row[:count] for row, count in zip(rows, counts, strict=True)]


class LoadedBatch(NamedTuple):
    """A batch of samples on its device."""

    samples: Tensor  # (B, S) int16
    lengths: Tensor  # (B,)
    uploaded: Any = None  # a CUDA event that follows the upload, where another stream does it


def _ignore(stage: str) -> None:
    """The hook of a call whose stages nobody times."""


class FileRecognizer:
    """The recogniser of a task's files under one config; a call transcribes them all.

    Args:
        task: files and model.
        config: how to compute.

    Raises:
        ValueError: the device or the model cannot do what `config` asks for.
    """

    def __init__(self, task: Task, config: PipelineConfig) -> None:
        self.task = task
        self.config = config
        self.recognizer = Recognizer(task.variants, config, features=task.features)
        self.script = task.script_in(weight_dtype(task.model, config))
        self.plan = self._plan()
        self.rows = [torch.tensor(batch, device=task.device) for batch in self.plan]
        self.upload_stream: Any = None
        if task.device.startswith("cuda") and config.loading == "overlapped":
            self.upload_stream = torch.cuda.Stream(task.device)

    def _plan(self) -> list[list[int]]:
        """Positions of the files in each batch."""
        samples = self.task.samples
        rows = list(range(len(samples)))
        if self.config.order == "by_length":
            rows.sort(key=samples.__getitem__, reverse=True)
        size = self.task.batch
        starts = range(0, len(rows), size)
        return [rows[start : start + size] for start in starts]

    def __call__(
        self, on_stage: Callable[[str], object] = _ignore, only: slice = slice(None)
    ) -> Transcribed:
        """The hypotheses of all files.

        Args:
            on_stage: called with each stage's name when it ends.
            only: which batches of the plan to transcribe.
        """
        results: list[Hypotheses] = []
        all_ends: list[Tensor] = []
        batches = self._batches(self.plan[only])
        for batch, rows in zip(batches, self.rows[only], strict=True):
            on_stage("loading")
            features, frames = self._features(batch)
            on_stage("frontend")
            encoded, ends = self._encode(features, frames, rows)
            on_stage("encoder")
            results.append(self.recognizer.decode(encoded, ends))
            all_ends.append(ends.clone())  # a graph overwrites its own at the next batch
            on_stage("decoder")
        rows = torch.cat(self.rows[only])
        return _gathered(results, all_ends, rows.cpu())

    def probe(self) -> None:
        """Transcribe the batch with the longest file, to find out whether this machine can.

        Raises:
            RuntimeError: it cannot, or finds other labels than are known.
            ValueError: it cannot.
        """
        samples = self.task.samples
        longest = [max(samples[row] for row in batch) for batch in self.plan]
        number = longest.index(max(longest))
        transcribed = self(only=slice(number, number + 1))
        tokens = transcribed.tokens()
        if not self.task.labels:
            return
        rows = sorted(self.plan[number])
        known = [list(self.task.labels[row]) for row in rows]
        if tokens != known:
            raise RuntimeError("the labels are not those that are known")

    def stage_ms(self) -> dict[str, float]:
        """Milliseconds of one call by stage, with the device synchronised after each.

        Where a thread loads the audio, "loading" is the time spent waiting for it.
        """
        took_ms = dict.fromkeys(STAGES, 0.0)
        last = time.perf_counter()

        def clock(stage: str) -> None:
            nonlocal last
            if self.task.device.startswith("cuda"):
                torch.cuda.synchronize()
            now = time.perf_counter()
            took_ms[stage] += 1e3 * (now - last)
            last = now

        self(clock)
        return took_ms

    def _batches(self, plan: Sequence[Sequence[int]]) -> Iterator[LoadedBatch]:
        loaded = map(self._load, plan)
        if self.config.loading == "before":
            yield from loaded
            return
        for batch in prefetched(loaded):
            if batch.uploaded is not None:
                stream = torch.cuda.current_stream()
                stream.wait_event(batch.uploaded)
                # or the upload stream would reuse this memory while it is read here
                batch.samples.record_stream(stream)
                batch.lengths.record_stream(stream)
            yield batch

    def _load(self, rows: Sequence[int]) -> LoadedBatch:
        pinned = self.upload_stream is not None
        padded, lengths = self._padded(rows, pinned=pinned)
        device = self.task.device
        if not pinned:
            return LoadedBatch(padded.to(device), lengths.to(device))
        with torch.cuda.stream(self.upload_stream):
            samples = padded.to(device, non_blocking=True)
            uploaded_lengths = lengths.to(device, non_blocking=True)
            event = self.upload_stream.record_event()
            return LoadedBatch(samples, uploaded_lengths, event)

    def _padded(self, rows: Sequence[int], *, pinned: bool) -> tuple[Tensor, Tensor]:
        """Samples (B, S) int16 of these files in the host's memory, and lengths (B,)."""
        sounds = [read_wav(self.task.files[row]) for row in rows]
        sizes = [len(sound) for sound in sounds]
        shape = (len(rows), max(sizes))
        padded = torch.zeros(shape, dtype=torch.int16, pin_memory=pinned)
        for row, sound in zip(padded.numpy(), sounds, strict=True):
            row[: len(sound)] = sound
        return padded, torch.tensor(sizes, pin_memory=pinned)

    def _features(self, batch: LoadedBatch) -> tuple[Tensor, Tensor]:
        samples = batch.samples.float() / 32768
        return self.recognizer.features(samples, batch.lengths)

    @torch.inference_mode()
    def _encode(self, features: Tensor, frames: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The frames that the decoder reads, with the script of these rows added."""
        encoded, ends = self.recognizer.encode(features, frames)
        if self.script is None:
            return encoded, ends
        T = min(encoded.shape[1], self.script.shape[1])
        script = self.script[rows, :T]
        return encoded[:, :T] + script, ends


def _gathered(batches: Sequence[Hypotheses], ends: Sequence[Tensor], rows: Tensor) -> Transcribed:
    """The batches as one, their rows back in the order of the files."""
    U = max(batch.labels.shape[1] for batch in batches)
    order = rows.argsort()

    def together(parts: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(parts))
        return joined.cpu()[order]

    def padded(parts: Sequence[Tensor]) -> Tensor:
        wide = []
        for part in parts:
            missing = U - part.shape[1]
            wide.append(pad(part, (0, missing), value=-1))
        return together(wide)

    scores = together([batch.scores for batch in batches])
    return Transcribed(
        labels=padded([batch.labels for batch in batches]),
        counts=together([batch.lengths for batch in batches]),
        frames=padded([batch.frames for batch in batches]),
        ends=together(ends),
        likelihoods=scores.float().exp(),
        impl=batches[0].impl,
    )


def read_wav(path: Path) -> np.ndarray:
    """Samples (S,) int16 of a WAV file with one channel, by the standard library."""
    with wave.open(str(path)) as file:
        channels = file.getnchannels()
        width = file.getsampwidth()
        expect(
            (channels, width) == (1, 2),
            "files",
            "WAV with one channel of 2 bytes",
            f"{channels} of {width} in {path.name}",
        )
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def write_wav(path: Path, samples: np.ndarray, rate_hz: int = 16_000) -> Path:
    """Write a WAV file with one channel; returns its path.

    Args:
        path: of the file.
        samples: (S,) int16.
        rate_hz: their sampling rate.
    """
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return path
