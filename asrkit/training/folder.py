"""The folder of a run: its log, its state, and the exported model."""

import json
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
        """Remove log and state. Without that a kill before the first checkpoint of a new run would
        resume the old one.
        """
        for file in (self.state, self.log):
            file.unlink(missing_ok=True)

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Write `state` atomically.

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

    def load_state(self) -> dict[str, Any] | None:
        """What `save_state` wrote; None where nothing was saved. No code in the file is run.

        Raises:
            ValueError: The file is damaged. torch.save writes a CRC-32 of every tensor, which
                torch.load does not look at.
        """
        if not self.state.exists():
            return None
        try:
            with zipfile.ZipFile(self.state) as archive:
                torn = archive.testzip()
            damage = f"other bytes than were written in {torn}"
            if torn is None:
                return torch.load(self.state, "cpu", weights_only=True)
        except Exception as error:  # half a pickle raises anything
            damage = f"{type(error).__name__}: {error}".splitlines()[0]
        got = f"{self.state}, which is damaged ({damage:.80})"
        expect(False, "state", "a whole file", got, FRESH)
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
