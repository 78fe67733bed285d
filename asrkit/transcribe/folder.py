"""A folder of transcripts that a killed run goes on with: what is done, by what, is in a log beside
the files.
"""

import contextlib
import glob
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from asrkit.features import FeatureConfig
from asrkit.files import atomic, content_hash
from asrkit.models import Checkpoint
from asrkit.shapes import expect
from asrkit.transcribe.audio import Options
from asrkit.transcribe.formats import Transcript, render

LONGEST = 240  # bytes of a file name; a temporary one has ten more, and file systems take 255
LOG = ".asrkit-transcripts.jsonl"
# numbers of a weight tensor that tell models apart: hashing gigabytes would take longer than the
# transcripts
SAMPLED = 64


def made_by(checkpoint: Checkpoint, settings: object) -> str:
    """A hash of the model (numbers sampled from every weight, in its dtype), tokenizer, features
    and `settings`.
    """
    tokenizer = checkpoint.tokenizer
    sampled = [
        value.flatten()[:: max(1, value.numel() // SAMPLED)]
        for value in checkpoint.model.state_dict().values()
    ]
    weights = torch.cat([value.to("cpu", torch.float64) for value in sampled]).numpy().tobytes()
    dtype = next(checkpoint.model.parameters()).dtype
    tokens = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    features = FeatureConfig(**checkpoint.features)
    return content_hash(
        [
            content_hash(weights),
            tokens,
            *map(str, (checkpoint.model.config, dtype, features, settings)),
        ]
    )


class Folder:
    """Transcripts in `path`, one file a recording: its name, with the suffix of `kind`.

    A recording is done if its transcript is there with the content the log says, made from a file
    of this size and time by the same `made_by`. Other transcripts of this log are made anew; `anew`
    is how many. A file that is not asrkit's, or was edited since, is left alone and reported,
    unless `fresh`, which makes and overwrites all. Two recordings of one name are refused.
    """

    def __init__(
        self,
        path: Path,
        found: Sequence[tuple[Path, Path]],
        checkpoint: Checkpoint,
        options: Options,
        *,
        kind: str,
        fresh: bool = False,
    ) -> None:
        expect(not path.exists() or path.is_dir(), "out", "a folder", repr(str(path)))
        self.path, self.kind, self.fresh, self.anew = path, kind, fresh, 0
        self.key = made_by(
            checkpoint, replace(options, batch_s=1.0)
        )  # how batches are made decides no text
        sources: dict[Path, Path] = {}  # of each target
        for source, name in found:
            target = path / name.with_suffix(f".{kind}")
            both = f"{sources.get(target)} and {source}"
            expect(
                target not in sources,
                "out",
                "recordings of different names",
                both,
                "Rename one, or use two folders.",
            )
            sources[target] = source
        self.target = {source: target for target, source in sources.items()}
        self.state = {
            source: _state(source) for source in self.target
        }  # now: what is read later may change meanwhile
        self.log: dict[str, list[dict[str, object]]] = {}
        for line in (path / LOG).read_bytes().splitlines() if (path / LOG).exists() else []:
            try:
                entry = json.loads(line)
                self.log.setdefault(entry["name"], []).append(entry)
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # torn by a crash: its transcript is made anew

    def todo(self) -> tuple[list[Path], list[Transcript]]:
        """Recordings to transcribe, and those that cannot be, because what is in their place is not
        asrkit's.
        """
        ready, refused, self.anew = list[Path](), list[Transcript](), 0
        for source, target in self.target.items():
            if len(target.name.encode()) > LONGEST:
                error = f"out: a name of {len(target.name.encode())} bytes is too long for a transcript. Rename the recording."
                refused.append(Transcript(path=source, error=error))
                continue
            entries = self.log.get(self._name(target), [])
            there = content_hash(target.read_bytes()) if target.is_file() else ""
            own = there in [entry.get("content") for entry in entries]
            if self.fresh or not target.exists():
                ready.append(source)
            elif not own:
                error = (
                    f"out: {target} is not asrkit's or was edited since. Move it, or pass --fresh."
                )
                refused.append(Transcript(path=source, error=error))
            elif entries[-1] != self._entry(source, target, there):
                ready.append(source)
                self.anew += 1
        return ready, refused

    def write(self, transcript: Transcript) -> Path:
        """Write the transcript, whole or not at all; returns where. The log comes first, so that no
        own file looks foreign.
        """
        target = self.target[transcript.path]
        text = render(
            transcript, self.kind, name=self._name(target.with_suffix(""))
        ).encode()  # a/one and b/one stay apart
        self.path.mkdir(parents=True, exist_ok=True)
        entry = self._entry(transcript.path, target, content_hash(text))
        with (self.path / LOG).open("ab", buffering=0) as file:
            file.write(
                b"\n" + json.dumps(entry).encode() + b"\n"
            )  # the first ends a line that a crash tore
        for part in target.parent.glob(f".{glob.escape(target.stem)}-????????{target.suffix}"):
            part.unlink()  # what a killed run was writing
        with atomic(target) as part:
            part.write_bytes(text)
        return target

    def _name(self, target: Path) -> str:
        return target.relative_to(self.path).as_posix()

    def _entry(self, source: Path, target: Path, content: str) -> dict[str, object]:
        return {
            "name": self._name(target),
            "content": content,
            "by": self.key,
            "state": self.state[source],
        }


def _state(path: Path) -> list[int]:
    """Size and time of change, which a file that is not there has none of."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return [found.st_size, found.st_mtime_ns]
    return []
