"""A folder of transcripts that an interrupted run resumes: what is there is done."""

import glob
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from asrkit.features import FeatureConfig
from asrkit.files import atomic, content_hash, lock
from asrkit.models import Checkpoint
from asrkit.models.encoders import dtype_of
from asrkit.models.prompts import PROMPT, SUPPRESSED, WHISPER
from asrkit.shapes import expect
from asrkit.transcribe.formats import Transcript, render
from asrkit.transcribe.options import PipelineConfig, WindowOptions

# Of a transcript's file name: temporary files have ten bytes more, and file systems take 255.
MAX_NAME_BYTES = 240


def made_by(checkpoint: Checkpoint, settings: object) -> str:
    """A hash of the model with all its weights, tokenizer, features and prompt, and `settings`.

    A core hashes about a gigabyte a second, which is little beside transcription.
    """
    tokenizer = checkpoint.tokenizer
    weights = checkpoint.model.state_dict()
    with ThreadPoolExecutor() as pool:
        marks = list(pool.map(_mark, weights.values()))
    parts: tuple[object, ...] = (
        checkpoint.model.config,
        dtype_of(checkpoint.model),
        FeatureConfig(**checkpoint.features),
        settings,
        *(checkpoint.notes.get(key) for key in (PROMPT, SUPPRESSED, WHISPER)),
    )
    tokens = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    return content_hash([[*weights], marks, tokens, *map(str, parts)])


def _mark(value: object) -> str:
    """Shape and hash of all numbers of a tensor; of what else a quantizer keeps, its text."""
    if not isinstance(value, torch.Tensor) or value.is_quantized:
        return str(value)
    numbers = value.detach().cpu().flatten().contiguous()
    digest = hashlib.sha256(numbers.view(torch.uint8).numpy().data)
    return f"{tuple(value.shape)} {digest.hexdigest()}"


def text_settings(options: WindowOptions, config: PipelineConfig) -> dict[str, object]:
    """The settings that a transcript depends on: how batches are made and computed is not."""
    search, lm = config.search, ""
    if search is not None and search.lm is not None:
        with search.lm.open("rb") as file:
            lm = hashlib.file_digest(file, "sha256").hexdigest()
        search = replace(search, lm=None)
    return {
        "window_s": options.window_s,
        "overlap_s": options.overlap_s,
        "timestamps": options.timestamps,
        "precision": config.precision,
        "max_symbols": config.max_symbols,
        "search": search,
        "lm": lm,
        "prompt": config.prompt,
    }


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
        ValueError: `path` is a file, two recordings have one name, or `path` holds transcripts of
            another model or other settings, or files that asrkit did not write.
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
        self.target = self._targets(recordings)
        self._check_key()

    def _targets(self, recordings: Sequence[tuple[Path, Path]]) -> dict[Path, Path]:
        """Where the transcript of each recording goes."""
        sources: dict[Path, Path] = {}
        for source, name in recordings:
            target = self.path / name.with_suffix(f".{self.kind}")
            expect(
                target not in sources,
                "out",
                "recordings of different names",
                f"{sources.get(target)} and {source}",
                "Rename one, or use two folders.",
            )
            sources[target] = source
        return {source: target for target, source in sources.items()}

    def _check_key(self) -> None:
        """ValueError where the transcripts that are there are not of this model and settings."""
        wanted = "transcripts of this model and these settings"
        remedy = "Name another folder."
        if self.key_file.exists():
            same = self.key_file.read_text(encoding="utf-8") == self.key
            expect(same, "out", wanted, f"those of others in {self.path}", remedy)
            return
        foreign = [str(target) for target in self.target.values() if target.exists()]
        expect(not foreign, "out", wanted, ", ".join(foreign[:3]), remedy)

    def todo(self) -> tuple[list[Path], list[Transcript]]:
        """Recordings to transcribe, and failed transcripts of those whose names are too long."""
        ready: list[Path] = []
        refused: list[Transcript] = []
        for source, target in self.target.items():
            size = len(os.fsencode(target.name))
            if size > MAX_NAME_BYTES:
                why = f"a name of {size} bytes is too long for a transcript"
                refused.append(Transcript(path=source, error=f"out: {why}. Rename the recording."))
            elif not target.exists():
                ready.append(source)
        return ready, refused

    def write(self, transcript: Transcript) -> Path:
        """Write the transcript, whole or not at all, and return its path.

        Args:
            transcript: Of a recording of the folder.

        Raises:
            OSError: It cannot be written.
            ValueError: Another run began the folder meanwhile, with another model or settings.
        """
        target = self.target[transcript.path]
        recording = target.with_suffix("").relative_to(self.path).as_posix()  # unlike b/one, a/one
        text = render(transcript, self.kind, name=recording).encode(errors="backslashreplace")
        try:
            with lock(self.path, wait=True):
                self._write(target, text)
        except OSError as error:
            why = error.strerror or error
            message = f"{target} cannot be written: {why}. The same command goes on from here."
            raise OSError(message) from None
        return target

    def _write(self, target: Path, text: bytes) -> None:
        """Write a transcript, in a locked folder: nobody else is writing what is removed here."""
        if self.key_file.exists():
            self._check_key()  # since others may have begun the folder
        else:
            with atomic(self.key_file) as part:
                part.write_text(self.key, encoding="utf-8")
        for torn in target.parent.glob(f".{glob.escape(target.stem)}-????????{target.suffix}"):
            torn.unlink()  # what a killed run was writing
        with atomic(target) as part:
            part.write_bytes(text)
