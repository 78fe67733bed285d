"""The folder of a run: its log, its state and the one before, and the exported model."""

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asrkit.files import atomic
from asrkit.shapes import expect

FRESH = "Pass resume=False to start anew (asrkit train --fresh)."


@dataclass(frozen=True)
class RunFolder:
    """The files of a run."""

    path: Path

    @property
    def log(self) -> Path:
        """A JSON line for each step."""
        return self.path / "log.jsonl"

    @property
    def state(self) -> Path:
        """What is needed to resume."""
        return self.path / "state.pt"

    @property
    def previous_state(self) -> Path:
        """The state saved before, taken where `state` is damaged."""
        return self.path / "state-previous.pt"

    @property
    def model(self) -> Path:
        """The exported model."""
        return self.path / "model.safetensors"

    def make(self) -> None:
        """Create the folder, and remove what a kill in mid-write left in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        parts = [f".{file.stem}-*{file.suffix}" for file in (self.log, self.state, self.model)]
        parts.append(".tmp??????")  # safetensors names its own so
        for pattern in parts:
            for part in self.path.glob(pattern):
                part.unlink()

    def clear(self) -> None:
        """Remove log and states. Without that a kill before the first checkpoint of a new run would
        resume the old one.
        """
        for file in (self.state, self.previous_state, self.log):
            file.unlink(missing_ok=True)

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Write `state` atomically; the state saved before is kept beside it.

        Args:
            state: Tensors, numbers and text by name.

        Raises:
            OSError: It cannot be written.
        """
        with atomic(self.state) as temporary:
            try:
                torch.save(dict(state), temporary)
            except RuntimeError as error:  # torch counts bytes in place of naming the reason
                reason = f"Is the disk full? ({error})"
                raise OSError(f"{self.state} cannot be written. {reason}") from None
            if self.state.exists():
                os.replace(self.state, self.previous_state)

    def newest_state(self) -> Path | None:
        """The newest state that is whole; None where none was saved.

        Raises:
            ValueError: All that were saved are damaged.
        """
        saved = [path for path in (self.state, self.previous_state) if path.exists()]
        damages = []
        for path in saved:
            why = damage(path)
            if not why:
                return path
            damages.append(f"{path} is damaged ({why})")
        expect(not damages, "state", "one that is whole", "; ".join(damages), FRESH)
        return None

    def read_log(self, step: int) -> list[dict[str, float]]:
        """The log's lines up to `step`; what a kill left of a line is passed over."""
        text = self.log.read_text() if self.log.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [line for line in lines if line["step"] <= step]

    def write_log(self, history: list[dict[str, float]]) -> None:
        """Replace the log, atomically."""
        with atomic(self.log) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in history))


def damage(path: Path) -> str:
    """What is wrong with a state, in short; "" for one that is whole.

    torch.save writes a CRC-32 of every tensor, which torch.load does not look at.

    Args:
        path: A file that `RunFolder.save_state` wrote.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            torn = archive.testzip()
        if torn is not None:
            return f"other bytes than were written in {torn}"
        json.loads(read_state(path)["config"])
    except Exception as error:  # half a pickle raises anything
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"{why:.80}"
    return ""


def read_state(path: Path) -> dict[str, Any]:
    """What `RunFolder.save_state` wrote. Its tensors lie in the file until they are used.

    Args:
        path: The file, which may come from anybody: no code in it is run.
    """
    return torch.load(path, "cpu", weights_only=True, mmap=True)
