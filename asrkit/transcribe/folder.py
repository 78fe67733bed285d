"""A folder of transcripts that an interrupted run resumes: what is there is done."""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from torch import Tensor, uint8

from asrkit.files import atomic, content_hash, lock
from asrkit.models import Checkpoint
from asrkit.shapes import expect
from asrkit.transcribe.formats import Transcript, render
from asrkit.transcribe.options import PipelineConfig, WindowOptions

# Options that say how batches are made and computed: a transcript does not depend on them.
HOW = {
    "batch_s",
    "readers",
    "strategy",
    "graphs",
    "encoder",
}
LONGEST_NAME = 245  # bytes: a file system's 255, less what a name has while the file is written


def made_by(checkpoint: Checkpoint, settings: object) -> str:
    """A hash of the model with all its weights, tokenizer, features and notes, and `settings`.

    A core hashes about a gigabyte a second, which is little beside transcription.
    """
    tokenizer = checkpoint.tokenizer
    weights = checkpoint.model.state_dict()
    with ThreadPoolExecutor() as pool:
        marks = list(pool.map(_mark, weights.values()))
    tokens = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    others = (checkpoint.model.config, checkpoint.features, checkpoint.notes, settings)
    return content_hash([[*weights], marks, tokens, *map(str, others)])


def _mark(weight: Tensor) -> str:
    """Shape and hash of all numbers of a weight."""
    numbers = weight.detach().cpu().flatten().contiguous()
    return f"{tuple(weight.shape)} {content_hash(numbers.view(uint8).numpy().tobytes())}"


def text_settings(options: WindowOptions, config: PipelineConfig) -> dict[str, object]:
    """The settings that a transcript depends on; of an n-gram model's file, what is in it."""
    settings = vars(options) | vars(config)
    if config.search is not None and config.search.lm is not None:
        settings["lm"] = content_hash(config.search.lm.read_bytes())
        settings["search"] = replace(config.search, lm=None)
    return {name: value for name, value in settings.items() if name not in HOW}


class Folder:
    """Transcripts in a folder, one file a recording: the recording's name with another suffix.

    A recording is done if its transcript is there. All transcripts of a format are of one model and
    one choice of settings, whose hash stands in a hidden file beside them.

    Args:
        path: the folder; made when the first transcript is written.
        recordings: (recording, name of its transcript) pairs, as `find` returns them.
        checkpoint: what transcribes, before its weights are optimized.
        options: windows of the recordings.
        config: how the recogniser computes; None: the defaults.
        kind: the transcripts' format, one of FORMATS.

    Raises:
        ValueError: `path` is a file, two recordings have one name, a name is too long, or `path`
            holds transcripts of another model or other settings, or files that asrkit did not
            write.
    """

    def __init__(
        self,
        path: Path,
        recordings: Sequence[tuple[Path, Path]],
        checkpoint: Checkpoint,
        options: WindowOptions,
        *,
        config: PipelineConfig | None = None,
        kind: str,
    ) -> None:
        expect(not path.exists() or path.is_dir(), "out", "a folder", repr(str(path)))
        self.path = path
        self.kind = kind
        self.key = made_by(checkpoint, text_settings(options, config or PipelineConfig()))
        self.key_file = path / f".asrkit-{kind}"
        self.target = {source: path / name.with_suffix(f".{kind}") for source, name in recordings}
        times = Counter(self.target.values())
        double = [str(target) for target, number in times.items() if number > 1]
        got = f"several of {', '.join(double[:3])}"
        remedy = "Rename one, or use two folders."
        expect(not double, "out", "recordings of different names", got, remedy)
        long = [str(target) for target in times if len(os.fsencode(target.name)) > LONGEST_NAME]
        wanted = f"transcripts with names of at most {LONGEST_NAME} bytes"
        expect(not long, "out", wanted, ", ".join(long[:3]), "Rename the recording.")
        self._check_key()
        if self.key_file.exists():
            self._remove_torn()

    def _check_key(self) -> None:
        """ValueError where the transcripts that are there are not of this model and settings."""
        if self.key_file.exists():
            same = self.key_file.read_text(encoding="utf-8") == self.key
            found = [] if same else [f"those of others in {self.path}"]
        else:
            found = [str(target) for target in self.target.values() if target.exists()]
        wanted = "transcripts of this model and these settings"
        expect(not found, "out", wanted, ", ".join(found[:3]), "Name another folder.")

    def _remove_torn(self) -> None:
        """Remove what killed runs were writing."""
        torn = [*self.path.rglob(f".*-{'[0-9a-f]' * 8}.{self.kind}")]
        if torn:
            with lock(self.path, wait=True):  # what others were writing is whole, and renamed
                for file in torn:
                    file.unlink(missing_ok=True)

    def todo(self) -> list[Path]:
        """Recordings that have no transcript yet."""
        return [source for source, target in self.target.items() if not target.exists()]

    def write(self, transcript: Transcript) -> None:
        """Write the transcript, whole or not at all.

        Args:
            transcript: Of a recording of the folder.

        Raises:
            OSError: It cannot be written.
            ValueError: Another run began the folder meanwhile, with another model or settings.
        """
        target = self.target[transcript.path]
        recording = target.with_suffix("").relative_to(self.path).as_posix()  # unlike b/one, a/one
        text = render(transcript, self.kind, name=recording)
        try:
            with lock(self.path, wait=True):
                self._check_key()  # since others may have begun the folder
                if not self.key_file.exists():
                    _write(self.key_file, self.key)
                _write(target, text)
        except OSError as error:
            why = error.strerror or error
            message = f"{target} cannot be written: {why}. The same command goes on from here."
            raise OSError(message) from None


def _write(path: Path, text: str) -> None:
    with atomic(path) as part:
        part.write_bytes(text.encode(errors="backslashreplace"))
