"""Going on with a share in another folder: an earlier run's, carried along, becomes the new one's
beginning.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.shapes import expect
from asrkit.workbench import records
from asrkit.workbench.bench.share.journal import NAME


def take_over(earlier: Path, out: Path, same: Mapping[str, Any]) -> None:
    """Copies the files of an earlier run into `out`, which is empty; `earlier` stays as it is.

    ValueError, and nothing is copied, unless the run is of this code, of this kind of machine and
    of these arguments (`same`), and its files are as its manifest says. Where it was killed they
    may have grown since, for that is written after each part.
    """
    wanted = "a folder that `bench all --minutes` wrote"
    expect(
        (earlier / "manifest.json").is_file(),
        "resume",
        wanted,
        f"{str(earlier)!r} without manifest.json",
    )
    expect(
        all(path.name == files.LOCK for path in out.iterdir()),
        "out",
        "an empty folder with --resume",
        f"{str(out)!r} with files",
        "Name a new one.",
    )
    data = {
        name: (earlier / name).read_bytes()
        for name in ("manifest.json", *records.FILES, NAME)
        if (earlier / name).is_file()
    }
    try:
        manifest = json.loads(data["manifest.json"])
        told = {
            name: (manifest["files"][name]["bytes"], manifest["files"][name]["sha256"])
            for name in records.FILES
        }
        other = another(manifest, same)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"resume: expected {wanted}, got another manifest.json: {error!r}."
        ) from error
    expect(
        not other, "resume", "a run of this code, machine and arguments", f"one of another {other}"
    )
    for name, (size, sha256) in told.items():
        found = data.get(name, b"")
        as_told = files.content_hash(found[:size]) == sha256 and (
            len(found) == size or manifest["state"] != "ended"
        )
        expect(
            as_told,
            "resume",
            f"{name} as the manifest says, {size} bytes",
            f"others, {len(found)} bytes",
        )
    written = list[Path]()
    try:
        for name in [*reversed(data)]:  # the manifest last: without it this is no run
            written.append(out / name)
            written[-1].write_bytes(data[name])
    except OSError:  # a full disk: half a run would pass for one
        for path in written:
            path.unlink(missing_ok=True)
        raise


def another(before: Mapping[str, Any], same: Mapping[str, Any]) -> str:
    """What of an earlier manifest is other than wanted: device, quick, machine, source; "" if
    nothing is.
    """
    other = [key for key in same if key != "machine" and before.get(key) != same[key]]
    other += ["machine"] * (kind(before.get("machine") or {}) != kind(same["machine"]))
    return ", ".join(other)


def kind(machine: Mapping[str, Any]) -> Any:
    """What two machines have to share so that one goes on with the other's work: their GPUs, or
    without any all that lasts.
    """
    gpus = machine.get("gpus") or ()
    return [
        [gpu.get(key) for key in ("name", "memory.total", "compute_cap")] for gpu in gpus
    ] or machine.get("id")
