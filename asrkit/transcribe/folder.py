"""A folder of transcripts that an interrupted run resumes: a log beside the files says which are
done, and what made them.
"""

import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from asrkit.features import FeatureConfig
from asrkit.files import atomic, content_hash, lock
from asrkit.models import Checkpoint
from asrkit.models.dtypes import dtype_of
from asrkit.models.prompts import PROMPT, SUPPRESSED
from asrkit.shapes import expect
from asrkit.transcribe.formats import Transcript, render
from asrkit.transcribe.options import PipelineConfig, WindowOptions

# Of a transcript's file name: temporary files have ten bytes more, and file systems take 255.
MAX_NAME_BYTES = 240
LOG = ".asrkit-transcripts.jsonl"


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
    )
    for key in (PROMPT, SUPPRESSED):
        if key in checkpoint.notes:  # else as before there were such notes
            parts += (checkpoint.notes[key],)
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
    settings: dict[str, object] = {
        "window_s": options.window_s,
        "overlap_s": options.overlap_s,
        "timestamps": options.timestamps,
        "precision": config.precision,
        "max_symbols": config.max_symbols,
    }
    search = config.search
    if search is not None:  # else as before there was a beam, so that no transcript is made anew
        settings["search"] = replace(search, lm=None)
        if search.lm is not None:
            with search.lm.open("rb") as file:
                settings["lm"] = hashlib.file_digest(file, "sha256").hexdigest()
    if config.prompt is not None:
        settings["prompt"] = config.prompt
    return settings


class Folder:
    """Transcripts in a folder, one file a recording: the recording's name with another suffix.

    A recording is done if its transcript is there with the content the log says, made from a file
    of this size and time by the same model and settings. Other transcripts of this log are made
    anew; `anew` counts them. A file that asrkit did not write, or that was edited since, is left
    alone and reported.

    Args:
        path: the folder; made when the first transcript is written.
        recordings: (recording, name of its transcript) pairs, as `find` returns them.
        checkpoint: what transcribes, before its weights are optimized.
        options: windows of the recordings.
        config: how the recogniser computes; None: the defaults.
        kind: the transcripts' format, one of FORMATS.
        fresh: make and overwrite all.

    Raises:
        ValueError: `path` is a file, or two recordings have one name.
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
        fresh: bool = False,
    ) -> None:
        expect(not path.exists() or path.is_dir(), "out", "a folder", repr(str(path)))
        self.path = path
        self.kind = kind
        self.fresh = fresh
        self.anew = 0
        self.key = made_by(checkpoint, text_settings(options, config or PipelineConfig()))
        self.target = self._targets(recordings)
        # now: a recording that is read later may have changed meanwhile
        self.state = {source: _state(source) for source in self.target}
        self.log = self._read_log()

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

    def _read_log(self) -> dict[str, list[dict[str, object]]]:
        """The log's entries by name of the transcript, in the order in which they were written."""
        entries: dict[str, list[dict[str, object]]] = {}
        file = self.path / LOG
        if not file.exists():
            return entries
        for line in file.read_bytes().splitlines():
            try:
                entry = json.loads(line)
                entries.setdefault(entry["name"], []).append(entry)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # torn by a crash: its transcript is made anew
        return entries

    def todo(self) -> tuple[list[Path], list[Transcript]]:
        """Recordings to transcribe, and failed transcripts of those whose place is taken."""
        ready: list[Path] = []
        refused: list[Transcript] = []
        self.anew = 0
        for source, target in self.target.items():
            error = self._refusal(target)
            if error:
                refused.append(Transcript(path=source, error=error))
            elif self.fresh or not target.exists():
                ready.append(source)
            elif not self._is_done(source, target):
                ready.append(source)
                self.anew += 1
        return ready, refused

    def _refusal(self, target: Path) -> str:
        """Why nothing can be written to `target`; "" where it can."""
        size = len(os.fsencode(target.name))
        if size > MAX_NAME_BYTES:
            return (
                f"out: a name of {size} bytes is too long for a transcript. Rename the recording."
            )
        if target.exists() and not target.is_file():
            return f"out: {target} is no file. Move it."
        if self.fresh or not target.exists():
            return ""
        known = [entry.get("content") for entry in self._entries(target)]
        if _content(target) in known:
            return ""
        return f"out: {target} is not asrkit's or was edited since. Move it, or pass --fresh."

    def _is_done(self, source: Path, target: Path) -> bool:
        return self._entries(target)[-1] == self._entry(source, target, _content(target))

    def write(self, transcript: Transcript) -> Path:
        """Write the transcript, whole or not at all, and return its path.

        Args:
            transcript: Of a recording of the folder.

        Raises:
            OSError: It cannot be written.
        """
        target = self.target[transcript.path]
        recording = self._name(target.with_suffix(""))  # a/one and b/one stay apart
        text = render(transcript, self.kind, name=recording).encode(errors="backslashreplace")
        entry = json.dumps(self._entry(transcript.path, target, content_hash(text)))
        try:
            self._write(target, text, entry)
        except OSError as error:
            why = error.strerror or error
            message = f"{target} cannot be written: {why}. The same command goes on from here."
            raise OSError(message) from None
        return target

    def _write(self, target: Path, text: bytes, entry: str) -> None:
        """Write the log first, so that no file of ours ever looks foreign, then the transcript."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOG).open("ab") as file:
            file.write(f"\n{entry}\n".encode())  # the first newline ends a line that a crash tore
        with lock(self.path, wait=True):  # so that no other process is writing what is removed
            for part in target.parent.glob(f".{glob.escape(target.stem)}-????????{target.suffix}"):
                part.unlink()  # what a killed run was writing
            with atomic(target) as part:
                part.write_bytes(text)

    def _name(self, target: Path) -> str:
        return target.relative_to(self.path).as_posix()

    def _entries(self, target: Path) -> list[dict[str, object]]:
        return self.log.get(self._name(target), [])

    def _entry(self, source: Path, target: Path, content: str) -> dict[str, object]:
        return {
            "name": self._name(target),
            "content": content,
            "by": self.key,
            "state": self.state[source],
        }


def _content(target: Path) -> str:
    """The hash of a file's content; "" where there is no file."""
    return content_hash(target.read_bytes()) if target.is_file() else ""


def _state(path: Path) -> list[int]:
    """Size and time of change, in nanoseconds; nothing where there is no file."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return [status.st_size, status.st_mtime_ns]
    return []
