"""What transcription costs: price times time, with what is not known carried through as ranges.

A machine is rented by the hour and has units, cores or GPUs. A unit transcribes `rtfx` seconds of
speech a second while it works, and it works in the share `utilisation` of the time that is paid:

    instance hours = hours / (rtfx units utilisation) + instances startup / 3600
    USD = price x instance hours + GB of speech x (storage x months + egress)
    kWh = watts of a unit / 1000 x hours / rtfx

Energy is that of a unit while it works, at its highest rated power, without its host.

Every quantity is a Range. A result rises or falls over the whole range of each of them, so there is
a case that reaches each of its ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from asrkit.shapes import expect, whole
from asrkit.workbench.cost.csv_tables import Row, read_table
from asrkit.workbench.cost.prices import Instance
from asrkit.workbench.cost.ranges import Range
from asrkit.workbench.cost.speeds import DEFAULT_MODEL, Speed, power

GB_PER_HOUR = 0.1152  # of speech: 16 kHz, 16 bits, one channel, uncompressed
UNITS = {"core": "cores", "gpu": "GPUs"}
TITLES = {
    "instance": "machine",
    "rtfx": "RTFx",
    "per": "of one",
    "batch": "batch",
    "RTFx is": "RTFx is",
    "usd_per_hour": "USD/h",
    "usd_per_million_hours": "USD for a million hours",
    "break_even_rtfx": "break-even RTFx",
    "kWh": "kWh",
}
RANGES = ["usd_per_hour", "rtfx", "usd_per_million_hours", "break_even_rtfx", "kWh"]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How much is transcribed, and on which conditions.

    The defaults leave out startup, storage and transfer, which flatters cores and GPUs alike.
    """

    hours: float = 1e6  # of speech
    utilisation: Range | float = 1.0  # share of the paid time in which a unit works
    startup_s: Range | float = 0.0  # paid before an instance works
    instances: int = 1  # started in all
    storage_usd_per_GB_month: Range | float = 0.0
    months: Range | float = 1.0
    egress_usd_per_GB: Range | float = 0.0

    def __post_init__(self) -> None:
        expect(0 < self.hours < inf, "hours", "above 0", self.hours)
        expect(whole(self.instances, 1, 10**9), "instances", "1 to 1e9", self.instances)
        share = Range.of(self.utilisation, "utilisation")
        expect(0 < share.low <= share.high <= 1, "utilisation", "above 0, at most 1", share)


@dataclass(frozen=True, kw_only=True)
class TranscriptionCost:
    """What a transcription costs on one instance at one speed.

    `parts` are USD by "compute", "startup", "storage" and "egress"; `kWh` is None where the unit's
    power is not known.
    """

    instance: Instance
    speed: Speed
    terms: Terms
    parts: Mapping[str, Range]
    kWh: Range | None

    @property
    def name(self) -> str:
        """Instance and RTFx, for tables and pictures: `p4de.24xlarge, RTFx 2,053`."""
        return f"{self.instance.name}, RTFx {Range.of(self.speed.rtfx.middle)}"

    @property
    def usd(self) -> Range:
        """USD of all parts. Price and utilisation are the same in all of them, so its ends are
        reached.
        """
        return sum(self.parts.values(), Range(0, 0, 0))

    @property
    def usd_per_million_hours(self) -> Range:
        """USD of a million hours of speech at the same rate."""
        return self.usd * (1e6 / self.terms.hours)

    @property
    def caveats(self) -> list[str]:
        """What combining this speed with this machine takes for granted, one line each."""
        instance = self.instance
        speed = self.speed
        units = instance.units(speed.per)
        priced = instance.processor
        if speed.per == "gpu":
            priced = instance.gpu
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


def transcription_cost(instance: Instance, speed: Speed, **terms: Any) -> TranscriptionCost:
    """The cost of transcribing on `instance` at `speed`; `terms` are the fields of `Terms`.

    >>> machine = Instance(name="mine", usd_per_hour=Range.of(2.0), cores=10)
    >>> speed = Speed(rtfx=Range(4, 5, 8), per="core", origin="assumed")
    >>> transcription_cost(machine, speed, hours=1000, utilisation=0.5).usd
    Range(low=50.0, middle=80.0, high=100.0)
    """
    asked = Terms(**terms)
    unit_hours = Range.of(asked.hours) / speed.rtfx
    working_hours = unit_hours / instance.units(speed.per) / asked.utilisation
    starting_hours = Range.of(asked.startup_s, "startup_s") * (asked.instances / 3600)
    GB = Range.of(asked.hours * GB_PER_HOUR)
    price = instance.usd_per_hour
    watts = power(speed.device)
    kWh = None
    if watts:
        kWh = unit_hours * (watts / 1000)
    return TranscriptionCost(
        instance=instance,
        speed=speed,
        terms=asked,
        parts={
            "compute": price * working_hours,
            "startup": price * starting_hours,
            "storage": GB * asked.storage_usd_per_GB_month * asked.months,
            "egress": GB * asked.egress_usd_per_GB,
        },
        kWh=kWh,
    )


def break_even_rtfx(a: TranscriptionCost, b: TranscriptionCost) -> Range:
    """The RTFx at which the hours that a unit of `a` works cost as much as those of `b`.

    The lowest end is for `a` cheap and `b` dear, the highest the other way round. Startup, storage
    and egress do not depend on the RTFx and are left out.
    """
    used = a.terms.utilisation
    unit_usd = a.instance.usd_per_hour / a.instance.units(a.speed.per) / used
    return unit_usd / (b.parts["compute"] / b.terms.hours)


def compare(costs: Sequence[TranscriptionCost]) -> list[dict[str, Any]]:
    """A row for each cost, cheapest first; ranges are [lowest, middle, highest].

    `break_even_rtfx` is against the cheapest of the same model on the other unit, cores or GPUs.
    """
    ordered = sorted(costs, key=lambda cost: cost.usd.middle)
    return [_row(cost, _rival(cost, ordered)) for cost in ordered]


def _rival(
    cost: TranscriptionCost, ordered: Sequence[TranscriptionCost]
) -> TranscriptionCost | None:
    """The first of `ordered` with the same model on the other unit, None if there is none."""
    for other in ordered:
        if other.speed.model == cost.speed.model and other.speed.per != cost.speed.per:
            return other
    return None


def _row(cost: TranscriptionCost, rival: TranscriptionCost | None) -> dict[str, Any]:
    speed = cost.speed
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
        "parts": {part: usd.ends for part, usd in cost.parts.items() if usd.high},
        "break_even_rtfx": break_even_rtfx(cost, rival).ends if rival else None,
        "against": rival.name if rival else None,
        "kWh": cost.kWh.ends if cost.kWh else None,
        "caveats": cost.caveats,
    }


def cost_table(costs: Sequence[TranscriptionCost]) -> Any:
    """A pandas Styler for a notebook: a row for each cost, the models in its caption.

    Args:
        costs: On the same terms.
    """
    import pandas as pd

    rows = pd.DataFrame(compare(costs))
    rows[RANGES] = rows[RANGES].map(range_text)
    rows["RTFx is"] = rows["origin"] + ", " + rows["device"]
    table = rows[[*TITLES]].rename(columns=TITLES).style.hide(axis="index")
    return table.set_caption(" ".join(rows["model"].unique()))


def range_text(ends: Sequence[float] | None) -> str:
    """[lowest, middle, highest] as text, and a dash for what is not known."""
    if not ends:
        return "–"
    return str(Range(*ends))


def cheapest_pair(
    costs: Sequence[TranscriptionCost], *, model: str = DEFAULT_MODEL
) -> tuple[TranscriptionCost, TranscriptionCost] | None:
    """The cheapest cost of `model` on cores and the cheapest on GPUs; None if one is missing."""
    cheapest = {}
    for cost in sorted(costs, key=lambda cost: cost.usd.middle, reverse=True):
        if cost.speed.model == model:
            cheapest[cost.speed.per] = cost
    if len(cheapest) < len(UNITS):
        return None
    return cheapest["core"], cheapest["gpu"]


def unequal(a: Speed, b: Speed) -> list[str]:
    """In what two speeds differ beside the device; if in anything, their costs do not compare
    devices alone.
    """
    properties = {
        "model": (a.model, b.model),
        "batch size": (a.batch, b.batch),
        "what is timed": (a.note, b.note),
        "origin": (a.origin, b.origin),
    }
    return [
        f"{name}: {of_a} against {of_b}"
        for name, (of_a, of_b) in properties.items()
        if of_a != of_b
    ]


def stated_inputs() -> list[Row]:
    """The inputs of document 000's comparison: `stated` there ("" was not), `taken` here, and from
    where.
    """
    return read_table("cost_inputs.csv")
