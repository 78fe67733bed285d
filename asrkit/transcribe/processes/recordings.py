"""Recordings transcribed by several processes, in the order given."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from asrkit.models import Checkpoint
from asrkit.sound_files import Sound
from asrkit.transcribe.audio import recordings
from asrkit.transcribe.formats import Transcript
from asrkit.transcribe.options import WindowOptions
from asrkit.transcribe.pipeline import Recognizer
from asrkit.transcribe.processes.cores import Layout
from asrkit.transcribe.processes.pool import Channel, Done, Ended, Message, Pool
from asrkit.transcribe.progress import progress_bar
from asrkit.transcribe.windows import Transcriber

ENDED = "audio: reading or transcribing it ended the process twice."
# A job has so many batches that its windows, which overlap, are recognised as one pool.
MOST_BATCHES = 6
MOST_RECORDINGS = 1000  # in one job
LEAST_S = 30.0  # of audio in a job: a batch that keeps a core busy
# A job is at most this part of what is left, divided by processes: so all end at about one time.
PART = 1 / 2
MOST_DOUBLINGS = 10
BYTES_PER_S = 32_000  # of a recording, guessed until some are done: 16 bits at 16 kHz


def to_stderr(line: str) -> None:
    """Print a line on stderr, above a progress bar."""
    tqdm.write(line, file=sys.stderr)


def transcribe_in_processes(
    checkpoint: Checkpoint,
    paths: str | Path | Sound | Iterable[str | Path | Sound],
    layout: Layout,
    *,
    options: WindowOptions | None = None,
    recognizer: Recognizer | None = None,
    progress: bool = False,
    warn: Callable[[str], None] = to_stderr,
) -> Iterator[Transcript]:
    """Yield one `Transcript` a file, in the order given, as `transcribe` does.

    Each process draws jobs of some minutes of audio, reads the next while it transcribes one, and
    batches a job's windows by length. So texts are those of `transcribe`, but for the rounding that
    other batches bring. One recording is transcribed by one process.

    When a process ends (a recording that crashes a decoder, somebody's kill -9), `warn` is called,
    and another process transcribes what it held, recording by recording; one that ends its process
    again is an error.

    The processes are forked when the first transcript is asked for. Until then torch must not have
    computed on several threads (`torch.set_num_threads(1)`), or `layout.threads` has to be 1.

    Args:
        checkpoint: model, tokenizer and feature settings, on a CPU.
        paths: as `transcribe` takes them.
        layout: processes, cores and threads, as `choose_layout` returns them.
        options: windows and batches; None: the defaults. Each process has `readers` threads.
        recognizer: of this checkpoint, to compute with another config than the default one.
        progress: show a bar over all processes on stderr, if that is a terminal.
        warn: called with a line about a process that ended.

    Raises:
        RuntimeError: The processes cannot work, or end again and again.
    """
    options = options or WindowOptions()
    recognizer = recognizer or Recognizer.from_checkpoint(checkpoint)
    transcriber = Transcriber(recognizer, checkpoint.tokenizer, options)
    jobs = _Jobs([*recordings(paths)], layout.workers, options.batch_s)
    shown = progress and sys.stderr.isatty()

    def work(channel: Channel) -> None:
        _transcribe(channel, transcriber)

    following = 0
    pool = Pool(layout, work, jobs.draw)
    with progress_bar(jobs.total_s(), show=shown) as bar, pool:
        for event in pool.events():
            if isinstance(event, Ended):
                warn(jobs.lost(event))
            elif isinstance(event, Message):
                jobs.note(event, bar)
            elif isinstance(event, Done):
                jobs.finish(event)
            while following in jobs.done:
                yield jobs.done.pop(following)
                following += 1


class _Job(NamedTuple):
    """Neighbouring recordings for one process."""

    first: int  # position of the first of them
    sounds: Sequence[Sound]
    alone: bool = False  # transcribed again: nothing else is in its process that could end it


class _Transcribed(NamedTuple):
    """A transcript and its position among all."""

    position: int
    transcript: Transcript


class _Jobs:
    """Recordings in jobs: those not drawn yet, those to be transcribed again, and those done.

    Args:
        sounds: All recordings.
        workers: Processes that draw.
        batch_s: Most audio in a batch, in seconds.
    """

    def __init__(self, sounds: Sequence[Sound], workers: int, batch_s: float) -> None:
        self.sounds = sounds
        self.workers = workers
        self.batch_s = batch_s
        # No file is opened here: what it holds may end the process that opens it.
        self.sizes = [_size(sound) for sound in sounds]
        self.left = sum(self.sizes)  # bytes of recordings that are not done
        self.waiting = self.left  # bytes of those that are not drawn
        self.done_bytes = 0
        self.done_s = 0.0
        self.begun = 0  # recordings that were drawn
        self.jobs = 0
        self.again: deque[_Job] = deque()
        self.done: dict[int, Transcript] = {}  # by position, until it is taken
        self.reached: dict[int, int] = {}  # next position in each job under way, by its first

    def draw(self, held: Sequence[_Job]) -> _Job | None:
        """A job for a process that holds `held`; None where it has to wait, or none is left."""
        if self.again:
            return None if held else self.again.popleft()
        if any(job.alone for job in held) or self.begun == len(self.sounds):
            return None
        limit_s = self._limit_s()
        first = self.begun
        size = 0
        while self.begun < len(self.sounds) and self.begun - first < MOST_RECORDINGS:
            size += self.sizes[self.begun]
            self.begun += 1
            if self._guess_s(size) >= limit_s:
                break
        self.waiting -= size
        self.jobs += 1
        return _Job(first, self.sounds[first : self.begun])

    def _limit_s(self) -> float:
        """Seconds of audio in the next job: twice as many each round, and fewer towards the end."""
        doublings = min(self.jobs // self.workers, MOST_DOUBLINGS)
        grown_s = self.batch_s * 2**doublings
        share_s = PART * self._guess_s(self.waiting) / self.workers
        least_s = min(LEAST_S, self.total_s() / self.workers)
        return max(least_s, min(grown_s, MOST_BATCHES * self.batch_s, share_s))

    def _guess_s(self, size: int) -> float:
        """Seconds of audio in so many bytes, by those of the recordings that are done."""
        if self.done_s:
            return size * self.done_s / self.done_bytes
        return size / BYTES_PER_S

    def total_s(self) -> float:
        """Seconds of all recordings: of those that are done, and a guess of the rest."""
        return self.done_s + self._guess_s(self.left)

    def note(self, event: Message, bar: Any) -> None:
        """Take a message: seconds that a process has recognised, or a transcript."""
        if not isinstance(event.value, _Transcribed):
            bar.update(event.value)
            return
        position, transcript = event.value
        self.reached[event.job.first] = position + 1
        self._keep(position, transcript)
        bar.total = round(self.total_s())

    def _keep(self, position: int, transcript: Transcript) -> None:
        self.done[position] = transcript
        self.left -= self.sizes[position]
        if transcript.audio_s:
            self.done_bytes += self.sizes[position]
            self.done_s += transcript.audio_s

    def finish(self, event: Done) -> None:
        """Forget a job whose recordings are all done."""
        del self.reached[event.job.first]

    def lost(self, event: Ended) -> str:
        """Transcribe what a process held again, or give it up; returns a line on what happened."""
        again = 0
        for job in event.jobs:
            start = self.reached.pop(job.first, job.first)
            for position in range(start, job.first + len(job.sounds)):
                sound = self.sounds[position]
                if job.alone:
                    self._keep(position, Transcript(path=sound.path, error=ENDED))
                    return f"{event}, now with {sound.path} alone"
                self.again.append(_Job(position, [sound], alone=True))
                again += 1
        if not again:
            return f"{event}; it held nothing"
        noun = "recording is" if again == 1 else "recordings are"
        return f"{event}; {again:,} {noun} transcribed again"


def _size(sound: Sound) -> int:
    """Bytes that stand for the length of a recording; 0 for what is no file."""
    if sound.duration_s is not None:
        return round(sound.duration_s * BYTES_PER_S)
    if sound.data is not None:
        return len(sound.data)
    try:
        return sound.path.stat().st_size
    except OSError:
        return 0


def _transcribe(channel: Channel, transcriber: Transcriber) -> None:
    """What each process does: its jobs one after the other."""
    for job in channel.jobs():
        transcripts = transcriber.job(job.sounds)
        channel.send(sum(transcript.audio_s for transcript in transcripts))
        for position, transcript in enumerate(transcripts, job.first):
            channel.send(_Transcribed(position, transcript))
        channel.done()
