"""Sound in, text out: windows of recordings, batches of them, features, model, decoder, and one
transcript a file.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from asrkit.decoders import ctc_greedy, transducer_greedy
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import Checkpoint, TransducerModel
from asrkit.transcribe.audio import Options, blocks, find, fits, read_audio, seconds, windows
from asrkit.transcribe.folder import Folder
from asrkit.transcribe.formats import FORMATS, TIMED, Transcript, render, summary
from asrkit.transcribe.seams import Label, Word, join, words

__all__ = [
    "FORMATS",
    "TIMED",
    "Folder",
    "Label",
    "Options",
    "Transcript",
    "Word",
    "find",
    "read_audio",
    "recognize",
    "render",
    "summary",
    "transcribe",
]

# batches read ahead and sorted by length, which leaves little padding; more would only need memory
# and patience
POOL = 8


@torch.inference_mode()
def recognize(
    checkpoint: Checkpoint,
    waveforms: Tensor,
    lengths: Tensor,
    *,
    max_symbols: int | None = None,
    confidence: bool = False,
) -> Hypotheses:
    """Greedy hypotheses for waveforms (B, S) at the model's rate with lengths (B,) in samples.

    max_symbols: labels on one frame at most, for a transducer; None: what the checkpoint's notes
    say, or 10.
    confidence: also the probability of each label, for CTC on the frame that it starts on.
    """
    config, model = FeatureConfig(**checkpoint.features), checkpoint.model
    device = next(model.parameters()).device
    features, frames = log_mel(waveforms.to(device), lengths.to(device), config=config)
    if isinstance(model, TransducerModel):
        encoded, frames, _ = model.encode(features, frames)
        most = max_symbols or checkpoint.notes.get("max_symbols", 10)
        return transducer_greedy(
            model,
            encoded,
            frames,
            max_symbols=most,
            confidence="max_prob" if confidence else "none",
        )
    log_probs, frames = model(features, frames)
    found = ctc_greedy(log_probs, frames)
    if not confidence:
        return found
    rows = torch.arange(len(log_probs), device=device)[:, None]
    sure = (
        log_probs[rows, found.frames.clamp(min=0), found.labels.clamp(min=0)]
        .exp()
        .masked_fill(found.labels < 0, -1.0)
    )
    return replace(found, confidence=sure.float())


class _Piece(NamedTuple):
    """One window of one file, or why there is none."""

    file: int
    start: int  # samples
    waveform: Tensor  # (S,)
    new: int  # samples that no window before it has
    last: bool
    error: str = ""


def transcribe(
    checkpoint: Checkpoint,
    paths: str | Path | Iterable[str | Path],
    *,
    options: Options | None = None,
    progress: bool = False,
) -> Iterator[Transcript]:
    """One `Transcript` a file, in the order given; a broken file yields its error and the rest goes
    on.

    Folders stand for the sound files in them (`find`). Windows of one file and of several share
    batches: as many as fill POOL batches (the first time one, then two, four) are read, sorted by
    length and recognised, while the next are read by a thread. So memory is bounded, however long a
    file is. A transcript comes as soon as its file and those before it are heard, the first after a
    batch or two if its file is short. A window is to the model an utterance of its own: features
    are normalised over it, not over the file, and what is said in the next is unknown, except in
    the overlap. A file of at most `window_s` is one window. What has no sound (zeros, or less than
    one frame of the features) has no text. A batch that needs too much memory is tried in halves.
    progress: a bar on stderr, where that is a terminal.
    """
    options = options or Options()
    files = [file for file, _ in find(paths)]
    job = _Job(checkpoint, files, options)
    silent = not (progress and sys.stderr.isatty())
    total = 0.0 if silent else sum(map(seconds, files))
    bar = tqdm(
        total=total,
        disable=silent,
        bar_format="{l_bar}{bar}| {n:.0f} of {total:.0f} s [{elapsed}<{remaining}{postfix}]",
    )
    with bar:
        for pool in _ahead(_pools(job.pieces(), options.batch_s * job.rate_hz)):
            yield from job.run(pool, bar)


def _pools(pieces: Iterable[_Piece], batch: float) -> Iterator[list[_Piece]]:
    """`pieces` in lists of about `batch` samples, then twice as many each time, up to POOL batches:
    the first come soon.
    """
    pool, held, budget = list[_Piece](), 0, batch
    for piece in pieces:
        pool.append(piece)
        held += len(piece.waveform)
        if held >= budget:
            yield pool
            pool, held, budget = [], 0, min(2 * budget, POOL * batch)
    yield pool


def _ahead(pools: Iterator[list[_Piece]]) -> Iterator[list[_Piece]]:
    """`pools`, of which the next is read by a thread while this one is used."""
    with ThreadPoolExecutor(1) as reader:
        following: Future[list[_Piece]] = reader.submit(next, pools, [])
        while pool := following.result():
            following = reader.submit(next, pools, [])
            yield pool


class _Job:
    """The files of one call: from them to pieces, and from what was heard in these to transcripts."""

    def __init__(self, checkpoint: Checkpoint, files: Sequence[Path], options: Options) -> None:
        config = FeatureConfig(**checkpoint.features)
        self.checkpoint, self.files, self.options = checkpoint, files, options
        self.rate_hz, self.window_samples = config.rate_hz, config.window_samples
        self.frame = (
            config.hop_samples * checkpoint.model.config.encoder.subsampling
        )  # samples of an encoded frame
        self.labels, self.end, self.compute_s, self.error = (
            list[Label](),
            0,
            0.0,
            "",
        )  # of the file that is being put together

    def pieces(self) -> Iterator[_Piece]:
        """Windows of all files; whole encoded frames apart, so that two that overlap see the same
        ones.
        """
        overlap = round(self.options.overlap_s * self.rate_hz / self.frame) * self.frame
        size = max(
            round(self.options.window_s * self.rate_hz / self.frame) * self.frame,
            2 * overlap,
            self.frame,
        )
        for file, path in enumerate(self.files):
            try:
                for start, waveform, last in windows(blocks(path, self.rate_hz), size, overlap):
                    yield _Piece(file, start, waveform, len(waveform) - overlap * (start > 0), last)
            except (ValueError, RuntimeError, OSError, MemoryError) as error:
                yield _Piece(file, 0, torch.zeros(0), 0, True, _one_line(error))

    def run(self, pool: Sequence[_Piece], bar: tqdm) -> Iterator[Transcript]:
        """Recognise `pool`, of several batches always the one with the earliest piece; yields the
        files that end in it.
        """
        loud = [
            n
            for n, piece in enumerate(pool)
            if len(piece.waveform) >= self.window_samples and piece.waveform.any()
        ]
        heard: dict[int, list[Label] | str] = {n: [] for n in {*range(len(pool))} - {*loud}}
        took = dict.fromkeys(heard, 0.0)
        self.show(bar, [pool[n] for n in heard])
        batches = iter(
            sorted(
                fits([len(pool[n].waveform) for n in loud], self.options.batch_s * self.rate_hz),
                key=min,
            )
        )
        for n, piece in enumerate(pool):
            if n not in heard:
                rows, start = [loud[place] for place in next(batches)], time.perf_counter()
                heard |= zip(rows, self.hear([pool[row] for row in rows]), strict=True)
                share = (time.perf_counter() - start) / sum(len(pool[row].waveform) for row in rows)
                took |= {row: share * len(pool[row].waveform) for row in rows}
                self.show(bar, [pool[row] for row in rows])
            self.compute_s += took[n]
            if (done := self.add(piece, heard[n])) is not None:
                yield done

    def show(self, bar: tqdm, done: Sequence[_Piece]) -> None:
        """Move the bar; RTFx is audio over time so far, reading included."""
        bar.update(sum(piece.new for piece in done) / self.rate_hz)
        bar.set_postfix_str(f"RTFx {bar.n / max(bar.format_dict['elapsed'], 1e-3):.0f}")

    def hear(self, pieces: Sequence[_Piece]) -> list[list[Label] | str]:
        """Labels of each piece, or what went wrong; a batch that fails is tried in halves."""
        try:
            return self._labels(pieces)
        except (
            RuntimeError,
            MemoryError,
            ValueError,
        ) as error:  # torch has no memory: a RuntimeError
            why = _one_line(error)
        if len(pieces) == 1:
            return [why]
        half = len(pieces) // 2
        return self.hear(pieces[:half]) + self.hear(pieces[half:])

    def _labels(self, pieces: Sequence[_Piece]) -> list[list[Label] | str]:
        waveforms = pad_sequence([piece.waveform for piece in pieces], batch_first=True)
        lengths = torch.tensor([len(piece.waveform) for piece in pieces])
        found = recognize(self.checkpoint, waveforms, lengths, confidence=self.options.timestamps)
        sure = found.confidence if found.confidence is not None else torch.ones(found.labels.shape)
        columns = [part.tolist() for part in (found.labels, found.frames, found.durations, sure)]
        heard = list[list[Label] | str]()
        for row, (piece, N, score) in enumerate(
            zip(pieces, found.lengths.tolist(), found.scores.tolist(), strict=True)
        ):
            if score != score:
                dtype = next(self.checkpoint.model.parameters()).dtype
                heard.append(
                    f"model: expected finite scores, got NaN in {dtype}. Try another --dtype."
                )
                continue
            frames = zip(*(column[row][:N] for column in columns), strict=True)
            heard.append([self._label(piece, *one) for one in frames])
        return heard

    def _label(
        self, piece: _Piece, token: int, frame: int, duration: int, confidence: float
    ) -> Label:
        """RNN-T labels have no length: they end with the frame they are on."""
        start, end = (
            piece.start + frame * self.frame,
            piece.start + (frame + max(duration, 1)) * self.frame,
        )
        limit = piece.start + len(piece.waveform)
        return Label(
            token, min(start, limit) / self.rate_hz, min(end, limit) / self.rate_hz, confidence
        )

    def add(self, piece: _Piece, heard: list[Label] | str) -> Transcript | None:
        """Join a piece to what was heard of its file so far; the transcript if it was the last one."""
        self.error = self.error or piece.error or (heard if isinstance(heard, str) else "")
        if not self.error and not isinstance(heard, str):
            self.labels = (
                join(self.labels, heard, piece.start / self.rate_hz, self.end / self.rate_hz)
                if self.end
                else heard
            )
        self.end = piece.start + len(piece.waveform)
        if not piece.last:
            return None
        path, tokenizer = self.files[piece.file], self.checkpoint.tokenizer
        done = Transcript(path=path, compute_s=self.compute_s, error=self.error)
        if not self.error:
            said = tuple(words(self.labels, tokenizer)) if self.options.timestamps else ()
            text = tokenizer.decode([label.token for label in self.labels])
            done = replace(done, text=text, audio_s=self.end / self.rate_hz, words=said)
        self.labels, self.end, self.compute_s, self.error = [], 0, 0.0, ""
        return done


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
