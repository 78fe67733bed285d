"""Continue a share in another folder: the files of an earlier run are copied into it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.shapes import expect
from asrkit.workbench import records
from asrkit.workbench.bench.share.journal import NAME

WANTED = "a folder that `bench all --minutes` wrote"


def take_over(earlier: Path, out: Path, same: Mapping[str, Any]) -> None:
    """Copy the files of an earlier run; `earlier` stays as it is.

    Args:
        earlier: folder of the run.
        out: folder of the new one, empty.
        same: device, quick, machine and source of the new run, which must be those of the earlier.

    Raises:
        ValueError: the run is of other code, another kind of machine or other arguments, or its
            files are not as its manifest says. Nothing is copied. Files of a run that was killed
            may have grown since its manifest was written.
    """
    has_manifest = (earlier / "manifest.json").is_file()
    expect(has_manifest, "resume", WANTED, f"{str(earlier)!r} without manifest.json")
    empty = all(path.name == files.LOCK for path in out.iterdir())
    got = f"{str(out)!r} with files"
    expect(empty, "out", "an empty folder with --resume", got, "Name a new one.")
    contents = {}
    for name in ("manifest.json", *records.FILES, NAME):
        if (earlier / name).is_file():
            contents[name] = (earlier / name).read_bytes()
    _expect_same(contents, same)
    written = []
    try:
        for name in reversed(contents):  # the manifest last: without it this is no run
            written.append(out / name)
            (out / name).write_bytes(contents[name])
    except OSError:  # a full disk: half a run would pass for one
        for path in written:
            path.unlink(missing_ok=True)
        raise


def _expect_same(contents: Mapping[str, bytes], same: Mapping[str, Any]) -> None:
    """Raise ValueError unless a run may be continued and its files are as its manifest says."""
    try:
        manifest = json.loads(contents["manifest.json"])
        ended = manifest["state"] == "ended"
        other = differences(manifest, same)
        hashes = {}
        for name in records.FILES:
            entry = manifest["files"][name]
            hashes[name] = (entry["bytes"], entry["sha256"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"resume: expected {WANTED}, got another manifest.json: {error!r}."
        ) from error
    wanted = "a run of this code, machine and arguments"
    expect(not other, "resume", wanted, f"one of another {other}")
    for name, (size, sha256) in hashes.items():
        data = contents.get(name, b"")
        as_said = files.content_hash(data[:size]) == sha256
        if ended and len(data) != size:
            as_said = False
        wanted = f"{name} as the manifest says, {size} bytes"
        expect(as_said, "resume", wanted, f"others, {len(data)} bytes")


def differences(before: Mapping[str, Any], same: Mapping[str, Any]) -> str:
    """Which of device, quick, machine and source differ from an earlier manifest; "" if none."""
    other = []
    for key, value in same.items():
        earlier = before.get(key)
        if key == "machine":
            earlier = hardware(earlier or {})
            value = hardware(value)
        if earlier != value:
            other.append(key)
    return ", ".join(other)


def hardware(machine: Mapping[str, Any]) -> Any:
    """What two machines must share for one to go on with the other's work.

    That is their GPUs; without any it is the machine itself.
    """
    gpus = []
    for gpu in machine.get("gpus") or ():
        gpus.append([gpu.get(key) for key in ("name", "memory.total", "compute_cap")])
    return gpus or machine.get("id")
