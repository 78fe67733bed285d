"""One recogniser of sound files, whose speed-ups are switched on one by one: the same tokens,
sooner.
"""

import time
import wave
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from asrkit.decoders import Hypotheses, ctc_greedy, ctc_greedy_sequential, transducer_greedy
from asrkit.features import FeatureConfig, log_mel, normalize_sequential
from asrkit.models import CTCModel, TransducerModel, optimize
from asrkit.models.transducer import log_probs
from asrkit.shapes import expect, whole
from asrkit.workbench.bench.ceilings import tf32
from asrkit.workbench.bench.suites.encoder import graphed

# Feature frames that batches are rounded up to, so that few graphs of an encoder serve many
# lengths. 128 of them are 16 encoder
# frames: rows of attention scores begin at multiples of 32 bytes in half precision. Of 512
# utterances like LibriSpeech's, sorted,
# in batches of 16, this adds 9 % of frames and makes 13 graphs; 512 would add 31 % (35 % where 32
# are two batches), for 5.
STEP = 128


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How sound becomes tokens. Each field begins with the slow way, which is the default; notebook
    13 explains them in turn.

    frontend: how features are normalised. decoder: "batched" is frame looping for a transducer; CTC
    has no labels to loop over.
    arithmetic: autocast is the encoder's; in inference mode it keeps no casts, so a decoder would
    cast its weights at each of its many small steps. encoder: "optimized" by
    asrkit.models.optimize, which folds and packs on a CPU and fuses on CUDA. encoding: "replayed"
    as a graph, on CUDA. graphs: of windowed looping. turn: how such a graph computes a turn. order: of
    the utterances, which are cut into batches. loading: a batch is read from its files before it is
    computed, or by a thread during the one before.
    """

    frontend: Literal["sequential", "batched"] = "sequential"
    decoder: Literal["one_by_one", "batched", "windowed_looping"] = "one_by_one"
    arithmetic: Literal["float32", "autocast", "bfloat16"] = "float32"
    encoder: Literal["eager", "optimized"] = "eager"
    encoding: Literal["launched", "replayed"] = "launched"
    graphs: Literal["off", "step", "full"] = "off"
    turn: Literal["plain", "fused"] = "plain"
    order: Literal["as_they_come", "by_length"] = "as_they_come"
    loading: Literal["before", "overlapped"] = "before"

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            known, got = get_args(kind), getattr(self, name)
            expect(got in known, name, "one of " + ", ".join(map(repr, known)), repr(got))
        loops = self.graphs == "off" or self.decoder == "windowed_looping"
        expect(
            loops,
            "graphs",
            f"'off' with decoder={self.decoder!r}",
            repr(self.graphs),
            "Only windowed looping runs as a graph.",
        )
        able = self.turn == "plain" or self.graphs != "off"
        expect(
            able,
            "turn",
            "'plain' with graphs='off'",
            repr(self.turn),
            "Only a graph's turn can be fused.",
        )

    @property
    def weights(self) -> torch.dtype:
        """What the model's weights are kept in."""
        return torch.bfloat16 if self.arithmetic == "bfloat16" else torch.float32


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """N sound files, the model that is to hear them, and how many of them at once.

    `script` (N, T, D) is added to the frames that the decoder reads, or to those that a CTC head
    does: see asrkit.workbench.bench.suites.ladder.
    """

    model: TransducerModel | CTCModel  # float32, in eval mode, on `device`
    files: Sequence[Path]  # WAV, one channel of int16 at the rate of `features`
    samples: Sequence[int]  # of each, as a manifest has them
    batch: int
    features: FeatureConfig = field(default_factory=FeatureConfig)
    script: Tensor | None = None
    labels: Sequence[Sequence[int]] | None = (
        None  # of each file, where it is known what is to be heard
    )
    device: str = "cpu"
    made: dict[Any, Any] = field(default_factory=dict)  # the model as pipelines want it

    def __post_init__(self) -> None:
        expect(
            0 < len(self.files) == len(self.samples),
            "files, samples",
            "as many of each, not none",
            len(self.samples),
        )
        expect(whole(self.batch, 1), "batch", "at least 1", self.batch)
        kind = self.features.normalization
        expect(
            kind == "per_feature",
            "features",
            "normalization='per_feature'",
            repr(kind),
            "There is no other loop to replace.",
        )

    def script_for(self, how: Pipeline) -> Tensor | None:
        """The script in the dtype of the model's weights."""
        if self.script is not None and how.weights not in self.made:
            self.made[how.weights] = self.script.to(how.weights)
        return self.made.get(how.weights)

    def model_for(self, how: Pipeline) -> TransducerModel | CTCModel:
        """The model with the weights and the encoder of `how`, made once; ValueError where that
        cannot be.
        """
        key = how.weights, how.encoder
        if key not in self.made:
            plain = key == (torch.float32, "eager")
            model: Any = self.model if plain else deepcopy(self.model).to(how.weights)
            if how.encoder == "optimized":
                model.encoder = optimize(model.encoder)
            self.made[key] = model
        return self.made[key]


class Heard(NamedTuple):
    """What was heard in N files, in their order, whatever the batches were. On the CPU."""

    labels: Tensor  # (N, U) int64, padded with -1
    counts: Tensor  # (N,) of them
    frames: Tensor  # (N, U) int64, the encoder's frame of each
    ends: Tensor  # (N,) encoder frames
    scores: Tensor  # (N,) float32, log-probability in nats

    def tokens(self) -> list[list[int]]:
        """The labels as one list a file."""
        return [
            row[:count]
            for row, count in zip(self.labels.tolist(), self.counts.tolist(), strict=True)
        ]


class Sound(NamedTuple):
    """A batch on its device, and what says that it has arrived there."""

    waves: Tensor  # (B, S) int16
    lengths: Tensor  # (B,)
    arrived: Any = None  # a CUDA event


class Recogniser:
    """A pipeline with its model ready; a call hears all files. ValueError where the device or the
    model cannot take part.
    """

    def __init__(self, task: Task, how: Pipeline) -> None:
        cuda, ctc = task.device.startswith("cuda"), isinstance(task.model, CTCModel)
        expect(
            cuda or how.encoding == "launched",
            "encoding",
            "'launched' on a CPU",
            repr(how.encoding),
        )
        expect(
            cuda or how.graphs == "off",
            "graphs",
            "'off' on a CPU",
            repr(how.graphs),
            "CUDA graphs need a CUDA device.",
        )
        expect(
            not ctc or how.decoder != "windowed_looping",
            "decoder",
            "'one_by_one' or 'batched' for CTC",
            repr(how.decoder),
        )
        self.task, self.how, self.model = task, how, task.model_for(how)
        self.script = task.script_for(how)
        rows = sorted(
            range(len(task.files)),
            key=lambda row: -task.samples[row] if how.order == "by_length" else row,
        )
        self.plan = [rows[start : start + task.batch] for start in range(0, len(rows), task.batch)]
        self.where = [torch.tensor(batch, device=task.device) for batch in self.plan]
        # Arms share graphs of one encoder in one arithmetic, and all graphs one pool: a batch is
        # decoded before another is encoded.
        self.captured: dict[tuple[int, int], Any] = task.made.setdefault(
            ("graphs", how.arithmetic, how.encoder), {}
        )
        self.pool = (
            task.made.setdefault("pool", torch.cuda.graph_pool_handle())
            if how.encoding == "replayed"
            else None
        )
        self.side = torch.cuda.Stream(task.device) if cuda and how.loading == "overlapped" else None

    @torch.inference_mode()
    def __call__(self, mark: Callable[[str], object] = bool, only: slice = slice(None)) -> Heard:
        """What is heard; `mark` is told each stage's name when it ends, `only` picks batches of the
        plan.
        """
        found = list[tuple[Hypotheses, Tensor]]()
        with tf32(False):
            for sound, where in zip(self._sounds(self.plan[only]), self.where[only], strict=True):
                mark("loading")
                features, frames = self._frontend(sound)
                mark("frontend")
                encode = self._replay if self.how.encoding == "replayed" else self._encode
                encoded, ends = encode(features, frames)
                if self.script is not None:
                    T = min(encoded.shape[1], self.script.shape[1])
                    encoded = encoded[:, :T] + self.script[where, :T]
                mark("encoder")
                found.append(
                    (self._decode(encoded, ends), ends.clone())
                )  # a graph's own `ends` is written again
                mark("decoder")
        return _gathered(found, torch.cat(self.where[only]).cpu())

    def probe(self) -> None:
        """Hears the batch with the longest file, to find out whether the machine can: RuntimeError
        or ValueError if not.

        It cannot either if it hears other labels than are known.
        """
        longest = max(
            range(len(self.plan)),
            key=lambda number: max(self.task.samples[row] for row in self.plan[number]),
        )
        heard = self(only=slice(longest, longest + 1)).tokens()
        known = self.task.labels and [
            [*self.task.labels[row]] for row in sorted(self.plan[longest])
        ]
        if known and heard != known:
            raise RuntimeError("it hears other labels than are known")

    def spent(self) -> dict[str, float]:
        """Milliseconds of one call by stage, the device waited for after each. Of loading by a
        thread: what it is waited for.
        """
        took, last = Counter[str](), time.perf_counter()

        def mark(stage: str) -> None:
            nonlocal last
            if self.task.device.startswith("cuda"):
                torch.cuda.synchronize()
            now = time.perf_counter()
            took[stage] += 1e3 * (now - last)  # type: ignore[assignment]
            last = now

        self(mark)
        return dict(took)

    def _sounds(self, plan: Sequence[Sequence[int]]) -> Iterator[Sound]:
        if self.how.loading == "before":
            yield from map(self._load, plan)
            return
        with ThreadPoolExecutor(
            1
        ) as reader:  # one batch ahead, so that memory does not grow with the number of files
            ahead = reader.submit(self._load, plan[0])
            for following in [*plan[1:], None]:
                sound = ahead.result()
                if following:
                    ahead = reader.submit(self._load, following)
                if sound.arrived is not None:
                    here = torch.cuda.current_stream()
                    here.wait_event(sound.arrived)
                    for part in sound[:2]:
                        part.record_stream(
                            here
                        )  # or its memory would be the side stream's again while it is read here
                yield sound

    def _load(self, rows: Sequence[int]) -> Sound:
        read = [read_wav(self.task.files[row]) for row in rows]
        sizes, pinned = [len(one) for one in read], self.side is not None
        lengths = torch.tensor(sizes, pin_memory=pinned)
        padded = torch.zeros(len(rows), max(sizes), dtype=torch.int16, pin_memory=pinned)
        for row, one in zip(padded.numpy(), read, strict=True):
            row[: len(one)] = one
        if self.side is None:
            return Sound(padded.to(self.task.device), lengths.to(self.task.device))
        with torch.cuda.stream(self.side):
            waves, ends = (
                part.to(self.task.device, non_blocking=True) for part in (padded, lengths)
            )
            return Sound(waves, ends, self.side.record_event())

    def _frontend(self, sound: Sound) -> tuple[Tensor, Tensor]:
        waves, config = sound.waves.float() / 32768, self.task.features
        if self.how.frontend == "batched":
            return log_mel(waves, sound.lengths, config=config)
        features, frames = log_mel(
            waves, sound.lengths, config=replace(config, normalization="none")
        )
        return normalize_sequential(features, frames), frames

    def _encode(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(
            features.device.type, torch.bfloat16, enabled=self.how.arithmetic == "autocast"
        ):
            if isinstance(self.model, CTCModel):
                return self.model.encoder(features, frames)
            return self.model.encode(features, frames)[:2]

    def _replay(self, features: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """`_encode` by a graph for this size, captured at its first batch; what lies in the padding
        does not matter.
        """
        B, T, F = features.shape
        key = B, rounded(T)
        if key not in self.captured:
            held = features.new_zeros(*key, F), frames.clone()
            self.captured[key] = held, graphed(partial(self._encode, *held), self.pool)
        held, replay = self.captured[key]
        held[0][:, :T].copy_(features)
        held[1].copy_(frames)
        return replay()

    def _decode(self, encoded: Tensor, ends: Tensor) -> Hypotheses:
        encoded = encoded.to(self.how.weights)
        if isinstance(self.model, CTCModel):
            decode = ctc_greedy if self.how.decoder == "batched" else ctc_greedy_sequential
            return decode(log_probs(self.model.output(encoded)), ends)
        strategy: Any = "frame_looping" if self.how.decoder == "batched" else self.how.decoder
        turn = "auto" if self.how.graphs == "off" else self.how.turn
        return transducer_greedy(
            self.model, encoded, ends, strategy=strategy, graphs=self.how.graphs, turn=turn
        )


def rounded(T: int) -> int:
    """Feature frames in the graph that serves T: a multiple of STEP."""
    return -(-T // STEP) * STEP


def _gathered(found: Sequence[tuple[Hypotheses, Tensor]], rows: Tensor) -> Heard:
    """Batches as one, their rows back in the order of the files."""
    U, place = max(one.labels.shape[1] for one, _ in found), rows.argsort()

    def together(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(
            [
                pad(part, (0, U - part.shape[1]), value=-1) if part.ndim > 1 else part
                for part in parts
            ]
        ).cpu()[place]

    heard, ends = zip(*found, strict=True)
    labels, counts, frames, scores = (
        [getattr(part, name) for part in heard]
        for name in ("labels", "lengths", "frames", "scores")
    )
    return Heard(
        together(labels),
        together(counts),
        together(frames),
        together(ends),
        together(scores).float(),
    )


def read_wav(path: Path) -> np.ndarray:
    """Samples (S,) int16 of a WAV file with one channel, by the standard library."""
    with wave.open(str(path)) as file:
        kind = file.getnchannels(), file.getsampwidth()
        expect(
            kind == (1, 2),
            "files",
            "WAV with one channel of 2 bytes",
            f"{kind[0]} of {kind[1]} in {path.name}",
        )
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def write_wav(path: Path, samples: np.ndarray, rate_hz: int = 16_000) -> Path:
    """`path`, at which samples (S,) int16 now lie."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return path
