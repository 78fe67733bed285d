"""A folder of transcripts: an interrupted run resumes there, since what exists is done."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from asrkit.files import atomic, lock
from asrkit.shapes import expect
from asrkit.sound_files import STDIN
from asrkit.transcribe.formats import Transcript, render
from asrkit.transcribe.plan import expect_same

LONGEST_NAME = 241  # bytes: a file system's 255, less .partial and the marks of unfinished files


def stored_fingerprint(out: Path, kind: str) -> dict[str, str]:
    """The fingerprint of the transcripts of one format in a folder; empty if it cannot be read.

    Args:
        out: The folder.
        kind: The format, one of FORMATS.
    """
    try:
        return dict(json.loads((out / f".asrkit-{kind}").read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


class Folder:
    """Transcripts in a folder, one file for each recording.

    A transcript has the recording's name with another suffix. If several names differ in their
    suffix only, it is added to the name.

    A recording is done if its transcript exists. The transcript of a recording that breaks off is
    named .partial, and does not count. All transcripts of a format come from one model with one
    choice of settings. A hidden file in the folder holds their fingerprint.

    Args:
        path: The folder, which is created with the first transcript.
        recordings: (recording, name of its transcript) pairs, as `find` returns them.
        fingerprint: Everything that the transcripts depend on.
        kind: The transcripts' format, one of FORMATS.

    Raises:
        ValueError: Two recordings have one name, a name is too long, or `path` holds transcripts
            of another model or other settings, or files that asrkit did not write.
    """

    def __init__(
        self,
        path: Path,
        recordings: Sequence[tuple[Path, Path]],
        fingerprint: Mapping[str, str],
        *,
        kind: str,
    ) -> None:
        self.path = path
        self.kind = kind
        self.fingerprint = fingerprint
        self.key_file = path / f".asrkit-{kind}"
        stems = Counter(name.with_suffix("") for _, name in recordings)
        self.targets = {}
        for source, name in recordings:  # a.wav and a.flac: a.wav.txt and a.flac.txt
            stem = name.with_suffix("")
            self.targets[source] = path / f"{name if stems[stem] > 1 else stem}.{kind}"
        for target, times in Counter(self.targets.values()).items():
            expect(
                times == 1,
                "out",
                "recordings of different names",
                f"several of {target}",
                "Rename one, or use two folders.",
            )
            expect(
                len(os.fsencode(target.name)) <= LONGEST_NAME,
                "out",
                f"transcripts with names of at most {LONGEST_NAME} bytes",
                target.name,
                "Rename the recording.",
            )
        self._check()

    def _check(self) -> None:
        """ValueError if existing transcripts come from another model or other settings."""
        if stored := stored_fingerprint(self.path, self.kind):
            return expect_same(stored, self.fingerprint, self.path)
        wanted = "transcripts of this model and these settings"
        for file in (self.key_file, *self.targets.values()):
            expect(not file.exists(), "out", wanted, file, "Name another folder.")

    def todo(self) -> list[Path]:
        """Recordings without a transcript. Standard input may be another recording each time."""
        return [
            source
            for source, target in self.targets.items()
            if source == STDIN or not target.exists()
        ]

    def write(self, transcript: Transcript) -> None:
        """Write the transcript of a recording of the folder, whole or not at all.

        Raises:
            OSError: It cannot be written.
            ValueError: Another run has begun the folder since, with another model or settings.
        """
        whole = self.targets[transcript.path]
        partial = whole.with_name(f"{whole.name}.partial")
        target = partial if transcript.error else whole
        recording = whole.with_suffix("").relative_to(self.path).as_posix()  # a/one is not b/one
        text = render(transcript, self.kind, name=recording)
        try:
            with lock(self.path, wait=True):
                self._check()  # another run may have begun the folder
                if not self.key_file.exists():
                    _write(self.key_file, json.dumps(self.fingerprint))
                _write(target, text)
                if target == whole:
                    partial.unlink(missing_ok=True)
        except OSError as error:
            why = error.strerror or error
            message = f"{target} cannot be written: {why}. The same command resumes from here."
            raise OSError(message) from None


def _write(path: Path, text: str) -> None:
    with atomic(path, "part") as part:  # under the folder's lock
        part.write_bytes(text.encode(errors="backslashreplace"))
