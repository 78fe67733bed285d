"""Money: price times time, with where each number is from, and what is not known carried through.

A machine is rented by the hour and has units, cores or GPUs. A unit transcribes `rtfx` seconds of
speech a second while it works, and it works in `utilisation` of the time that is paid:

    instance hours = hours / (rtfx units utilisation) + instances startup / 3600 USD            =
    price x instance hours + GB of speech x (storage x months + egress) kWh            = watts of a
    unit x hours / rtfx: while it works, at its highest rated power, without the host

Every quantity is a Range. Each result grows or falls all the way with each of them, so its ends are
reached, by one case.
"""

import csv
import datetime
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from asrkit import files
from asrkit.shapes import expect, expect_types, whole
from asrkit.workbench import records
from asrkit.workbench.cost.ranges import Range
from asrkit.workbench.machine import this_machine

# same processor, cores and memory: perhaps this one, and perhaps another
KIN = "recorded, a machine of this kind"
ORIGINS = ("published", "recorded", KIN, "measured here", "assumed")
CORE, GPU = (
    "recogniser-one-core",
    "ladder-",
)  # benchmarks of a whole recogniser: on one core; on a GPU, rung by rung
MODEL = "parakeet_rnnt_1_1b"
MOST = 10**9  # cores, GPUs, instances
GB_PER_HOUR = 0.1152  # of speech: 16 kHz, 16 bits, one channel, uncompressed
Row = dict[str, str]
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """RTFx of one core or one GPU, and where the number is from; `batch` None was not stated."""

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
        """Origin and where or when: what stands beside the number in every table and picture."""
        return ", ".join(filter(None, (self.origin, self.device, self.date)))


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A machine as it is rented; USD an hour from the lowest to the highest region, the region
    listed first in the middle.
    """

    name: str
    usd_per_hour: Range
    provider: str = ""
    processor: str = ""
    vcpus: int = 0
    cores: int = 0  # physical; 0 was not looked up
    gpus: int = 0
    gpu: str = ""
    prices: Sequence[Row] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        expect_types(self)
        expect(self.usd_per_hour.low > 0, "price", "above 0", self.usd_per_hour)
        for name in ("vcpus", "cores", "gpus"):
            expect(whole(getattr(self, name), 0, MOST), name, f"0 to {MOST:,}", getattr(self, name))

    @property
    def per(self) -> str:
        """What transcribes: gpu where there is one, else core."""
        return "gpu" if self.gpus else "core"

    def units(self, per: str) -> int:
        """How many cores or GPUs there are."""
        count = self.gpus if per == "gpu" else self.cores
        expect(
            count > 0,
            "per",
            f"what {self.name} has",
            f"{per}, of which it has {count or 'no known number'}",
        )
        return count


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What is asked for, and on which conditions; the defaults leave out startup, storage and
    transfer, and flatter both sides.
    """

    hours: float = 1e6  # of speech
    utilisation: Range | float = 1.0  # share of the time paid in which a unit works
    startup_s: Range | float = 0.0  # of an instance, paid before it works
    instances: int = 1  # started in all
    GB_per_hour: Range | float = GB_PER_HOUR
    storage_usd_per_GB_month: Range | float = 0.0
    months: Range | float = 1.0
    egress_usd_per_GB: Range | float = 0.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if name not in ("hours", "instances"):
                object.__setattr__(self, name, Range.of(getattr(self, name), name))
        expect_types(self)
        expect(self.hours > 0, "hours", "above 0", self.hours)
        expect(
            whole(self.instances, 1, MOST),
            "instances",
            f"a whole number in 1..{MOST:,}",
            self.instances,
        )
        used = Range.of(self.utilisation)
        expect(
            used.low > 0 and used.high <= 1,
            "utilisation",
            "above 0, at most 1",
            used.high if used.low else 0,
        )


@dataclass(frozen=True, kw_only=True)
class TranscriptionCost:
    """USD in parts (compute, startup, storage, egress), hours of instances, and energy where the
    unit's power is known.
    """

    instance: Instance
    speed: Speed
    terms: Terms
    parts: Mapping[str, Range]
    instance_hours: Range
    kWh: Range | None

    @property
    def name(self) -> str:
        """`p4de.24xlarge, RTFx 2,053`: what tells it from others in a table."""
        return f"{self.instance.name}, RTFx {Range.of(self.speed.rtfx.middle)}"

    @property
    def usd(self) -> Range:
        """All parts together. Price and utilisation are one number in all of them, so the ends are
        reached.
        """
        return sum(self.parts.values(), Range(0, 0, 0))

    @property
    def usd_per_million_hours(self) -> Range:
        """As if this many hours cost in proportion."""
        return self.usd * (1e6 / self.terms.hours)

    @property
    def caveats(self) -> list[str]:
        """What the product of this speed and this machine takes for granted, one line each."""
        instance, speed = self.instance, self.speed
        priced, smt = (
            instance.gpu if speed.per == "gpu" else instance.processor,
            instance.vcpus > instance.cores,
        )
        said = {
            f"RTFx of {speed.device}, price of {priced}": speed.device not in ("", priced)
            and bool(priced),
            f"{instance.cores} cores are sold as {instance.vcpus} vCPUs; RTFx is of a core whose second thread is idle": speed.per
            == "core"
            and smt,
            f"linear over {instance.units(speed.per)} {'GPUs' if speed.per == 'gpu' else 'cores'}": instance.units(
                speed.per
            )
            > 1,
            f"RTFx: {speed.note}": bool(speed.note),
        }
        return [text for text, holds in said.items() if holds]


def transcription_cost(instance: Instance, speed: Speed, **terms: Any) -> TranscriptionCost:
    """What it costs to transcribe on `instance` at `speed`; `terms` are those of `Terms`.

    >>> machine = Instance(name="mine", usd_per_hour=Range.of(2.0), cores=10)
    >>> speed = Speed(rtfx=Range(4, 5, 8), per="core", origin="assumed")
    >>> transcription_cost(machine, speed, hours=1000, utilisation=0.5).usd
    Range(low=50.0, middle=80.0, high=100.0)
    """
    asked = Terms(**terms)
    busy = asked.hours / speed.rtfx  # hours of one unit
    working = busy / instance.units(speed.per) / asked.utilisation
    starting = asked.instances * Range.of(asked.startup_s) / 3600
    GB, price = asked.hours * Range.of(asked.GB_per_hour), instance.usd_per_hour
    parts = {
        "compute": price * working,
        "startup": price * starting,
        "storage": GB * asked.storage_usd_per_GB_month * asked.months,
        "egress": GB * asked.egress_usd_per_GB,
    }
    watts = power(speed.device)
    kWh = busy * (watts / 1000) if watts else None
    return TranscriptionCost(
        instance=instance,
        speed=speed,
        terms=asked,
        parts=parts,
        instance_hours=working + starting,
        kWh=kWh,
    )


def break_even_rtfx(a: TranscriptionCost, b: TranscriptionCost) -> Range | None:
    """RTFx that a unit of `a` needs so that its machines cost as much as those of `b`; None if its
    startup alone costs more.

    Storage and egress do not depend on the machine and are left out. The range: `a` cheap and `b`
    dear, the middle, and `a` dear and `b` cheap; its price, utilisation and startup at one end for
    all of `a`.
    """
    expect(
        a.terms.hours == b.terms.hours,
        "hours",
        "as many for both",
        f"{a.terms.hours:g} and {b.terms.hours:g}",
    )
    machines = b.parts["compute"] + b.parts["startup"]
    units, found = a.instance.units(a.speed.per), []
    ends = zip(
        a.instance.usd_per_hour.ends,
        Range.of(a.terms.utilisation).ends[::-1],
        a.parts["startup"].ends,
        machines.ends[::-1],
        strict=True,
    )
    for price, used, started, budget in ends:
        if budget <= started:
            return None
        found.append(price * a.terms.hours / (units * used * (budget - started)))
    return Range(*found)


def compare(costs: Sequence[TranscriptionCost]) -> list[dict[str, Any]]:
    """A row a cost, cheapest first, numbers as [lowest, middle, highest].

    Break-even is against the cheapest of the same model on the other unit, cores or GPUs, or else
    on another instance.
    """
    rows, order = [], sorted(costs, key=lambda cost: cost.usd.middle)
    for cost in order:
        speed, name = cost.speed, cost.instance.name
        same = [one for one in order if one.speed.model == speed.model]
        rivals = [one for one in same if one.speed.per != speed.per] or [
            one for one in same if one.instance.name != name
        ]
        even = break_even_rtfx(cost, rivals[0]) if rivals else None
        rows.append(
            {
                "instance": name,
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
                "instance_hours": cost.instance_hours.ends,
                "parts": {part: usd.ends for part, usd in cost.parts.items() if usd.high},
                "break_even_rtfx": even and even.ends,
                "against": rivals[0].name if rivals else None,
                "kWh": cost.kWh and cost.kWh.ends,
                "caveats": cost.caveats,
            }
        )
    return rows


def cheapest_pair(
    costs: Sequence[TranscriptionCost], *, model: str = MODEL
) -> tuple[TranscriptionCost, TranscriptionCost] | None:
    """The cheapest on cores and the cheapest on GPUs of one model: `model` if it has both, else the
    cheapest that has; or None.
    """
    order, best = (
        sorted(costs, key=lambda cost: cost.usd.middle),
        dict[tuple[str, str], TranscriptionCost](),
    )
    for cost in order:
        best.setdefault((cost.speed.model, cost.speed.per), cost)
    both = [
        name
        for name in dict.fromkeys([model, *(cost.speed.model for cost in order)])
        if {(name, "core"), (name, "gpu")} <= {*best}
    ]
    return (best[both[0], "core"], best[both[0], "gpu"]) if both else None


def unequal(a: Speed, b: Speed) -> list[str]:
    """In what two speeds differ beside the device, so that their costs are no comparison of devices
    alone; empty is fair.
    """
    differing = {
        "model": (a.model, b.model),
        "batch size": (a.batch, b.batch),
        "what is timed": (a.note, b.note),
        "origin": (a.origin, b.origin),
    }
    return [
        f"{name}: {one} against {other}" for name, (one, other) in differing.items() if one != other
    ]


def sensitivity(outcome: Callable[..., float], **inputs: Range) -> dict[str, tuple[float, float]]:
    """Outcomes at the lowest and at the highest of each input, the others in the middle; what moves
    the outcome most comes first.

    >>> sensitivity(lambda price, rtfx: price / rtfx, price=Range(1, 2, 3), rtfx=Range(1, 1, 4))
    {'price': (1.0, 3.0), 'rtfx': (2.0, 0.5)}
    """
    middle = {name: one.middle for name, one in inputs.items()}
    found = {
        name: (outcome(**middle | {name: one.low}), outcome(**middle | {name: one.high}))
        for name, one in inputs.items()
    }
    return dict(sorted(found.items(), key=lambda item: -abs(item[1][1] - item[1][0])))


def load_prices(path: str | Path | None = None, *, on: str = "9999-12-31") -> dict[str, Instance]:
    """Instances by name, at the newest price of each region on the day `on` (2024-09-24) or before;
    by default those shipped.
    """
    day, offers = _day(on, "on"), dict[str, dict[str, Instance]]()
    for when, region, one in sorted(
        _table(path or "prices.csv", _offer), key=lambda offer: offer[0]
    ):
        if when <= day:
            offers.setdefault(one.name, {})[region] = one  # keeps its place, takes the newer price
    found = {}
    for name, regions in offers.items():
        usd, prices = (
            [one.usd_per_hour.middle for one in regions.values()],
            [row for one in regions.values() for row in one.prices],
        )
        found[name] = replace(
            next(iter(regions.values())),
            usd_per_hour=Range(min(usd), usd[0], max(usd)),
            prices=tuple(prices),
        )
    return found


def _offer(row: Row) -> tuple[str, str, Instance]:
    told: dict[str, Any] = {key: int(row[key] or 0) for key in ("vcpus", "cores", "gpus")}
    told |= {key: row[key] for key in ("provider", "processor", "gpu")}
    price = Range.of(float(row["usd_per_hour"]), "usd_per_hour")
    return (
        _day(row["date"], "date"),
        row["region"],
        Instance(name=row["instance"], usd_per_hour=price, prices=(row,), **told),
    )


def _day(text: str, argument: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except (TypeError, ValueError):
        raise ValueError(f"{argument}: expected a day such as 2024-09-24, got {text!r}.") from None


def published_speeds(path: str | Path | None = None) -> list[Speed]:
    """RTFx that others published, with source and day; by default those shipped."""

    def speed(row: Row) -> Speed:
        told: dict[str, Any] = {
            key: row[key] for key in ("per", "device", "model", "source", "date", "note")
        }
        return Speed(
            rtfx=Range.of(float(row["rtfx"]), "rtfx"),
            origin="published",
            batch=int(row["batch"]),
            **told,
        )

    return _table(path or "rtfx.csv", speed)


def recorded_speeds(*paths: str | Path, own: Sequence[str | Path] = ()) -> list[Speed]:
    """RTFx of whole recognisers, the newest record of each machine and implementation: quartiles
    about the median.

    On one core every implementation, on a GPU the fastest rung of each ladder. Records of `own`
    files, the reader's, come before others, and are measured here if this machine made them.
    """
    newest, best = dict[Any, tuple[bool, str, dict[str, Any]]](), dict[Any, tuple[float, Speed]]()
    for path in (*(paths or [files.shipped("records")]), *own):
        for record in records.read(path):
            what, params, order = (
                record["what"],
                record["params"],
                (path in own, record["captured_at"]),
            )
            fits = what == CORE or (
                what.startswith(GPU) and str(params.get("device")).startswith("cuda")
            )
            key = record["machine"]["id"], what, record["impl"]
            older = key not in newest or newest[key][:2] < order
            if (
                fits
                and older
                and record["metric"] == "rtfx"
                and params.get("preset", "tiny") != "tiny"
            ):
                newest[key] = (*order, record)
    for (machine, what, impl), (mine, _, record) in newest.items():
        kind, origin = (
            (machine, what, impl if what == CORE else ""),
            "measured here" if mine else KIN,
        )
        if kind not in best or best[kind][0] < record["value"]:
            best[kind] = (
                record["value"],
                _speed(record, origin if machine == this_machine()["id"] else "recorded"),
            )
    return [speed for _, speed in best.values()]


def _speed(record: Mapping[str, Any], origin: str) -> Speed:
    stats, kind, params, on_core = (
        record["stats"],
        record["machine"],
        record["params"],
        record["what"] == CORE,
    )
    return Speed(
        rtfx=Range(stats["p25"], stats["p50"], stats["p75"]),
        per="core" if on_core else "gpu",
        origin=origin,
        device=kind["cpu_model"] if on_core else kind["gpus"][0]["name"],
        model=params["preset"],
        batch=params.get("batch", 1),
        date=record["captured_at"][:10],
        source=f"machine {kind['id']}, {records.code_version(record)}",
        note=f"{record['impl']}, weights {params.get('weights')}, whole recogniser, {params['audio_s']:g} s of speech",
    )


def speeds_for(instance: Instance, speeds: Iterable[Speed], *, model: str = MODEL) -> list[Speed]:
    """Those of `speeds` that say something about `instance`: its GPU; or, of cores, its maker's,
    whatever the processor.

    Those of `model`, or where there are none those of any model, which say so.
    """
    maker = instance.processor.split()[:1]
    fits = [
        speed
        for speed in speeds
        if speed.per == instance.per
        and (
            _same(speed.device, instance.gpu)
            if instance.gpus
            else bool(maker) and maker[0] in speed.device
        )
    ]
    return [speed for speed in fits if speed.model == model] or fits


def power(device: str) -> float | None:
    """Watts of one core or GPU at the highest rated power, from data sheets; None where none was
    looked up.
    """
    found = [
        float(row["watts"]) / int(row["units"])
        for row in _table("power.csv", dict)
        if _same(device, row["device"])
    ]
    return found[0] if found else None


def _same(device: str, name: str) -> bool:
    """Whether `device`, as its driver calls it, is what tables call `name`: "NVIDIA A100-SXM4-80GB"
    is "NVIDIA A100 80GB".
    """
    words, wanted = ({*re.split(r"[ -]", text)} for text in (device, name))
    return wanted <= words and not {"PCIe", "NVL", "MIG"} & (
        words - wanted
    )  # other boards than those of the tables, or a slice


def stated_inputs() -> list[Row]:
    """What document 000's comparison states of each input, what is taken here, and from where; ""
    was not stated.
    """
    return _table("cost_inputs.csv", dict)


def _table(path: str | Path, make: Callable[[Row], Made]) -> list[Made]:
    """What `make` makes of each row; ValueError says file and line."""
    found, path = [], files.shipped(path) if isinstance(path, str) else path
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in (lines := csv.DictReader(file)):
            try:
                expect(
                    None not in row and None not in row.values(),
                    "row",
                    f"{len(lines.fieldnames or ())} cells",
                    "others",
                )
                found.append(make(row))
            except (KeyError, ValueError) as error:
                why = f"expected a column {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"{path.name}:{lines.line_num}: {why}") from error
    return found
