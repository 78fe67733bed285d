"""Files transcribed in several forked workers, which share one model."""

import sys
from collections.abc import Iterator, Sequence

from asrkit.models import Checkpoint
from asrkit.sound_files import Sound
from asrkit.transcribe.audio import Sources, recordings
from asrkit.transcribe.bulk.layout import Layout
from asrkit.transcribe.bulk.manifests import BYTES_PER_S
from asrkit.transcribe.bulk.workers import ENDED, Workers
from asrkit.transcribe.formats import Transcript
from asrkit.transcribe.options import WindowOptions
from asrkit.transcribe.progress import Advance, progress_bar
from asrkit.transcribe.recognizer import Recognizer
from asrkit.transcribe.windows import POOL, Transcriber

MOST_BATCHES = 6  # batches of audio in a job, so that windows of similar length meet
LEAST_S = 30.0  # seconds of audio in a job: a batch that keeps a core busy


def transcribe_in_workers(
    checkpoint: Checkpoint,
    paths: Sources,
    layout: Layout,
    *,
    options: WindowOptions | None = None,
    recognizer: Recognizer | None = None,
    progress: bool = False,
) -> Iterator[Transcript]:
    """Yield one `Transcript` for each file, in the order given, as `transcribe` does.

    Each worker gets jobs of some minutes of audio, and batches their windows by length. The texts
    are those of `transcribe`, except for rounding in other batches.

    If a worker ends (a recording crashes a decoder, somebody uses kill -9), another one transcribes
    its recordings one by one. A recording that ends its worker again is an error.

    The workers are forked when the first transcript is requested. Until then torch must not have
    computed on several threads (`torch.set_num_threads(1)`), or `layout.threads` has to be 1.

    Args:
        checkpoint: Model, tokenizer and feature settings, on a CPU.
        paths: Recordings, as `transcribe` takes them.
        layout: Workers, cores and threads, as `choose_layout` returns them.
        options: Windows and batches; None: the defaults. Each worker has `readers` threads.
        recognizer: A recogniser of this checkpoint, to compute with another config.
        progress: Show one bar for all workers on stderr, if that is a terminal.

    Raises:
        RuntimeError: The workers end again and again.
    """
    options = options or WindowOptions()
    recognizer = recognizer or Recognizer.from_checkpoint(checkpoint)
    transcriber = Transcriber(recognizer, checkpoint.tokenizer, options)

    def transcribe_job(sounds: Sequence[Sound], advance: Advance) -> list[Transcript]:
        return list(transcriber.recordings(sounds, advance, batches=POOL))

    def failed(sound: Sound) -> Transcript:
        return Transcript(path=sound.path, error=ENDED)

    sounds = [*recordings(paths)]
    jobs = [*recording_jobs(sounds, layout.workers, transcriber.batch_s)]
    done: dict[int, list[Transcript]] = {}  # finished jobs that wait for earlier ones
    following = 0
    estimated_s = sum(map(_estimated_s, sounds))
    done_s = estimated_done_s = 0.0
    with (
        progress_bar(estimated_s, show=progress and sys.stderr.isatty()) as bar,
        Workers(layout, transcribe_job, failed, advance=bar.update) as workers,
    ):
        for number, transcripts in workers.results(jobs):
            done[number] = transcripts
            done_s += sum(transcript.audio_s for transcript in transcripts)
            estimated_done_s += sum(map(_estimated_s, jobs[number]))
            bar.total = round(done_s * estimated_s / (estimated_done_s or 1))
            while following in done:
                yield from done.pop(following)
                following += 1


def recording_jobs(
    sounds: Sequence[Sound], workers: int, batch_s: float
) -> Iterator[Sequence[Sound]]:
    """Yield jobs of neighbouring recordings, by the sizes of their files.

    The first job is small, so that its transcripts come soon, and each of the next is twice as
    large. Towards the end jobs shrink, so that all workers end at about the same time. No file is
    opened here, since its contents may crash the process.

    Args:
        sounds: All recordings.
        workers: Number of workers.
        batch_s: Most audio in a batch, in seconds.
    """
    sizes_s = [*map(_estimated_s, sounds)]
    left_s = sum(sizes_s)
    least_s = min(LEAST_S, batch_s, left_s / workers)
    most_s = batch_s
    job: list[Sound] = []
    job_s = 0.0
    for sound, size_s in zip(sounds, sizes_s, strict=True):
        job.append(sound)
        job_s += size_s
        if job_s >= max(least_s, min(most_s, left_s / workers / 2)):
            yield job
            left_s -= job_s
            most_s = min(2 * most_s, MOST_BATCHES * batch_s)
            job, job_s = [], 0.0
    if job:
        yield job


def _estimated_s(sound: Sound) -> float:
    """Seconds of a recording, estimated from the size of its file; 0 if it is not a file."""
    if sound.duration_s is not None:
        return sound.duration_s
    try:
        return sound.path.stat().st_size / BYTES_PER_S
    except OSError:  # reading the recording reports it
        return 0.0
