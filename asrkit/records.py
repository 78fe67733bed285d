"""One observation, one JSON line: what was measured, on which machine, with which software, from which commit.

A record ends in a hash of its content: it shows that a record changed, not that it is true. No host, user or path is kept.
"""

import contextlib
import datetime
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MIME = "application/vnd.asrkit.record+json"
PACKAGES = "asrkit torch torchaudio numpy numba numba-cuda triton lhotse jiwer matplotlib papermill ipykernel".split()
ISA = frozenset("avx2 fma avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_int8 asimd bf16 sve".split())
GPU = "name memory.total compute_cap power.limit driver_version uuid".split()
SCHEMA = "asrkit.record/1"
HERE = Path(__file__).resolve().parent
FILES = ("bench.jsonl", "checks.jsonl", "log.txt")  # of a share; manifest.json has their hashes

# What must stand in a file: a type, a pattern, alternatives (... is missing), a list or a dict of such; more keys may stand there.
LINE, HASH = re.compile(r"[^\x00-\x1f\x7f-\x9f]*"), re.compile("sha256:[0-9a-f]{64}")
WANTED = {
    "schema": re.compile(re.escape(SCHEMA)), "captured_at": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"),
    **dict.fromkeys(("what", "metric", "unit", "impl", "timer", "origin"), LINE),
    "value": float, "samples": [float], "warmup": int, "load1": float, "params": {"arms": ([LINE], ...)},
    "stats": {"n": int, "warmup": int, "min": float, "p25": float, "p50": float, "p75": float},
    "machine": {
        "id": re.compile("[0-9a-f]{12}"), **dict.fromkeys(("system", "cpu_model", "kernel"), LINE), "isa": [LINE],
        "cpu_usable": int, "ram_gib": int, "gpus": [dict.fromkeys(("name", "memory.total", "driver_version"), LINE)],
    },
    "software": {"torch": (LINE, None)},
    "code": {"commit": (re.compile("[0-9a-f]{40,64}"), None), "dirty": (bool, None), "argv": [str], "source": (LINE, ...)},
}  # fmt: skip
DELIVERED = {
    "schema": re.compile("asrkit.share/1"), "state": LINE, "quick": bool,
    "files": {name: {"bytes": int, "sha256": HASH} for name in FILES},
}  # fmt: skip


def home() -> Path:
    """Folder for what asrkit builds and keeps between runs: $ASRKIT_HOME, or ~/.cache/asrkit; created when missing."""
    path = Path(os.environ.get("ASRKIT_HOME") or "~/.cache/asrkit").expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


def shipped(name: str) -> Path:
    """Path of a file or folder of the repository's `data/`, in a checkout and in an installed wheel alike."""
    for path in (HERE / "_shipped" / name, HERE.parent / "data" / name):
        if path.exists():
            return path
    raise FileNotFoundError(f"shipped: asrkit ships no {name!r} in this installation.")


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, same suffix: renamed over it when the block ends well, removed when it raises."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file, or none yet, got a folder or a device.")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}-{os.urandom(4).hex()}{path.suffix}")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(folder: Path, *, lock: str = "", wait: bool = False, refused: str = "") -> Iterator[None]:
    """Holds `folder`, created when missing, or a file `lock` in it: others wait, or are `refused`, until block or process end."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder / lock, os.O_RDONLY | (os.O_CREAT if lock else 0), 0o644)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            said = f"{folder}: expected a folder that nobody else writes to now. Wait, or name another."
            raise ValueError(refused or said) from None
        yield
    finally:
        os.close(held)


def content_hash(content: Any) -> str:
    """sha256:… of bytes, or of a value's canonical JSON, in which 1.0 is 1 (JavaScript saves notebooks so)."""
    if not isinstance(content, bytes):
        plain = _plain(content, lambda text: int(float(text)) if float(text).is_integer() else float(text))
        content = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _plain(value: Any, number: Callable[[str], float] = float) -> Any:
    try:  # scalars of numpy and torch become numbers
        return json.loads(json.dumps(value, allow_nan=False, default=lambda scalar: scalar.item()), parse_float=number)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"record: expected finite numbers, text, lists and dicts, got {value!r:.200}.") from error


def _output(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return ""


def _found(pattern: str, file: str) -> str:
    match = re.search(pattern, Path(file).read_text(), re.MULTILINE) if Path(file).exists() else None
    return match[1].strip() if match else ""


@functools.cache
def machine() -> dict[str, Any]:
    """This machine; `id` is 12 hex digits of what no update changes. Cached: read it, do not change it."""
    model = _found(r"^model name\s*:(.*)$", "/proc/cpuinfo") or _output("sysctl", "-n", "machdep.cpu.brand_string")
    flags = _found(r"^(?:flags|Features)\s*:(.*)$", "/proc/cpuinfo").split()
    ram = 1024 * int(_found(r"^MemTotal:\s*(\d+)", "/proc/meminfo") or 0) or int(_output("sysctl", "-n", "hw.memsize") or 0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota := _found(r"^(\d+ \d+)$", "/sys/fs/cgroup/cpu.max"):  # a container sees every core, may use few
        cores = min(cores, math.ceil(int(quota.split()[0]) / int(quota.split()[1])))
    listed = _output("nvidia-smi", f"--query-gpu={','.join(GPU)}", "--format=csv,noheader")
    gpus = [dict(zip(GPU, map(str.strip, line.split(",")), strict=False)) for line in listed.splitlines() if "," in line]
    for gpu in gpus:
        gpu["uuid"] = content_hash(gpu["uuid"].encode())[7:19]  # tells devices apart, publishes none
    lasting = {
        "system": platform.system(), "arch": platform.machine(), "cpu_model": model or platform.processor(),
        "cpu_logical": os.cpu_count(), "cpu_usable": cores, "isa": sorted(ISA & {*flags}), "ram_gib": round(ram / 2**30),
        "virtualised": "hypervisor" in flags,
    }  # fmt: skip
    kind = content_hash([lasting, *[[gpu[key] for key in GPU[:4]] for gpu in gpus]])  # a new driver is no new machine
    return {"id": kind[7:19], **lasting, "gpus": gpus, "kernel": ".".join(platform.release().split(".")[:2])}


@functools.cache
def software() -> dict[str, Any]:
    """Versions of Python and of the packages that matter, and one hash over every installed distribution."""
    found = {str(d.metadata["Name"]).lower(): d.version for d in importlib.metadata.distributions()}
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    named = {"python": platform.python_version(), "cuda": cuda} | {name: found.get(name) for name in PACKAGES}
    return {**named, "environment": content_hash(found)}


@functools.cache
def code() -> dict[str, Any]:
    """Commit of this checkout (None where there is no git), whether code was changed since, bare arguments, a hash of the code."""
    git = ("git", "-C", str(HERE.parent))
    commit = _output(*git, "rev-parse", "HEAD") if (HERE.parent / ".git").exists() else None
    dirty = bool(_output(*git, "status", "--porcelain", "--", ".", ":!data/records", ":!figures")) if commit else None
    return {
        "commit": commit, "dirty": dirty, "argv": [re.sub(r"[^=]*[/\\]", "", argument) for argument in sys.argv],
        "source": _source((path.relative_to(HERE.parent).as_posix(), _blob(path.read_bytes())) for path in HERE.rglob("*.py")),
    }  # fmt: skip


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()  # git's name for a file's content


def _source(files: Iterable[tuple[str, str]]) -> str:
    return content_hash(sorted(list(file) for file in files if file[0].endswith(".py")))[7:19]


def commit_of(source: str) -> str | None:
    """The newest commit of this checkout, of the last 1000, whose code has this `code()["source"]`; None if there is none."""
    git = ("git", "-C", str(HERE.parent))
    for commit in _output(*git, "rev-list", "--max-count=1000", "HEAD").split():
        listed = (line.split() for line in _output(*git, "ls-tree", "-r", commit, "--", "asrkit").splitlines())
        if _source((path, blob) for _, _, blob, path in listed) == source:
            return commit
    return None


def _held(commit: str) -> bool:
    return _output("git", "-C", str(HERE.parent), "cat-file", "-t", commit) == "commit"


def stamp() -> str:
    """Machine, versions and commit in one line: the first thing a notebook prints."""
    m, versions = machine(), software()
    gpus = " + ".join(gpu["name"] for gpu in m["gpus"]) or "no GPU"
    commit = f"{(code()['commit'] or 'installed')[:9]}{' with changes' if code()['dirty'] else ''}"
    kind = f"{m['cpu_model']}, {m['cpu_usable']} cores, {m['ram_gib']} GiB, {gpus}"
    return f"{kind} | Python {versions['python']}, torch {versions['torch']} | asrkit {commit} | machine {m['id']}"


@dataclass(frozen=True)
class Measurement:
    """`value` of `metric` in `unit` for claim or benchmark `what`; `samples` are its repeats, in the same unit.

    A ratio takes both arms from one run: a sample is one repeat's ratio, params["arms"] = [numerator, denominator].
    """

    what: str
    metric: str
    unit: str
    value: float
    samples: tuple[float, ...] = ()
    warmup: int = 0
    params: dict[str, Any] = field(default_factory=dict)
    impl: str = ""
    timer: str = ""
    origin: str = "measured"
    load1: float = field(default_factory=lambda: os.getloadavg()[0])  # pass the load from before the run if you have it

    def __post_init__(self) -> None:
        data = _plain([*self.samples] or [self.value])
        if not all(isinstance(number, int | float) for number in [_plain(self.value), *data]):
            raise ValueError(f"{self.what}: expected numbers, got value {self.value!r}, samples {data}.")
        p25, p50, p75 = statistics.quantiles(data if len(data) > 1 else data * 2, method="inclusive")
        record = {"schema": SCHEMA, **asdict(self), "captured_at": f"{datetime.datetime.now(datetime.UTC):%FT%TZ}"}
        record |= {"stats": {"n": len(data), "warmup": self.warmup, "min": min(data), "p25": p25, "p50": p50, "p75": p75}}
        record = _plain(record | {"machine": machine(), "software": software(), "code": code()})
        self.__dict__["record"] = record | {"content_sha256": content_hash(record)}

    def sealed(self) -> dict[str, Any]:
        """The record, made at birth: these fields, quartiles, UTC time, machine, software, code and the hash of it all."""
        return _plain(self.__dict__["record"])


def publish(record: Measurement | dict[str, Any]) -> None:
    """Show `record` as one line of a notebook's output; the report takes the whole record from there."""
    from IPython.display import display

    sealed = record.sealed() if isinstance(record, Measurement) else record
    unit = "" if sealed["unit"] == "1" else f" {sealed['unit']}"
    line = "{what}: {metric} {value:.4g}".format(**sealed) + f"{unit} {sealed['impl']}"
    display({MIME: sealed, "text/plain": line.rstrip()}, raw=True)


def written(record: Mapping[str, Any]) -> str:
    """The code that measured a record in a few letters: its commit, or of a copy without git the hash of its files."""
    code = record["code"]
    return f"commit {code['commit'][:7]}" if code["commit"] else f"source {code.get('source') or 'unknown'}"


def _misfit(value: Any, wanted: Any) -> str | None:
    """Where `value` is not as `wanted`, as in ".stats.n"; None if nowhere. Numbers are finite, and True is none."""
    if isinstance(wanted, tuple):
        return None if any(_misfit(value, one) is None for one in wanted) else ""
    if isinstance(wanted, list) and isinstance(value, list):
        wanted, value = dict.fromkeys(range(len(value)), wanted[0]), dict(enumerate(value))
    if isinstance(wanted, dict) and isinstance(value, dict):
        inside = ((key, _misfit(value.get(key, ...), one)) for key, one in wanted.items())
        return next((f".{key}{at}" for key, at in inside if at is not None), None)
    if isinstance(wanted, re.Pattern):
        fits = isinstance(value, str) and wanted.fullmatch(value) is not None
    elif wanted is float:
        fits = type(value) in (int, float) and abs(value) <= sys.float_info.max
    else:
        fits = value is wanted or type(value) is wanted
    return None if fits else ""


def problem(record: Any) -> str:
    """Why `record` is none, or is not as it was sealed; empty when it is."""
    if (where := _misfit(record, WANTED)) is not None:
        return f"no record: {where[1:]}".rstrip(": ")
    body = {key: item for key, item in record.items() if key != "content_sha256"}
    try:
        return "" if content_hash(body) == record.get("content_sha256") else "changed after it was sealed"
    except ValueError:
        return "no record: a number that is not finite"


def append(path: str | Path, *records: Measurement | dict[str, Any]) -> None:
    """Add `records` to a JSON-lines file in one write of whole lines, safe beside other processes that append too."""
    sealed = [record.sealed() if isinstance(record, Measurement) else record for record in records]
    if wrong := [why for record in sealed if (why := problem(record))]:
        raise ValueError(f"records: expected records as they were sealed, got one that is {wrong[0]}.")
    extend(path, *sealed)


def extend(path: str | Path, *rows: Mapping[str, Any]) -> None:
    """Add `rows` to a JSON-lines file in one write of whole lines, safe beside others that do; OSError where the disk is full."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("ab+", buffering=0) as file:
        torn = file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
        left = memoryview(b"\n" * bool(torn) + _text(rows))  # a line torn by a crash must not swallow the next
        while left:  # a disk that is full takes a part, and raises at the next
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def _text(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def files(path: Path) -> list[Path]:
    """`path`, or every *.jsonl under it if it is a folder; what a killed process left half-written is none of them."""
    found = (file for file in sorted(path.rglob("*.jsonl")) if file.is_file() and not file.name.startswith("."))
    return [*found] if path.is_dir() else [path]


def _lines(path: Path) -> Iterator[tuple[Any, str]]:
    for file in files(path):
        for number, line in ((n, text) for n, text in enumerate(file.read_bytes().splitlines(), 1) if text):
            try:  # an empty line is what two that append at once may leave
                record = json.loads(line)
                yield record, (why := problem(record)) and f"{file}:{number}: {why}"
            except (ValueError, RecursionError):
                yield None, f"{file}:{number}: torn, no whole JSON"


def read(path: str | Path) -> list[dict[str, Any]]:
    """Records of a file, or of every *.jsonl under a folder; leaves out, with a warning, what is torn or changed."""
    lines = list(_lines(Path(path)))
    for wrong in filter(None, (wrong for _, wrong in lines)):
        warnings.warn(f"left out {wrong}", stacklevel=2)
    return [record for record, wrong in lines if not wrong]


def verify(paths: Iterable[str | Path]) -> list[str]:
    """One line for each record in `paths` (files or folders) that is torn, or whose recomputed hash says it changed."""
    return [wrong for path in paths for _, wrong in _lines(Path(path)) if wrong]


def mend(path: Path) -> list[str]:
    """Leaves out of a file what is torn or was changed, if nobody else writes to it, and says which lines those were."""
    lines = [*_lines(path)]
    if wrong := [why for _, why in lines if why]:
        with atomic(path) as part:
            part.write_bytes(_text(record for record, why in lines if not why))
    return wrong


def add(paths: Iterable[str | Path], into: Path, *, dirty: bool = False) -> list[dict[str, Any]]:
    """Takes records in, from folders that `asrkit bench all --minutes` wrote and from files, and returns those that are new.

    They are appended to into/<machine id>/bench.jsonl. ValueError, and nothing is taken, where a folder is of a rehearsal, a file
    is not as its manifest says, a record is torn or was changed, or no commit of this checkout holds the code that measured;
    `dirty` lets the last pass. OSError, and nothing is taken, where the disk is full. Killed, it goes on when run again.
    """
    given = {record["content_sha256"]: record for path in paths for record in _delivered(Path(path))}

    def new() -> list[dict[str, Any]]:
        known = {record["content_sha256"] for record in read(into)} if into.exists() else set()
        return [record for key, record in given.items() if key not in known]

    clean, held = functools.cache(commit_of), functools.cache(_held)
    for record in [] if dirty else new():
        code, name = record["code"], f"{record['what']} of {record['captured_at']}"
        if code["dirty"] or not (held(code["commit"]) if code["commit"] else clean(code.get("source", ""))):
            got = "a checkout with changes" if code["dirty"] else "other code"
            raise ValueError(f"{name}: expected records of code that a commit here holds, got {got}. Pass --dirty to take it.")
    with alone(into, wait=True), contextlib.ExitStack() as parts:  # renamed together, when all are written
        for left in into.glob("*/.bench-????????.jsonl"):
            left.unlink()  # of an addition that was killed
        taken = new()
        for name in sorted({record["machine"]["id"] for record in taken}):
            target, several = into / name / "bench.jsonl", [one for one in taken if one["machine"]["id"] == name]
            before = target.read_bytes() if target.exists() else b""
            part = parts.enter_context(atomic(target))
            part.write_bytes(before + b"\n" * (before[-1:] not in (b"", b"\n")) + _text(several))
    return taken


def _delivered(path: Path) -> list[dict[str, Any]]:
    """Records of a file, or of a folder with a manifest; ValueError names what is not as it was written."""
    if path.is_dir():
        file = path / "manifest.json"
        if not file.exists():
            raise ValueError(f"{path}: expected a folder that `asrkit bench all --minutes` wrote, got one without manifest.json.")
        manifest: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            manifest = json.loads(file.read_text("utf-8"))
        if (where := _misfit(manifest, DELIVERED)) is not None:
            raise ValueError(f"{file}: expected what `bench all --minutes` wrote, got another {where[1:] or 'text'}.")
        if manifest["state"] != "ended":
            raise ValueError(
                f"{path}: expected a run that has ended. Run its command again to go on, or add {path / 'bench.jsonl'}."
            )
        if manifest["quick"]:
            raise ValueError(f"{path}: expected a run of whole sizes, got a rehearsal: --quick, or on a CPU. Nothing was taken.")
        for name, told in ((name, manifest["files"][name]) for name in FILES):
            data = (path / name).read_bytes() if (path / name).exists() else b""
            if content_hash(data) != told["sha256"]:
                raise ValueError(
                    f"{path / name}: expected what the manifest says, {told['bytes']} bytes, got others. Nothing was taken."
                )
        path = path / "bench.jsonl"
    lines = list(_lines(path))
    if wrong := [why for _, why in lines if why]:
        raise ValueError(f"{'; '.join(wrong[:3])}. Nothing was taken.")
    return [record for record, _ in lines]
