"""What transcription costs: price times time, with unknown quantities carried through as ranges.

A machine is rented by the hour and has units, which are cores or GPUs. A working unit transcribes
`rtfx` seconds of speech in a second, and it works for the share `utilisation` of the paid time:

    instance hours = hours / (rtfx units utilisation) + instances startup / 3600
    USD = price x instance hours
    kWh = watts of a unit / 1000 x hours / rtfx

The energy is that of the unit alone, without its host, at its highest rated power.

Every quantity is a Range. A result rises or falls over the whole range of each quantity, so each
end of the result is reached by some combination of their ends.
"""

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from asrkit.shapes import expect, whole
from asrkit.workbench.cost.ranges import Range
from asrkit.workbench.cost.rtfx import Speed, is_device
from asrkit.workbench.tables import read_table

UNITS = {"core": "cores", "gpu": "GPUs"}
DEFAULT_MODEL = "parakeet_rnnt_1_1b"
Row = dict[str, str]  # of the table of prices


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A machine as it is rented.

    Attributes:
        name: Name of the instance type.
        usd_per_hour: From the cheapest to the dearest region. The middle is the price of the region
            that is listed first.
        processor: Name of the processor, which begins with its maker.
        vcpus: Threads that are sold as CPUs.
        cores: Physical cores; 0 if not looked up.
        gpus: Number of GPUs.
        gpu: Name of the GPU.
        prices: Rows of the price table.
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
        """The unit that transcribes: "gpu" if there is one, else "core"."""
        if self.gpus:
            return "gpu"
        return "core"

    def units(self, per: str) -> int:
        """The number of cores ("core") or GPUs ("gpu"); ValueError if there are none."""
        number = {"core": self.cores, "gpu": self.gpus}[per]
        expect(number > 0, "per", f"what {self.name} has", per)
        return number


def load_prices(*, on: str = "9999-12-31") -> dict[str, Instance]:
    """Instances by name, at the newest price of each region on a day.

    Args:
        on: The day, YYYY-MM-DD. Later prices are ignored; by default none are.
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
    """The instance whose price in each region is one of `rows`."""
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


def speeds_for(
    instance: Instance, speeds: Iterable[Speed], *, model: str = DEFAULT_MODEL
) -> list[Speed]:
    """The speeds that apply to an instance: of its GPU, or of a core from the same maker.

    Args:
        instance: The machine.
        speeds: RTFx to choose from.
        model: The model whose RTFx is wanted. If it has none, those of all models are returned.
    """
    fitting = [speed for speed in speeds if _applies(instance, speed)]
    return [speed for speed in fitting if speed.model == model] or fitting


def _applies(instance: Instance, speed: Speed) -> bool:
    if speed.per != instance.per:
        return False
    if instance.gpus:
        return is_device(speed.device, instance.gpu)
    maker, _, _ = instance.processor.partition(" ")
    return bool(maker) and maker in speed.device


def power(device: str) -> float | None:
    """Watts of one core or GPU at its highest rated power (data sheets); None if not looked up."""
    for row in read_table("power.csv"):
        if is_device(device, row["device"]):
            return float(row["watts"]) / int(row["units"])
    return None


@dataclass(frozen=True, kw_only=True)
class TranscriptionCost:
    """The cost of transcribing on one instance at one speed.

    Attributes:
        instance: The machine.
        speed: RTFx of one of its units.
        hours: Hours of speech.
        utilisation: Share of the paid time in which a unit works.
        compute: USD for the working hours.
        startup: USD for the hours before them.
        kWh: Energy of the working units; None if their power is unknown.
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
        """USD in all. Both parts have the same price, so the ends of the sum are reached."""
        return self.compute + self.startup

    @property
    def usd_per_million_hours(self) -> Range:
        """USD for a million hours of speech at the same rate."""
        return self.usd * (1e6 / self.hours)

    @property
    def caveats(self) -> list[str]:
        """What is assumed when this speed is combined with this machine, a line each."""
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

    Storage and transfer are left out, and by default startup too, which flatters cores and GPUs
    alike.

    Args:
        instance: The machine.
        speed: RTFx of one of its units.
        hours: Hours of speech.
        utilisation: Share of the paid time in which a unit works.
        startup_s: Seconds that are paid before an instance works.
        instances: Number of instances that are started.

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
    """The RTFx at which the working hours of a unit of `a` cost as much as those of `b`.

    The lowest end takes `a` cheap and `b` dear, the highest end the reverse. Startup does not
    depend on the RTFx and is left out.
    """
    unit_usd = a.instance.usd_per_hour / a.instance.units(a.speed.per) / a.utilisation
    return unit_usd / (b.compute / b.hours)


def compare(costs: Sequence[TranscriptionCost]) -> list[dict[str, Any]]:
    """A row for each cost, cheapest first; ranges are [lowest, middle, highest].

    `break_even_rtfx` compares with the cheapest cost of the same model on the other unit, cores or
    GPUs.
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
