"""What transcription costs: price times time, with what is not known carried through as ranges.

A machine is rented by the hour and has units, cores or GPUs. A unit transcribes `rtfx` seconds of
speech a second while it works, and it works in the share `utilisation` of the time that is paid:

    instance hours = hours / (rtfx units utilisation) + instances startup / 3600
    USD = price x instance hours
    kWh = watts of a unit / 1000 x hours / rtfx

Energy is that of a unit while it works, at its highest rated power, without its host.

Every quantity is a Range. A result rises or falls over the whole range of each of them, so there is
a case that reaches each of its ends.
"""

import csv
import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import add, mul, truediv
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.shapes import expect, whole
from asrkit.workbench import records

UNITS = {"core": "cores", "gpu": "GPUs"}
DEFAULT_MODEL = "parakeet_rnnt_1_1b"
ON_ONE_CORE = "recogniser-one-core"  # benchmark of a whole recogniser on one core
LADDER = "ladder-"  # first letters of those on a GPU, with a record for each rung
OTHER_BOARDS = {"PCIe", "NVL", "MIG"}  # the tables are about SXM boards, and whole ones
Row = dict[str, str]


def read_table(name: str) -> list[Row]:
    """The rows of a CSV file that comes with asrkit, as text by column."""
    with files.shipped(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Range:
    """What a quantity may be: lowest, middle and highest value, none below zero.

    Ranges add, multiply and divide to ranges. A range that occurs twice in a formula counts as two
    that vary independently; so the formulas here use each once.

    >>> Range(1, 2, 4) / Range(1, 2, 2) + 1
    Range(low=1.5, middle=2.0, high=5.0)
    """

    low: float
    middle: float
    high: float

    def __post_init__(self) -> None:
        ordered = 0 <= self.low <= self.middle <= self.high < inf
        expect(ordered, "range", "0 <= lowest <= middle <= highest", self.ends)

    @classmethod
    def of(cls, value: "Range | float") -> "Range":
        """`value` itself, or a number as a range without width."""
        if isinstance(value, Range):
            return value
        return cls(value, value, value)

    @classmethod
    def parse(cls, text: str, argument: str) -> "Range":
        """The range that `4`, `4:6` (with the mean in the middle) or `4:5:6` stands for.

        Raises:
            ValueError: something else, numbers out of order, or not 0 and outside 1e-12..1e12; the
                message names `argument`.
        """
        try:
            ends = [float(part) for part in text.split(":")]
        except ValueError:
            ends = []
        in_bounds = all(end == 0 or 1e-12 <= end <= 1e12 for end in ends)
        expect(
            1 <= len(ends) <= 3 and in_bounds and ends == sorted(ends),
            argument,
            "a number, 0 or in 1e-12..1e12, or LOW:HIGH, or LOW:MIDDLE:HIGH",
            repr(text),
        )
        middle = sum(ends) / len(ends)
        if len(ends) == 3:
            middle = ends[1]
        return cls(ends[0], middle, ends[-1])

    def __add__(self, other: "Range | float") -> "Range":
        return Range(*map(add, self.ends, Range.of(other).ends))

    def __mul__(self, other: "Range | float") -> "Range":
        return Range(*map(mul, self.ends, Range.of(other).ends))

    def __truediv__(self, other: "Range | float") -> "Range":
        return Range(*map(truediv, self.ends, reversed(Range.of(other).ends)))

    @property
    def ends(self) -> list[float]:
        """[lowest, middle, highest]."""
        return [self.low, self.middle, self.high]

    def __str__(self) -> str:
        """`5 (4–8)`; a range without width is its number."""
        low, middle, high = map(_number_text, self.ends)
        if low == high:
            return middle
        return f"{middle} ({low}–{high})"


def _number_text(number: float) -> str:
    if number >= 1000:
        return f"{number:,.0f}"
    return f"{number:.4g}"


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A machine as it is rented.

    `usd_per_hour` ranges over regions, from the cheapest to the dearest, with the price of the
    region listed first in the middle. `cores` are physical ones; 0 was not looked up. `prices` are
    the rows of the table.
    """

    name: str
    usd_per_hour: Range
    processor: str = ""
    vcpus: int = 0
    cores: int = 0
    gpus: int = 0
    gpu: str = ""
    prices: Sequence[Row] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        expect(self.usd_per_hour.low > 0, "price", "above 0", self.usd_per_hour)

    @property
    def per(self) -> str:
        """The unit that transcribes: "gpu" where there is one, else "core"."""
        if self.gpus:
            return "gpu"
        return "core"

    def units(self, per: str) -> int:
        """The number of cores ("core") or GPUs ("gpu"); ValueError where there are none."""
        number = {"core": self.cores, "gpu": self.gpus}[per]
        expect(number > 0, "per", f"what {self.name} has", per)
        return number


def load_prices(*, on: str = "9999-12-31") -> dict[str, Instance]:
    """Instances by name, at the newest price of each region on a day.

    Args:
        on: The day, YYYY-MM-DD; later prices are ignored. By default the newest prices.
    """
    try:
        day = datetime.date.fromisoformat(on).isoformat()
    except ValueError:
        raise ValueError(f"on: expected a day such as 2024-09-24, got {on!r}.") from None
    newest: dict[str, dict[str, Row]] = {}  # by name and region
    for row in sorted(read_table("prices.csv"), key=lambda row: row["date"]):
        if row["date"] <= day:
            newest.setdefault(row["instance"], {})[row["region"]] = row
    return {name: _instance([*by_region.values()]) for name, by_region in newest.items()}


def _instance(rows: Sequence[Row]) -> Instance:
    """The instance that all `rows` are prices of, a region each."""
    first = rows[0]
    usd = [float(row["usd_per_hour"]) for row in rows]
    counts = {name: int(first[name] or 0) for name in ("vcpus", "cores", "gpus")}
    return Instance(
        name=first["instance"],
        usd_per_hour=Range(min(usd), usd[0], max(usd)),
        processor=first["processor"],
        gpu=first["gpu"],
        prices=rows,
        **counts,
    )


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
    speeds = []
    for row in read_table("rtfx.csv"):
        rtfx = Range.of(float(row.pop("rtfx")))
        batch = int(row.pop("batch"))
        del row["speech"]
        speeds.append(Speed(rtfx=rtfx, batch=batch, origin="published", **row))
    return speeds


def recorded_speeds(path: str | Path | None = None) -> list[Speed]:
    """RTFx of whole recognisers: medians with their quartiles, the newest record of each machine
    and implementation.

    On one core every implementation counts, on a GPU the fastest rung of each ladder.

    Args:
        path: A file or folder of records; by default those that come with asrkit.
    """
    found = filter(_is_of_recogniser, records.read(path or files.shipped("records")))
    newest: dict[tuple[str, str, str], Any] = {}
    for record in sorted(found, key=lambda record: record["captured_at"]):
        newest[record["machine"]["id"], record["what"], record["impl"]] = record
    chosen: dict[tuple[str, ...], Any] = {}
    for (machine, what, impl), record in newest.items():
        rank = (machine, what) if what.startswith(LADDER) else (machine, what, impl)
        if rank not in chosen or chosen[rank]["value"] < record["value"]:
            chosen[rank] = record
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


def speeds_for(
    instance: Instance, speeds: Iterable[Speed], *, model: str = DEFAULT_MODEL
) -> list[Speed]:
    """Those of `speeds` that apply to an instance: of its GPU, or of a core by the same maker.

    Args:
        instance: The machine.
        speeds: RTFx to choose from.
        model: Whose RTFx is wanted; if there is none, those of all models are returned.
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


@dataclass(frozen=True, kw_only=True)
class TranscriptionCost:
    """What a transcription costs on one instance at one speed.

    `compute` is what the working hours cost, `startup` the hours before them, in USD; `kWh` is None
    where the unit's power is not known.
    """

    instance: Instance
    speed: Speed
    hours: float
    utilisation: Range
    compute: Range
    startup: Range
    kWh: Range | None

    @property
    def name(self) -> str:
        """Instance and RTFx, for tables and pictures: `p4de.24xlarge, RTFx 2,053`."""
        return f"{self.instance.name}, RTFx {Range.of(self.speed.rtfx.middle)}"

    @property
    def usd(self) -> Range:
        """USD of both parts. The price is the same in them, so its ends are reached."""
        return self.compute + self.startup

    @property
    def usd_per_million_hours(self) -> Range:
        """USD of a million hours of speech at the same rate."""
        return self.usd * (1e6 / self.hours)

    @property
    def caveats(self) -> list[str]:
        """What combining this speed with this machine takes for granted, one line each."""
        instance = self.instance
        speed = self.speed
        units = instance.units(speed.per)
        priced = instance.gpu if speed.per == "gpu" else instance.processor
        caveats = []
        if priced and speed.device and speed.device != priced:
            caveats.append(f"RTFx of {speed.device}, price of {priced}")
        if speed.per == "core" and instance.vcpus > instance.cores:
            caveats.append(
                f"{instance.cores} cores are sold as {instance.vcpus} vCPUs; "
                "RTFx is of a core whose second thread is idle"
            )
        if units > 1:
            caveats.append(f"linear over {units} {UNITS[speed.per]}")
        if speed.note:
            caveats.append(f"RTFx: {speed.note}")
        return caveats


def transcription_cost(
    instance: Instance,
    speed: Speed,
    *,
    hours: float = 1e6,
    utilisation: Range | float = 1.0,
    startup_s: Range | float = 0.0,
    instances: int = 1,
) -> TranscriptionCost:
    """The cost of transcribing on `instance` at `speed`.

    Storage and transfer are left out, and by default startup, which flatters cores and GPUs alike.

    Args:
        instance: The machine.
        speed: Of one of its units.
        hours: Of speech.
        utilisation: Share of the paid time in which a unit works.
        startup_s: Paid before an instance works.
        instances: Started in all.

    >>> machine = Instance(name="mine", usd_per_hour=Range.of(2.0), cores=10)
    >>> speed = Speed(rtfx=Range(4, 5, 8), per="core", origin="assumed")
    >>> transcription_cost(machine, speed, hours=1000, utilisation=0.5).usd
    Range(low=50.0, middle=80.0, high=100.0)
    """
    expect(0 < hours < inf, "hours", "above 0", hours)
    expect(whole(instances, 1, 10**9), "instances", "1 to 1e9", instances)
    used = Range.of(utilisation)
    expect(0 < used.low <= used.high <= 1, "utilisation", "above 0, at most 1", used)
    unit_hours = Range.of(hours) / speed.rtfx
    working_hours = unit_hours / instance.units(speed.per) / used
    startup = instance.usd_per_hour * (Range.of(startup_s) * (instances / 3600))
    watts = power(speed.device)
    return TranscriptionCost(
        instance=instance,
        speed=speed,
        hours=hours,
        utilisation=used,
        compute=instance.usd_per_hour * working_hours,
        startup=startup,
        kWh=unit_hours * (watts / 1000) if watts else None,
    )


def break_even_rtfx(a: TranscriptionCost, b: TranscriptionCost) -> Range:
    """The RTFx at which the hours that a unit of `a` works cost as much as those of `b`.

    The lowest end is for `a` cheap and `b` dear, the highest the other way round. Startup does not
    depend on the RTFx and is left out.
    """
    unit_usd = a.instance.usd_per_hour / a.instance.units(a.speed.per) / a.utilisation
    return unit_usd / (b.compute / b.hours)


def compare(costs: Sequence[TranscriptionCost]) -> list[dict[str, Any]]:
    """A row for each cost, cheapest first; ranges are [lowest, middle, highest].

    `break_even_rtfx` is against the cheapest of the same model on the other unit, cores or GPUs.
    """
    ordered = sorted(costs, key=lambda cost: cost.usd.middle)
    return [_row(cost, ordered) for cost in ordered]


def _row(cost: TranscriptionCost, ordered: Sequence[TranscriptionCost]) -> dict[str, Any]:
    speed = cost.speed
    same_model = (other for other in ordered if other.speed.model == speed.model)
    rivals = [other for other in same_model if other.speed.per != speed.per]
    return {
        "instance": cost.instance.name,
        "usd_per_hour": cost.instance.usd_per_hour.ends,
        "model": speed.model,
        "batch": speed.batch,
        "rtfx": speed.rtfx.ends,
        "per": speed.per,
        "units": cost.instance.units(speed.per),
        "origin": speed.origin,
        "device": speed.device,
        "date": speed.date,
        "source": speed.source,
        "usd": cost.usd.ends,
        "usd_per_million_hours": cost.usd_per_million_hours.ends,
        "break_even_rtfx": break_even_rtfx(cost, rivals[0]).ends if rivals else None,
        "against": rivals[0].name if rivals else None,
        "kWh": cost.kWh.ends if cost.kWh else None,
        "caveats": cost.caveats,
    }


def range_text(ends: Sequence[float] | None) -> str:
    """[lowest, middle, highest] as text, and a dash for what is not known."""
    if not ends:
        return "–"
    return str(Range(*ends))


def unequal(a: Speed, b: Speed) -> list[str]:
    """In what two speeds differ beside the device; if in anything, their costs do not compare
    devices alone.
    """
    names = {"model": "model", "batch": "batch size", "note": "what is timed", "origin": "origin"}
    differences = []
    for key, name in names.items():
        one, other = getattr(a, key), getattr(b, key)
        if one != other:
            differences.append(f"{name}: {one} against {other}")
    return differences
