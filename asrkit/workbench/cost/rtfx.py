"""The RTFx of one core or GPU: published by others, recorded by this project, or assumed.

RTFx is computed by `asrkit.rtfx`; here it is collected for the formulas of `money`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.shapes import expect
from asrkit.workbench import records
from asrkit.workbench.cost.ranges import Range
from asrkit.workbench.tables import read_table

ON_ONE_CORE = "recogniser-one-core"  # benchmark of a whole recogniser on one core
LADDER = "ladder-"  # prefix of the benchmarks on a GPU, which have a record for each rung
OTHER_BOARDS = {"PCIe", "NVL", "MIG"}  # the tables are about whole SXM boards


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The RTFx of one core or GPU, with its source.

    Attributes:
        rtfx: Seconds of speech in a second.
        per: The unit that transcribes, "core" or "gpu".
        origin: "published", "recorded", "estimated here" or "assumed".
        device: Name of the processor or GPU.
        model: Name of the model.
        batch: Utterances in a batch; None if the source does not state it.
        source: Where the number was published, or which machine and code recorded it.
        date: Day of the source.
        note: What was timed.
    """

    rtfx: Range
    per: str
    origin: str
    device: str = ""
    model: str = ""
    batch: int | None = None
    source: str = ""
    date: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        expect(self.rtfx.low > 0, "rtfx", "above 0", self.rtfx)


def published_speeds() -> list[Speed]:
    """RTFx that others published, with source and day."""
    speeds = []
    for row in read_table("rtfx.csv"):
        rtfx = Range.of(float(row.pop("rtfx")))
        batch = int(row.pop("batch"))
        del row["speech"]
        speeds.append(Speed(rtfx=rtfx, batch=batch, origin="published", **row))
    return speeds


def recorded_speeds(path: str | Path | None = None) -> list[Speed]:
    """RTFx of whole recognisers, as medians with quartiles.

    Only the newest record of each machine and implementation counts. On one core every
    implementation is returned, on a GPU the fastest rung of each ladder.

    Args:
        path: A file or folder of records; by default the records that come with asrkit.
    """
    of_recognisers = filter(_is_of_recogniser, records.read(path or files.shipped("records")))
    newest: dict[tuple[str, str, str], Any] = {}
    for record in sorted(of_recognisers, key=lambda record: record["captured_at"]):
        newest[record["machine"]["id"], record["what"], record["impl"]] = record
    chosen: dict[tuple[str, ...], Any] = {}
    for (machine, what, impl), record in newest.items():
        key = (machine, what) if what.startswith(LADDER) else (machine, what, impl)
        if key not in chosen or chosen[key]["value"] < record["value"]:
            chosen[key] = record
    return [_speed(record) for record in chosen.values()]


def _is_of_recogniser(record: records.Record) -> bool:
    """Whether a record is the RTFx of a recogniser of published size, on one core or on a GPU."""
    params = record["params"]
    on_gpu = str(params.get("device")).startswith("cuda")
    on_ladder = record["what"].startswith(LADDER) and on_gpu
    if not on_ladder and record["what"] != ON_ONE_CORE:
        return False
    is_whole = params.get("preset", "tiny") != "tiny" and "audio_s" in params
    return record["metric"] == "rtfx" and is_whole


def _speed(record: records.Record) -> Speed:
    stats = record["stats"]
    params = record["params"]
    machine = record["machine"]
    if record["what"] == ON_ONE_CORE:
        per = "core"
        device = machine["cpu_model"]
    else:
        per = "gpu"
        device = machine["gpus"][0]["name"]
    return Speed(
        rtfx=Range(stats["p25"], stats["p50"], stats["p75"]),
        per=per,
        origin="recorded",
        device=device,
        model=params["preset"],
        batch=params.get("batch", 1),
        date=record["captured_at"][:10],
        source=f"machine {machine['id']}, {records.code_version(record)}",
        note=f"{record['impl']}, weights {params.get('weights')}, whole recogniser, "
        f"{params['audio_s']:g} s of speech",
    )


def is_device(device: str, name: str) -> bool:
    """Whether a device, under its driver's name, is the one that the tables call `name`.

    "NVIDIA A100-SXM4-80GB" is "NVIDIA A100 80GB".
    """
    words = set(re.split(r"[ -]", device))
    wanted = set(re.split(r"[ -]", name))
    return wanted <= words and not OTHER_BOARDS & (words - wanted)


def unequal(a: Speed, b: Speed) -> list[str]:
    """Differences between two speeds other than the device.

    If there are any, a comparison of their costs is not one of the devices alone.
    """
    names = {"model": "model", "batch": "batch size", "note": "what is timed", "origin": "origin"}
    differences = []
    for key, name in names.items():
        of_a, of_b = getattr(a, key), getattr(b, key)
        if of_a != of_b:
            differences.append(f"{name}: {of_a} against {of_b}")
    return differences
