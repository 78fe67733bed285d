"""What this machine has, what is missing, which notebook wants it, and the remedy."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from asrkit import files
from asrkit.losses.availability import fastest
from asrkit.runtime import MODULES, lacks, toolkit
from asrkit.workbench.machine import this_machine

EXTRAS = {  # extra of pyproject.toml ("": every installation) -> who wants it, its modules
    "": (
        "every notebook",
        "torchaudio numba lhotse soundfile jiwer sentencepiece safetensors yaml",
    ),
    "notebooks": (
        "every notebook and make report",
        "matplotlib ipywidgets papermill nbconvert jupyterlab",
    ),
    "synth": ("the speech of 00_start_here", "espeakng_loader"),
    "dev": ("make test", "pytest hypothesis"),
}
LOADS = (
    "import torchaudio",
    "import ctypes, espeakng_loader as e; ctypes.CDLL(str(e.get_library_path()))",
)
LOCK, INSTALL = Path(__file__).parents[2] / "requirements.lock", "pip install -r requirements.lock"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding; `missing` is required and not there, `note` is worth knowing. Both have a
    remedy.
    """

    name: str
    status: Literal["ok", "missing", "note"]
    detail: str
    remedy: str


def diagnose() -> list[Check]:
    """Findings on packages, pins, cores, memory, disk and GPU, in some seconds; installs nothing."""
    home, machine, rows = files.home(), this_machine(), list[tuple[str, str, str, bool]]()
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"])
    for extra, (who, modules) in EXTRAS.items():
        absent = " ".join(name for name in modules.split() if not find_spec(name))
        remedy = (f"pip install -e '.[{extra}]'" if extra else INSTALL) * bool(absent)
        rows.append(
            (
                extra or "packages",
                f"for {who}; {f'absent: {absent}' if absent else 'all there'}",
                remedy,
                not extra,
            )
        )
    for name, test in zip(
        ("torchaudio", "espeak-ng"), LOADS, strict=True
    ):  # apart: one may crash, the other is GPL
        fails = subprocess.run([sys.executable, "-c", test], capture_output=True).returncode != 0
        rows.append(
            (name, "does not load" if fails else "loads", INSTALL * fails, name == "torchaudio")
        )
    pins = set(
        re.findall(
            r"^([\w.-]+)==(\S+)", LOCK.read_text("utf-8") if LOCK.exists() else "", re.MULTILINE
        )
    )
    have = {
        (re.sub(r"[-_.]+", "-", str(d.metadata["Name"])).lower(), d.version)
        for d in distributions()
    }
    other = sorted(" ".join(pair) for pair in have - pins if pair[0] in dict(pins))
    free = shutil.disk_usage(home).free / 2**30 * os.access(home, os.W_OK)
    threads, cores, ram = torch.get_num_threads(), machine["cpu_usable"], machine["ram_gib"] or 0
    advice = (
        f"update the driver for CUDA {torch.version.cuda}"
        if gpus
        else "no notebook needs one; claims about one stay 'not measurable here'"
    )
    kernels = {name: lacks(name) for name in MODULES}
    broken = [f"{name} fails: {why}" for name, why in kernels.items() if why and find_spec(name)]
    able = ", ".join(name for name, why in kernels.items() if not why) or "torch"
    rows += [
        ("Python, torch", f"{sys.version.split()[0]}, {torch.__version__}", "", True),
        (
            "pins",
            f"{len(other)} differ from requirements.lock: {', '.join(other)}"
            if other
            else "as in requirements.lock",
            INSTALL * bool(other),
            False,
        ),
        (
            "cores",
            f"{cores}, torch takes {threads}",
            f"set OMP_NUM_THREADS={cores}" * (threads > cores),
            False,
        ),
        ("memory", f"{ram} GiB", "keep the notebooks at their quick sizes" * (ram < 6), False),
        (
            "cache",
            f"{free:.0f} GiB to write",
            "point ASRKIT_HOME to a folder with 2 GiB" * (free < 2),
            free == 0,
        ),
        (
            "losses",
            "; ".join(
                [
                    f"{fastest(torch.zeros(1))} on a CPU, compiled on first use; CUDA: {able}",
                    *broken,
                ]
            ),
            "pip install 'asrkit[cuda]'" * bool(broken),
            False,
        ),
        (
            "CUDA toolkit",
            f"NVVM in {folder}" if (folder := toolkit()) else "none with NVVM was found",
            "set CUDA_HOME to a toolkit, for Numba's kernels" * bool(gpus and not folder),
            False,
        ),
        ("GPU", gpus or "none", advice * (not torch.cuda.is_available()), False),
    ]
    state: dict[bool, Literal["missing", "note"]] = {True: "missing", False: "note"}
    return [
        Check(name=n, status=state[must] if r else "ok", detail=d, remedy=r)
        for n, d, r, must in rows
    ]


def render(checks: list[Check]) -> str:
    """`checks` as text, worst first; what is not ok has its remedy below."""
    worst = sorted(checks, key=lambda check: ("missing", "note", "ok").index(check.status))
    return "\n".join(
        f"[{c.status:^7}] {c.name}: {c.detail}" + f"\n{'':10}{c.remedy}" * bool(c.remedy)
        for c in worst
    )
