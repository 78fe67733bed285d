"""Rival losses, decoders and encoders, each in a process of its own with the Python that `make peers` set up."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.bench.peer_decoders import LOOPS
from asrkit.bench.peer_encoders import ENCODERS
from asrkit.profiling import Sample
from asrkit.shapes import expect

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parents[1] / ".venv-peers/bin/python"
NAMES = {
    "rnnt": ("warprnnt_numba", "nemo_numba", "nemo_pytorch"), "tdt": ("transformers_tdt",),
    "rnnt-greedy": LOOPS[:1], "tdt-greedy": LOOPS[:1], "rnnt-greedy-loops": LOOPS, "tdt-greedy-loops": (LOOPS[0], LOOPS[2]),
    "encoder": (*ENCODERS,),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer(Sample):
    """A rival's times of one call; if observed, its result as asrkit.bench.cases.digest has it, and its peak memory."""

    digest: tuple[Tensor, ...] = ()
    peak_B: int | None = None
    told: Mapping[str, int] = field(default_factory=dict)  # counts


@dataclass(frozen=True, kw_only=True)
class Rival:
    """An arm: one request to a process. `version` names the package that answers."""

    process: subprocess.Popen[str]
    name: str
    request: Mapping[str, Any]
    version: str = ""

    def ask(self, **more: Any) -> dict[str, Any]:
        """The process's answer; RuntimeError with its reason if it has none."""
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps({**self.request, "threads": torch.get_num_threads(), **more}), file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline() or '{"error": "its process ended"}')
        except BrokenPipeError:
            answer = {"error": "its process ended"}
        if "error" in answer:
            raise RuntimeError(f"peer {self.name}: {answer['error']}")
        return answer

    def __call__(self, observe: bool = False) -> Answer:
        answer = self.ask(observe=observe)
        seen = tuple(torch.tensor(part) for part in answer.get("digest", ()))
        more = {"peak_B": answer.get("peak_B"), "told": answer.get("told", {})}
        return Answer(wall_ms=answer["wall_ms"], cpu_ms=answer["cpu_ms"], digest=seen, **more)


class Peers:
    """The rivals that are installed, started when they are first asked, ended with the `with` block."""

    def __init__(self, python: str | Path | None = None, names: Mapping[str, tuple[str, ...]] = NAMES):
        self.python, self.names = Path(python or PYTHON), names
        expect(self.python.exists(), "peers", "the environment .venv-peers", "none", "`make peers` installs it.")
        self.running: dict[str, Rival | None] = {}

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        for rival in filter(None, self.running.values()):
            rival.process.communicate()  # no more requests: it ends

    def arms(self, loss: str, **request: Any) -> dict[str, Rival]:
        """An arm for each rival that has `loss`, a key of NAMES; one that does not run is named on standard error."""
        for name in self.names.get(loss, ()):
            if name not in self.running:
                self.running[name] = self._start(name, {**request, "shape": [1, 3, 2, 4]})
        found = {name: rival for name in self.names.get(loss, ()) if (rival := self.running[name])}
        return {name: Rival(**{**vars(rival), "request": request}) for name, rival in found.items()}

    def _start(self, name: str, small: dict[str, Any]) -> Rival | None:
        worker = HERE / ("peer_decoders.py" if name in LOOPS else "peer_encoders.py" if name in ENCODERS else "peer_worker.py")
        command = [str(self.python), "-P", "-W", "ignore", str(worker), name]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        rival = Rival(process=subprocess.Popen(command, text=True, **pipes), name=name, request=small)
        try:
            return Rival(**{**vars(rival), "version": rival.ask(observe=False)["version"]})
        except RuntimeError as error:
            print(f"{error}; left out. `make peers` installs what is missing.", file=sys.stderr)
            rival.process.communicate()
            return None
