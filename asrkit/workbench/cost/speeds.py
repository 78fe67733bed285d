"""RTFx of one core or one GPU, published by others or taken from records; and its watts."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.shapes import expect, expect_types
from asrkit.workbench import records
from asrkit.workbench.cost.csv_tables import Row, read_table
from asrkit.workbench.cost.prices import Instance
from asrkit.workbench.cost.ranges import Range
from asrkit.workbench.machine import this_machine

SAME_KIND = "recorded, a machine of this kind"  # same processor, cores and memory: maybe this one
ESTIMATED = "estimated here"  # from measurements of a part of the model
ORIGINS = ("published", "recorded", SAME_KIND, "measured here", ESTIMATED, "assumed")
DEFAULT_MODEL = "parakeet_rnnt_1_1b"
ON_ONE_CORE = "recogniser-one-core"  # benchmark of a whole recogniser on one core
LADDER = "ladder-"  # first letters of those on a GPU, with a record for each rung
OTHER_BOARDS = {"PCIe", "NVL", "MIG"}  # the tables are about SXM boards, and whole ones


@dataclass(frozen=True, kw_only=True)
class Speed:
    """RTFx of one unit, a core or a GPU, and where the number is from.

    `batch` is None where it was not stated, `note` says what was timed.
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
        expect_types(self)
        expect(self.rtfx.low > 0, "rtfx", "above 0", self.rtfx)
        expect(self.per in ("core", "gpu"), "per", "core or gpu", repr(self.per))
        expect(self.origin in ORIGINS, "origin", "one of " + ", ".join(ORIGINS), repr(self.origin))

    @property
    def label(self) -> str:
        """Origin, device and date, as tables and pictures show them beside the number."""
        return ", ".join(filter(None, (self.origin, self.device, self.date)))


def published_speeds(path: str | Path | None = None) -> list[Speed]:
    """RTFx that others published, with source and day.

    Args:
        path: a table like rtfx.csv; by default the one that comes with asrkit.
    """
    return read_table(path or "rtfx.csv", _parse_speed)


def _parse_speed(row: Row) -> Speed:
    return Speed(
        rtfx=Range.of(float(row["rtfx"]), "rtfx"),
        origin="published",
        batch=int(row["batch"]),
        per=row["per"],
        device=row["device"],
        model=row["model"],
        source=row["source"],
        date=row["date"],
        note=row["note"],
    )


@dataclass(frozen=True)
class _Run:
    """A record of a whole recogniser, and whether it is from a file of the reader's own."""

    record: Mapping[str, Any]
    own: bool

    @property
    def setup(self) -> tuple[str, str, str]:
        """Machine, benchmark and implementation: of these only the newest record counts."""
        return self.record["machine"]["id"], self.record["what"], self.record["impl"]

    @property
    def recency(self) -> tuple[bool, str]:
        """Own records come after all others, then it is time that counts."""
        return self.own, self.record["captured_at"]

    @property
    def rank(self) -> tuple[str, str, str]:
        """Runs of one rank compete: all rungs of a ladder, but no implementations on one core."""
        machine, what, implementation = self.setup
        if what != ON_ONE_CORE:
            implementation = ""
        return machine, what, implementation


def recorded_speeds(*paths: str | Path, own: Sequence[str | Path] = ()) -> list[Speed]:
    """RTFx of whole recognisers: medians with their quartiles, the newest record of each machine
    and implementation.

    On one core every implementation counts, on a GPU the fastest rung of each ladder.

    Args:
        paths: files or folders of records; by default those that come with asrkit.
        own: the reader's files. Their records replace others, and count as "measured here" if this
            machine made them.
    """
    newest: dict[tuple[str, str, str], _Run] = {}
    for path in (*(paths or [files.shipped("records")]), *own):
        for record in _recogniser_records(path):
            run = _Run(record, path in own)
            if run.setup not in newest or newest[run.setup].recency < run.recency:
                newest[run.setup] = run
    fastest: dict[tuple[str, str, str], _Run] = {}
    for run in newest.values():
        best = fastest.get(run.rank)
        if best is None or best.record["value"] < run.record["value"]:
            fastest[run.rank] = run
    return [_speed(run) for run in fastest.values()]


def _recogniser_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """Records of RTFx of recognisers of published size, on one core or on a GPU."""
    for record in records.read(path):
        params = record["params"]
        on_gpu = str(params.get("device")).startswith("cuda")
        on_ladder = record["what"].startswith(LADDER) and on_gpu
        if not on_ladder and record["what"] != ON_ONE_CORE:
            continue
        if record["metric"] == "rtfx" and params.get("preset", "tiny") != "tiny":
            yield record


def _speed(run: _Run) -> Speed:
    record = run.record
    stats = record["stats"]
    params = record["params"]
    machine = record["machine"]
    origin = "recorded"
    if machine["id"] == this_machine()["id"]:
        origin = "measured here" if run.own else SAME_KIND
    if record["what"] == ON_ONE_CORE:
        per = "core"
        device = machine["cpu_model"]
    else:
        per = "gpu"
        device = machine["gpus"][0]["name"]
    return Speed(
        rtfx=Range(stats["p25"], stats["p50"], stats["p75"]),
        per=per,
        origin=origin,
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
    for row in read_table("power.csv", dict):
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
