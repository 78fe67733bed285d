"""RTFx of one core or one GPU, published by others or taken from records; and its watts."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.shapes import expect
from asrkit.workbench import records
from asrkit.workbench.cost.csv_tables import read_table
from asrkit.workbench.cost.prices import Instance
from asrkit.workbench.cost.ranges import Range

DEFAULT_MODEL = "parakeet_rnnt_1_1b"
ON_ONE_CORE = "recogniser-one-core"  # benchmark of a whole recogniser on one core
LADDER = "ladder-"  # first letters of those on a GPU, with a record for each rung
OTHER_BOARDS = {"PCIe", "NVL", "MIG"}  # the tables are about SXM boards, and whole ones


@dataclass(frozen=True, kw_only=True)
class Speed:
    """RTFx of one unit, a core or a GPU, and where the number is from.

    `origin` is "published", "recorded", "estimated here" or "assumed"; `batch` is None where it was
    not stated, `note` says what was timed.
    """

    rtfx: Range
    per: str  # core or gpu
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
    return [
        Speed(
            rtfx=Range.of(float(row["rtfx"])),
            origin="published",
            batch=int(row["batch"]),
            per=row["per"],
            device=row["device"],
            model=row["model"],
            source=row["source"],
            date=row["date"],
            note=row["note"],
        )
        for row in read_table("rtfx.csv")
    ]


def recorded_speeds(path: str | Path | None = None) -> list[Speed]:
    """RTFx of whole recognisers: medians with their quartiles, the newest record of each machine
    and implementation.

    On one core every implementation counts, on a GPU the fastest rung of each ladder.

    Args:
        path: a file or folder of records; by default those that come with asrkit.
    """
    found = _recogniser_records(path or files.shipped("records"))
    newest: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for record in sorted(found, key=lambda record: record["captured_at"]):
        newest[record["machine"]["id"], record["what"], record["impl"]] = record
    chosen: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for (machine, what, impl), record in newest.items():
        rank = (machine, what) if what.startswith(LADDER) else (machine, what, impl)
        if rank not in chosen or chosen[rank]["value"] < record["value"]:
            chosen[rank] = record
    return [_speed(record) for record in chosen.values()]


def _recogniser_records(path: str | Path) -> Iterator[Mapping[str, Any]]:
    """Records of RTFx of recognisers of published size, on one core or on a GPU."""
    for record in records.read(path):
        params = record["params"]
        on_gpu = str(params.get("device")).startswith("cuda")
        on_ladder = record["what"].startswith(LADDER) and on_gpu
        if not on_ladder and record["what"] != ON_ONE_CORE:
            continue
        if record["metric"] == "rtfx" and params.get("preset", "tiny") != "tiny":
            yield record


def _speed(record: Mapping[str, Any]) -> Speed:
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


def speeds_for(
    instance: Instance, speeds: Iterable[Speed], *, model: str = DEFAULT_MODEL
) -> list[Speed]:
    """Those of `speeds` that apply to an instance: of its GPU, or of a core by the same maker.

    Args:
        instance: the machine.
        speeds: RTFx to choose from.
        model: whose RTFx is wanted; if there is none, those of all models are returned.
    """
    fitting = [speed for speed in speeds if _fits(instance, speed)]
    return [speed for speed in fitting if speed.model == model] or fitting


def _fits(instance: Instance, speed: Speed) -> bool:
    if speed.per != instance.per:
        return False
    if instance.gpus:
        return _is_device(speed.device, instance.gpu)
    maker, _, _ = instance.processor.partition(" ")
    return bool(maker) and maker in speed.device


def power(device: str) -> float | None:
    """Watts of one core or GPU at its highest rated power (data sheets); None if not looked up."""
    for row in read_table("power.csv"):
        if _is_device(device, row["device"]):
            return float(row["watts"]) / int(row["units"])
    return None


def _is_device(device: str, name: str) -> bool:
    """Whether a device, as its driver calls it, is what the tables call `name`.

    "NVIDIA A100-SXM4-80GB" is "NVIDIA A100 80GB".
    """
    words = set(re.split(r"[ -]", device))
    wanted = set(re.split(r"[ -]", name))
    return wanted <= words and not OTHER_BOARDS & (words - wanted)
