"""Rival losses, decoders and encoders, each in a process of its own with the Python that `make
peers` set up.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.shapes import expect
from asrkit.workbench.bench.rivals.peer_decoders import GRAPHS, LOOPS
from asrkit.workbench.bench.rivals.peer_encoders import ENCODERS
from asrkit.workbench.profiling import Sample

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parents[3] / ".venv-peers/bin/python"
COPY = (
    HERE.parents[3] / "build/peers"
    # NeMo's decoders for a machine without .venv-peers: see asrkit.workbench.bench.rivals.peer_decoders
)
NAMES = {
    "rnnt": ("warprnnt_numba", "nemo_numba", "nemo_pytorch"),
    "tdt": ("transformers_tdt",),
    "rnnt-greedy": LOOPS[:1],
    "tdt-greedy": LOOPS[:1],
    "rnnt-greedy-loops": LOOPS,
    "tdt-greedy-loops": (LOOPS[0], LOOPS[2]),
    "rnnt-greedy-cuda": (LOOPS[0], GRAPHS),
    "tdt-greedy-cuda": (LOOPS[0], GRAPHS),
    "rnnt-greedy-loops-cuda": (*LOOPS, GRAPHS),
    "tdt-greedy-loops-cuda": (LOOPS[0], LOOPS[2], GRAPHS),
    "encoder": (*ENCODERS,),
}


@dataclass(frozen=True, kw_only=True)
class Answer(Sample):
    """A rival's times of one call; if observed, its result as asrkit.workbench.bench.cases.digest
    has it, and its peak memory.
    """

    digest: tuple[Tensor, ...] = ()
    peak_B: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


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
            print(
                json.dumps({**self.request, "threads": torch.get_num_threads(), **more}),
                file=self.process.stdin,
                flush=True,
            )
            answer = json.loads(self.process.stdout.readline() or '{"error": "its process ended"}')
        except BrokenPipeError:
            answer = {"error": "its process ended"}
        if "error" in answer:
            raise RuntimeError(f"peer {self.name}: {answer['error']}")
        return answer

    def __call__(self, observe: bool = False) -> Answer:
        answer = self.ask(observe=observe)
        seen = tuple(torch.tensor(part) for part in answer.get("digest", ()))
        more = {"peak_B": answer.get("peak_B"), "counts": answer.get("counts", {})}
        return Answer(wall_ms=answer["wall_ms"], cpu_ms=answer["cpu_ms"], digest=seen, **more)


class Peers:
    """The rivals that are installed, started when they are first asked, ended with the `with`
    block.

    python: that runs them. folder: where else it finds NeMo. Neither: .venv-peers, or this Python
    with build/peers.
    """

    def __init__(
        self,
        python: str | Path | None = None,
        names: Mapping[str, tuple[str, ...]] = NAMES,
        folder: Path | None = None,
    ) -> None:
        if python is None and not PYTHON.exists() and COPY.is_dir():
            python, folder = sys.executable, COPY
        self.python, self.names, self.folder = Path(python or PYTHON), names, folder
        expect(
            self.python.exists(),
            "peers",
            "the environment .venv-peers",
            "none",
            "`make peers` installs it.",
        )
        self.running: dict[str, Rival | None] = {}

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        for rival in filter(None, self.running.values()):
            rival.process.communicate()  # no more requests: it ends

    def arms(self, loss: str, **request: Any) -> dict[str, Rival]:
        """An arm for each rival that has `loss`, a key of NAMES; one that does not run is named on
        standard error.
        """
        small = {**request, "shape": [1, 3, 2, 4]}
        names = self.names.get(loss, ())
        started = {
            name: self._start(name, small) for name in names if name not in self.running
        }  # all import at once
        self.running |= {name: _ready(rival) for name, rival in started.items()}
        found = {name: rival for name in names if (rival := self.running[name])}
        return {name: Rival(**{**vars(rival), "request": request}) for name, rival in found.items()}

    def _start(self, name: str, small: dict[str, Any]) -> Rival:
        decodes = name in (*LOOPS, GRAPHS)
        worker = HERE / (
            "peer_decoders.py"
            if decodes
            else "peer_encoders.py"
            if name in ENCODERS
            else "peer_worker.py"
        )
        command = [
            str(self.python),
            "-P",
            "-W",
            "ignore",
            str(worker),
            name,
            *([str(self.folder)] if self.folder else []),
        ]
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
        }
        return Rival(
            process=subprocess.Popen(command, text=True, **pipes), name=name, request=small
        )


def installed() -> bool:
    """Whether rivals are here: in .venv-peers, or NeMo's decoders in build/peers."""
    return PYTHON.exists() or COPY.is_dir()


def _ready(rival: Rival) -> Rival | None:
    """The rival with its version, once it has answered; None, and a line that says why, if it
    cannot.
    """
    try:
        return Rival(**{**vars(rival), "version": rival.ask(observe=False)["version"]})
    except RuntimeError as error:
        print(f"{error}; left out. `make peers` installs what is missing.", file=sys.stderr)
        rival.process.communicate()
        return None
