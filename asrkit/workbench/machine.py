"""What measured: this machine, its software, and the code, as a record keeps them. No host, user or
path is kept.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.files import content_hash

GPU = "name memory.total compute_cap power.limit driver_version uuid".split()
ISA = frozenset(
    "avx2 fma avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_int8 asimd bf16 sve".split()
)
PACKAGES = "asrkit torch torchaudio numpy numba numba-cuda triton lhotse jiwer matplotlib papermill ipykernel".split()


def _output(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    return ""


def _found(pattern: str, file: str) -> str:
    match = (
        re.search(pattern, Path(file).read_text(), re.MULTILINE) if Path(file).exists() else None
    )
    return match[1].strip() if match else ""


@functools.cache
def this_machine() -> dict[str, Any]:
    """This machine; `id` is 12 hex digits of what no update changes. Cached: read it, do not change
    it.
    """
    model = _found(r"^model name\s*:(.*)$", "/proc/cpuinfo") or _output(
        "sysctl", "-n", "machdep.cpu.brand_string"
    )
    flags = _found(r"^(?:flags|Features)\s*:(.*)$", "/proc/cpuinfo").split()
    ram = 1024 * int(_found(r"^MemTotal:\s*(\d+)", "/proc/meminfo") or 0) or int(
        _output("sysctl", "-n", "hw.memsize") or 0
    )
    from asrkit.runtime import usable_cores  # here: it brings torch along

    cores = usable_cores()
    listed = _output("nvidia-smi", f"--query-gpu={','.join(GPU)}", "--format=csv,noheader")
    gpus = [
        dict(zip(GPU, map(str.strip, line.split(",")), strict=False))
        for line in listed.splitlines()
        if "," in line
    ]
    for gpu in gpus:
        gpu["uuid"] = content_hash(gpu["uuid"].encode())[
            7:19
        ]  # tells devices apart, publishes none
    lasting = {
        "system": platform.system(),
        "arch": platform.machine(),
        "cpu_model": model or platform.processor(),
        "cpu_logical": os.cpu_count(),
        "cpu_usable": cores,
        "isa": sorted(ISA & {*flags}),
        "ram_gib": round(ram / 2**30),
        "virtualised": "hypervisor" in flags,
    }
    kind = content_hash(
        [lasting, *[[gpu[key] for key in GPU[:4]] for gpu in gpus]]
    )  # a new driver is no new machine
    return {
        "id": kind[7:19],
        **lasting,
        "gpus": gpus,
        "kernel": ".".join(platform.release().split(".")[:2]),
    }


@functools.cache
def software() -> dict[str, Any]:
    """Versions of Python and of the packages that matter, and one hash over every installed
    distribution.
    """
    found = {str(d.metadata["Name"]).lower(): d.version for d in importlib.metadata.distributions()}
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    named = {"python": platform.python_version(), "cuda": cuda} | {
        name: found.get(name) for name in PACKAGES
    }
    return {**named, "environment": content_hash(found)}


@functools.cache
def code() -> dict[str, Any]:
    """Commit of this checkout (None where there is no git), whether code was changed since, bare
    arguments, a hash of the code.
    """
    git = ("git", "-C", str(files.HERE.parent))
    commit = _output(*git, "rev-parse", "HEAD") if (files.HERE.parent / ".git").exists() else None
    dirty = (
        bool(_output(*git, "status", "--porcelain", "--", ".", ":!data/records", ":!figures"))
        if commit
        else None
    )
    return {
        "commit": commit,
        "dirty": dirty,
        "argv": [re.sub(r"[^=]*[/\\]", "", argument) for argument in sys.argv],
        "source": _source(
            (path.relative_to(files.HERE.parent).as_posix(), _blob(path.read_bytes()))
            for path in files.HERE.rglob("*.py")
        ),
    }


def _blob(data: bytes) -> str:
    return hashlib.sha1(
        b"blob %d\0" % len(data) + data, usedforsecurity=False
    ).hexdigest()  # git's name for a file's content


def _source(files: Iterable[tuple[str, str]]) -> str:
    return content_hash(sorted(list(file) for file in files if file[0].endswith(".py")))[7:19]


def commit_of(source: str) -> str | None:
    """The newest commit of this checkout, of the last 1000, whose code has this `code()["source"]`;
    None if there is none.
    """
    git = ("git", "-C", str(files.HERE.parent))
    for commit in _output(*git, "rev-list", "--max-count=1000", "HEAD").split():
        listed = (
            line.split()
            for line in _output(*git, "ls-tree", "-r", commit, "--", "asrkit").splitlines()
        )
        if _source((path, blob) for _, _, blob, path in listed) == source:
            return commit
    return None


def _held(commit: str) -> bool:
    return _output("git", "-C", str(files.HERE.parent), "cat-file", "-t", commit) == "commit"


def stamp() -> str:
    """Machine, versions and commit in one line: the first thing a notebook prints."""
    m, versions = this_machine(), software()
    gpus = " + ".join(gpu["name"] for gpu in m["gpus"]) or "no GPU"
    commit = f"{(code()['commit'] or 'installed')[:9]}{' with changes' if code()['dirty'] else ''}"
    kind = f"{m['cpu_model']}, {m['cpu_usable']} cores, {m['ram_gib']} GiB, {gpus}"
    return f"{kind} | Python {versions['python']}, torch {versions['torch']} | asrkit {commit} | machine {m['id']}"
