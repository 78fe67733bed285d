"""A folder of transcripts that an interrupted run resumes: what is there is done."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asrkit.files import atomic, content_hash, lock
from asrkit.shapes import expect
from asrkit.sound_files import STDIN
from asrkit.transcribe.formats import Transcript, render
from asrkit.transcribe.options import BeamOptions, PipelineConfig, PromptOptions, WindowOptions

# Options that say how batches are made and computed, on which a transcript does not depend; and
# those whose fields stand for them.
LEFT_OUT = {"batch_s", "readers", "strategy", "graphs", "encoder", "precision", "search", "prompt"}
DTYPES = ("float32", "bfloat16", "float16")
LONGEST_NAME = 241  # bytes: a file system's 255, less .partial and what a name has meanwhile
# What is read of a model's folder: asrkit's own, Hugging Face's, or exported.
READ = re.compile(
    r".*\.safetensors|(.*config|.*index|tokenizer|vocab|added_tokens)\.json|merges\.txt|"
    r"(model|encoder)\..*(onnx|data|xml|bin)"
)


def made_by(model: Path, **settings: object) -> dict[str, str]:
    """All that transcripts follow from, as text: `settings`, and a hash of the model's files.

    A core hashes about a gigabyte a second, which is little beside transcription.
    """
    expect(model.exists(), "model", "a file or a folder", f"none at {str(model)!r}")
    digest = hashlib.sha256()
    for path in [model, *sorted(model.glob("[!.]*"))]:
        if path.is_file() and (path == model or READ.fullmatch(path.name)):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    settings["model"] = digest.hexdigest()[:16]
    return {name: str(value) for name, value in settings.items()}


def expect_same(kept: Mapping[str, str], now: Mapping[str, str], out: Path) -> None:
    """ValueError that names what has changed, with old and new value.

    Args:
        kept: As `made_by` returned it when the folder was begun.
        now: As it returns it now.
        out: The folder.
    """
    names = [name for name in now if kept.get(name) != now[name]]
    old, new = (", ".join(str(one.get(name)) for name in names) for one in (kept, now))
    wanted = f"{old}, with which {out} was begun"
    expect(not names, ", ".join(names), wanted, new, "Name another folder.")


def text_settings(
    options: WindowOptions, config: PipelineConfig, dtype: str = "float32"
) -> dict[str, object]:
    """The settings that a transcript depends on; of an n-gram model's file, what is in it.

    Args:
        options: Windows.
        config: Of the recogniser.
        dtype: Of the weights as they are loaded, and of what `config` computes in no other.
    """
    search, prompt = config.search or BeamOptions(), config.prompt or PromptOptions()
    settings = vars(options) | vars(config) | vars(search) | vars(prompt)
    settings["dtype"] = f"{config.precision} beside {dtype}".removeprefix("as_loaded beside ")
    settings["beam"] = config.search and search.beam  # None: greedy
    settings["lm"] = search.lm and content_hash(search.lm.read_bytes())
    if not options.previous_text:  # as before there was this option
        settings.pop("previous_text")
    return {name: value for name, value in settings.items() if name not in LEFT_OUT}


def settled(begun: Mapping[str, str], config: PipelineConfig, device: str) -> Any:
    """(dtype to load a model in, `config`) as a folder was begun; else the dtype that is fast.

    Args:
        begun: As `made_by` returned it then; empty where the folder is new.
        config: Of the recogniser.
        device: Where it computes.
    """
    kept: Any = str(begun.get("dtype")).rpartition(" beside ")
    if kept[2] not in DTYPES:
        from asrkit.cpu import fast_dtype

        return fast_dtype(device), config
    return kept[2], replace(config, precision=kept[0] or "as_loaded")


def begun_by(out: Path, kind: str) -> dict[str, str]:
    """What the transcripts of a format in a folder follow from; nothing where it does not say so.

    Args:
        out: The folder.
        kind: One of FORMATS.
    """
    try:
        return dict(json.loads((out / f".asrkit-{kind}").read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


class Folder:
    """Transcripts in a folder, one file a recording: the recording's name with another suffix, or,
    where several differ in their suffix only, with one more.

    A recording is done if its transcript is there. That of one that breaks off is named .partial,
    and is not. All transcripts of a format are of one model and one choice of settings, which a
    hidden file in the folder names.

    Args:
        path: the folder; made when the first transcript is written.
        recordings: (recording, name of its transcript) pairs, as `find` returns them.
        made_by: all that transcripts follow from.
        kind: the transcripts' format, one of FORMATS.

    Raises:
        ValueError: Two recordings have one name, or a name is too long, or `path` holds transcripts
            of another model or other settings, or files that asrkit did not write.
    """

    def __init__(
        self,
        path: Path,
        recordings: Sequence[tuple[Path, Path]],
        made_by: Mapping[str, str],
        *,
        kind: str,
    ) -> None:
        self.path = path
        self.kind = kind
        self.made_by = made_by
        self.key_file = path / f".asrkit-{kind}"
        stems = Counter(name.with_suffix("") for _, name in recordings)
        self.target = {}
        for source, name in recordings:  # a.wav and a.flac: a.wav.txt and a.flac.txt
            stem = name.with_suffix("")
            self.target[source] = path / f"{name if stems[stem] > 1 else stem}.{kind}"
        wanted = "recordings of different names"
        remedy = "Rename one, or use two folders."
        short = f"transcripts with names of at most {LONGEST_NAME} bytes"
        for target, times in Counter(self.target.values()).items():
            expect(times == 1, "out", wanted, f"several of {target}", remedy)
            size = len(os.fsencode(target.name))
            expect(size <= LONGEST_NAME, "out", short, target.name, "Rename the recording.")
        self._check()

    def _check(self) -> None:
        """ValueError where the transcripts that are there are not of this model and settings."""
        if kept := begun_by(self.path, self.kind):
            return expect_same(kept, self.made_by, self.path)
        wanted = "transcripts of this model and these settings"
        for one in (self.key_file, *self.target.values()):
            expect(not one.exists(), "out", wanted, one, "Name another folder.")

    def todo(self) -> list[Path]:
        """Recordings that have no transcript yet; standard input may be another one each time."""
        return [
            source
            for source, target in self.target.items()
            if source == STDIN or not target.exists()
        ]

    def write(self, transcript: Transcript) -> None:
        """Write the transcript, whole or not at all.

        Args:
            transcript: Of a recording of the folder.

        Raises:
            OSError: It cannot be written.
            ValueError: Another run began the folder meanwhile, with another model or settings.
        """
        whole = self.target[transcript.path]
        partial = whole.with_name(f"{whole.name}.partial")
        target = partial if transcript.error else whole
        recording = whole.with_suffix("").relative_to(self.path).as_posix()  # unlike b/one, a/one
        text = render(transcript, self.kind, name=recording)
        try:
            with lock(self.path, wait=True):
                self._check()  # since others may have begun the folder
                if not self.key_file.exists():
                    _write(self.key_file, json.dumps(self.made_by))
                _write(target, text)
                if target == whole:
                    partial.unlink(missing_ok=True)
        except OSError as error:
            why = error.strerror or error
            message = f"{target} cannot be written: {why}. The same command goes on from here."
            raise OSError(message) from None


def _write(path: Path, text: str) -> None:
    with atomic(path, "part") as part:  # in the lock of the folder
        part.write_bytes(text.encode(errors="backslashreplace"))
