"""The machine, software and code of a measurement, as a record stores them.

Host names, user names and paths are left out.
"""

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.files import content_hash
from asrkit.shapes import count
from asrkit.threads import usable_cores

GPU_FIELDS = ("name", "memory.total", "compute_cap", "power.limit", "driver_version", "uuid")
GPU_STATE_FIELDS = (  # properties that change while a GPU works
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "temperature.gpu",
    "clocks_throttle_reasons.active",
)
STABLE_GPU_FIELDS = GPU_FIELDS[:4]  # the fields that no driver update changes
ISA = frozenset(
    {"avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8"}
    | {"asimd", "bf16", "sve"}
)
PACKAGES = (
    "torch",
    "torchaudio",
    "numpy",
    "numba",
    "numba-cuda",
    "triton",
    "lhotse",
    "jiwer",
    "matplotlib",
    "papermill",
    "ipykernel",
)


def _output(*command: str) -> str:
    """Standard output of a command; empty if it fails or does not exist."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return process.stdout.strip()
    return ""


def _git(*arguments: str) -> str:
    return _output("git", "-C", str(files.HERE.parent), *arguments)


def _nvidia_smi(fields: Sequence[str]) -> list[dict[str, str]]:
    """These fields of each GPU; empty without nvidia-smi."""
    table = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    rows = [line.split(", ") for line in table.splitlines()]  # or "No devices were found"
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _cpu_fact(pattern: str) -> str:
    """A property of the CPU from /proc/cpuinfo; empty if it is not there."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        for value in re.findall(rf"^(?:{pattern})\s*:(.*)$", text, re.MULTILINE):
            return str(value).strip()
    return ""


@functools.cache
def this_machine() -> dict[str, Any]:
    """Description of this machine; its `id` is a hash, 12 hex digits, of what no update changes.

    The dict is cached: do not change it.
    """
    cpu_flags = _cpu_fact("flags|Features").split()
    gpus = _nvidia_smi(GPU_FIELDS)
    for gpu in gpus:  # distinguishes devices without publishing a serial number
        gpu["uuid"] = _short_hash(gpu["uuid"].encode())
    stable = {
        "system": platform.system(),
        "arch": platform.machine(),
        "cpu_model": _cpu_fact("model name")
        or _output("sysctl", "-n", "machdep.cpu.brand_string")  # macOS
        or platform.processor(),
        "cpu_logical": os.cpu_count(),
        "cpu_usable": usable_cores(),
        "isa": sorted(ISA.intersection(cpu_flags)),
        "ram_gib": round(_memory_bytes() / 2**30),
        "virtualised": "hypervisor" in cpu_flags,
    }
    stable_gpus = [[gpu[field] for field in STABLE_GPU_FIELDS] for gpu in gpus]
    return {
        "id": _short_hash([stable, *stable_gpus]),
        **stable,
        "gpus": gpus,
        "kernel": ".".join(platform.release().split(".")[:2]),
    }


def _short_hash(content: Any) -> str:
    return content_hash(content).removeprefix("sha256:")[:12]


def _memory_bytes() -> int:
    """Memory of this machine in bytes; 0 on Windows, which has no sysconf."""
    if not hasattr(os, "sysconf"):
        return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gpu_state() -> list[dict[str, str]] | None:
    """Current clocks, power, temperature and throttling of each GPU; None without nvidia-smi."""
    return _nvidia_smi(GPU_STATE_FIELDS) or None


def load_average() -> float | None:
    """Average number of running or waiting processes over a minute; None on Windows."""
    if not hasattr(os, "getloadavg"):
        return None
    return os.getloadavg()[0]


@functools.cache
def software() -> dict[str, Any]:
    """Versions of Python and of important packages, and a hash over all installed packages."""
    versions = {
        str(distribution.metadata["Name"]).lower(): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    torch_version = getattr(sys.modules.get("torch"), "version", None)
    return {
        "python": platform.python_version(),
        "asrkit": files.version(),
        "cuda": getattr(torch_version, "cuda", None),
        **{name: versions.get(name) for name in PACKAGES},
        "environment": content_hash(versions),
    }


@functools.cache
def code() -> dict[str, Any]:
    """The running code: its commit, whether it was changed since, and the command line.

    The commit is $ASRKIT_COMMIT, for copies of a checkout, or comes from git. Outside a checkout,
    `commit` and `dirty` are None. Folders are removed from `argv`.
    """
    commit = os.environ.get("ASRKIT_COMMIT")
    dirty = None
    if not commit and (files.HERE.parent / ".git").exists():
        commit = _git("rev-parse", "HEAD") or None
        # Measurements write records and figures themselves.
        dirty = bool(_git("status", "--porcelain", "--", ".", ":!data/records", ":!figures"))
    return {
        "commit": commit,
        "dirty": dirty,
        "argv": [re.sub(r"[^=]*[/\\]", "", argument) for argument in sys.argv],
    }


def stamp() -> str:
    """Machine, versions and commit in one line: the first thing a notebook prints."""
    machine = this_machine()
    versions = software()
    gpus = " + ".join(gpu["name"] for gpu in machine["gpus"]) or "no GPU"
    commit = (code()["commit"] or "installed")[:9]
    if code()["dirty"]:
        commit += " with uncommitted changes"
    cores = count(machine["cpu_usable"], "core")
    parts = [
        f"{machine['cpu_model']}, {cores}, {machine['ram_gib']} GiB, {gpus}",
        f"Python {versions['python']}, torch {versions['torch']}",
        f"asrkit {commit}",
        f"machine {machine['id']}",
    ]
    return " | ".join(parts)
