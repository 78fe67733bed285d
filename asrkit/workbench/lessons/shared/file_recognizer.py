"""The recogniser on WAV files, stage by stage, as ladder and transcription measure it."""

import time
import wave
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from asrkit.decoders import Hypotheses
from asrkit.features import FeatureConfig, log_mel, normalize_sequential
from asrkit.models import CTCModel, TransducerModel
from asrkit.transcribe.audio import read_ahead
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.recognizer import ModelVariants, Recognizer

RATE_HZ = 16_000
STAGES = ("loading", "frontend", "encoder", "decoder")
Batch = tuple[Tensor, Tensor]  # samples (B, S) int16 on the CPU, and lengths (B,)


@dataclass(frozen=True, kw_only=True)
class Variant(PipelineConfig):
    """A `PipelineConfig` with slower alternatives, to measure what each speed-up gains.

    Args:
        normalization: normalise features for the whole batch, or utterance by utterance.
        order: batch utterances of similar length, or in the order of the files.
        loading: read the next audio in a thread during computation, or before it.
    """

    normalization: Literal["batched", "one_by_one"] = "batched"
    order: Literal["by_length", "as_given"] = "by_length"
    loading: Literal["overlapped", "before"] = "overlapped"


class VariantRecognizer(Recognizer):
    """The recogniser of a `Variant`."""

    @torch.inference_mode()
    def features(self, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """As of `Recognizer`, with the normalisation of the variant."""
        if getattr(self.config, "normalization", "batched") == "batched":
            return super().features(waveforms, lengths)
        plain = replace(self.feature_config, normalization="none")
        with self._arithmetic():
            rows = log_mel(waveforms.to(self.device), lengths.to(self.device), config=plain)
            return normalize_sequential(*rows), rows[1]


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """N WAV files, the model that transcribes them, and the batch size.

    Recognisers of a task share the model's variants and the encoder's CUDA graphs.
    """

    model: TransducerModel | CTCModel  # float32, in eval mode, on `device`
    files: Sequence[Path]  # WAV, one channel of int16
    samples: Sequence[int]  # length of each file
    batch: int  # files transcribed at once
    features: FeatureConfig = field(default_factory=FeatureConfig)
    # (N, T, D) float32, added to the encoder's frames: see scripted.py
    script: Tensor | None = None
    labels: Sequence[Sequence[int]] = ()  # labels of each file, if known
    device: str = "cpu"
    in_memory: bool = False  # whether a recogniser reads the files only once, in its constructor

    @cached_property
    def variants(self) -> ModelVariants:
        """The model with the weights and layouts of its recognisers."""
        return ModelVariants(self.model)


class Transcribed(NamedTuple):
    """The hypotheses of N files in their order, on the CPU."""

    labels: Tensor  # (N, U) int64, padded with -1
    counts: Tensor  # (N,) labels of each file
    frames: Tensor  # (N, U) int64, the encoder frame of each label
    ends: Tensor  # (N,) encoder frames of each file
    likelihoods: Tensor  # (N,) float32, probability of the labels
    impl: str  # implementation of the decoder

    def tokens(self) -> list[list[int]]:
        """The labels of each file as a list."""
        rows = zip(self.labels.tolist(), self.counts.tolist(), strict=True)
        return [row[:count] for row, count in rows]


class FileRecognizer:
    """The recogniser of a task's files with one config; a call transcribes them all.

    Raises:
        ValueError: the device or the model does not support the config.
    """

    def __init__(self, task: Task, config: Variant) -> None:
        self.task = task
        self.config = config
        self.recognizer = VariantRecognizer(task.variants, config, features=task.features)
        self.cuda = task.device == "cuda"
        rows = list(range(len(task.files)))
        if config.order == "by_length":
            rows.sort(key=task.samples.__getitem__, reverse=True)
        starts = range(0, len(rows), task.batch)
        self.plan = [rows[start : start + task.batch] for start in starts]
        self.scripts: list[Tensor] | None = None  # one for each batch
        if task.script is not None:
            script = task.script.to(self.recognizer.dtype)
            self.scripts = [script[batch] for batch in self.plan]
        self.loaded = [self._load(batch) for batch in self.plan] if task.in_memory else None

    def __call__(self, after_stage: Callable[[], object] = bool) -> Transcribed:
        """The hypotheses of all files; `after_stage` is called after each stage of each batch."""
        results: list[Hypotheses] = []
        all_ends: list[Tensor] = []
        for number, (samples, lengths) in enumerate(self._batches()):
            samples = samples.to(self.task.device, non_blocking=True)
            lengths = lengths.to(self.task.device, non_blocking=True)
            after_stage()
            features, frames = self.recognizer.features(samples.float() / 32768, lengths)
            after_stage()
            encoded, ends = self.encode(features, frames, number)
            after_stage()
            results.append(self.recognizer.decode(encoded, ends))
            all_ends.append(ends.clone())  # a CUDA graph overwrites them
            after_stage()
        rows = torch.tensor([row for batch in self.plan for row in batch])
        return _joined(results, all_ends, rows)

    def stage_ms(self) -> dict[str, float]:
        """Milliseconds of one call by stage, with the device synchronised after each.

        If a thread loads the audio, "loading" is the time spent waiting for it.
        """
        ends_s = [time.perf_counter()]

        def clock() -> None:
            if self.cuda:
                torch.cuda.synchronize()
            ends_s.append(time.perf_counter())

        self(clock)
        stages_ms = 1e3 * np.diff(ends_s).reshape(-1, len(STAGES)).sum(0)
        return dict(zip(STAGES, stages_ms.tolist(), strict=True))

    def _batches(self) -> Iterable[Batch]:
        if self.loaded is not None:
            return self.loaded
        batches = map(self._load, self.plan)
        if self.config.loading == "before":
            return batches
        return read_ahead([batches], iter, 1, ahead=1)

    def _load(self, rows: Sequence[int]) -> Batch:
        sounds = [torch.tensor(read_wav(self.task.files[row])) for row in rows]
        samples = pad_sequence(sounds, batch_first=True)
        lengths = torch.tensor([len(sound) for sound in sounds])
        if self.cuda:
            return samples.pin_memory(), lengths.pin_memory()
        return samples, lengths

    @torch.inference_mode()
    def encode(self, features: Tensor, frames: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The encoder's frames, with the script of this batch added."""
        encoded, ends = self.recognizer.encode(features, frames)
        if self.scripts is not None:
            script = self.scripts[number][:, : encoded.shape[1]]
            encoded = encoded[:, : script.shape[1]] + script
        return encoded, ends


def _joined(batches: Sequence[Hypotheses], ends: Sequence[Tensor], rows: Tensor) -> Transcribed:
    """The batches as one, in the order of the files."""
    U = max(batch.labels.shape[1] for batch in batches)
    order = rows.argsort()

    def concatenated(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([*parts]).cpu()[order]

    def padded(parts: Iterable[Tensor]) -> Tensor:
        return concatenated(pad(part, (0, U - part.shape[1]), value=-1) for part in parts)

    return Transcribed(
        labels=padded(batch.labels for batch in batches),
        counts=concatenated(batch.lengths for batch in batches),
        frames=padded(batch.frames for batch in batches),
        ends=concatenated(ends),
        likelihoods=concatenated(batch.scores for batch in batches).float().exp(),
        impl=batches[0].impl,
    )


def read_wav(path: Path) -> np.ndarray:
    """Samples (S,) int16 of a WAV file with one channel, read by the standard library."""
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2), path.name
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def write_wav(path: Path, samples: np.ndarray) -> Path:
    """Write samples (S,) int16 as a WAV file at 16 kHz with one channel; returns its path."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return path
