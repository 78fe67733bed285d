"""All that a GPU machine contributes, in one command: every path is checked against its reference,
then every suite is measured, within the minutes given. Its folder is called a share.

    python -m asrkit bench all --device cuda --minutes 9 --out $OUT

It works in an unpacked copy of this repository with torch, torchaudio, numpy, numba-cuda and triton
beside it, and nothing installed. NeMo's decoders join where build/peers was taken along (see
asrkit.workbench.bench.peers.peer_decoders).

Checks come first: what fails one is not measured. What there was no time to check is measured,
because each case of a suite compares its arms before it times them. Then come the parts of
`share.parts`, those that settle most claims first.

Groups of checks and parts run in processes of their own, so what crashes, hangs or takes all memory
ends alone. After an error the device has to answer. Where it does not, the process ends, and the
part is started again without the case or arm that did it, as after a crash. Records are written as
they are made, those of repeats that go on every two seconds, the manifest after each part. A run
that is killed goes on where it was, in the same folder, or in another one that takes the earlier
one over (`resume`). No case begins in the last minute; what still runs then is ended.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.shapes import expect
from asrkit.workbench import machine
from asrkit.workbench.bench import checks
from asrkit.workbench.bench.share.checking import run_checks
from asrkit.workbench.bench.share.measuring import measure_parts
from asrkit.workbench.bench.share.parts import COMPILED, PARTS
from asrkit.workbench.bench.share.progress import Progress
from asrkit.workbench.bench.share.takeover import take_over
from asrkit.workbench.bench.share.work import Row
from asrkit.workbench.tables import aligned


def share(
    out: Path,
    *,
    device: str,
    minutes: float,
    quick: bool = False,
    resume: Path | None = None,
    say: Callable[[str], object] = print,
) -> Row:
    """Check and measure everything; returns the manifest: what was measured, what not, and why.

    Args:
        out: folder for records, checks, log and manifest; a run in it is continued.
        device: "cpu" or "cuda".
        minutes: after which everything has ended.
        quick: small sizes and few repeats; always so on a CPU.
        resume: folder of an earlier run, which is copied into `out`, empty until then.
        say: called with lines of text on what goes on.

    Raises:
        ValueError: a folder holds the share of other code, of another kind of machine or of other
            arguments, or is not as its manifest says, or another run writes to it.
    """
    begun = time.monotonic()
    expect(0.5 <= minutes <= 1e4, "minutes", "0.5 to 10,000", minutes)
    same = {
        "device": device,
        "quick": quick or not device.startswith("cuda"),
        "machine": machine.this_machine(),
        "source": machine.code()["source"],
    }
    with files.lock(out):
        if resume:
            take_over(resume, out, same)
        parts = [part for part in PARTS if part.name != COMPILED or device.startswith("cuda")]
        progress = Progress(out, same, parts, minutes=minutes, begun=begun, say=say)
        table = checks.table(device)
        progress.tell(
            f"{len(table)} checks, {len(progress.checks)} passed before;"
            f" {len(parts)} parts, {len(progress.manifest['parts'])} done before"
        )
        progress.write()
        try:
            run_checks(progress, table)
            failed = {check.vouches for check in table if progress.failed(check.name)}
            measure_parts(progress, parts, failed - {""})
            progress.manifest["state"] = "ended"
        finally:
            progress.write()
    return progress.manifest


def report(manifest: Mapping[str, Any]) -> list[str]:
    """Lines that say what was measured and what was not."""
    rows = []
    for name, part in manifest["parts"].items():
        made = f"{part['records']} records"
        rows.append([name, part["status"], made, f"{part['seconds']:.1f} s", part["why"]])
    for name, why in manifest["elsewhere"].items():
        rows.append([name, "elsewhere", "", "", why])
    lines = aligned(rows, right=[2, 3])
    if manifest.get("left_out"):
        names = ", ".join(manifest["left_out"])
        lines.append(f"left out, because their checks did not pass: {names}")
    return lines
