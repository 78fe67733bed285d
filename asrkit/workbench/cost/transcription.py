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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asrkit.shapes import expect, expect_types, whole
from asrkit.workbench.cost.csv_tables import Row, read_table
from asrkit.workbench.cost.prices import MOST_UNITS, Instance
from asrkit.workbench.cost.ranges import Range
from asrkit.workbench.cost.speeds import DEFAULT_MODEL, Speed, power

GB_PER_HOUR = 0.1152  # of speech: 16 kHz, 16 bits, one channel, uncompressed


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How much is transcribed, and on which conditions.

    The defaults leave out startup, storage and transfer, which flatters cores and GPUs alike.
    """

    hours: float = 1e6  # of speech
    utilisation: Range | float = 1.0  # share of the paid time in which a unit works
    startup_s: Range | float = 0.0  # paid before an instance works
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
            whole(self.instances, 1, MOST_UNITS),
            "instances",
            f"a whole number in 1..{MOST_UNITS:,}",
            self.instances,
        )
        share = Range.of(self.utilisation)
        expect(share.low > 0, "utilisation", "above 0, at most 1", 0)
        expect(share.high <= 1, "utilisation", "above 0, at most 1", share.high)


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
    instance_hours: Range
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
        caveats = []
        on_gpu = speed.per == "gpu"
        priced = instance.processor
        units_called = "cores"
        if on_gpu:
            priced = instance.gpu
            units_called = "GPUs"
        if priced and speed.device and speed.device != priced:
            caveats.append(f"RTFx of {speed.device}, price of {priced}")
        if not on_gpu and instance.vcpus > instance.cores:
            caveats.append(
                f"{instance.cores} cores are sold as {instance.vcpus} vCPUs; "
                "RTFx is of a core whose second thread is idle"
            )
        units = instance.units(speed.per)
        if units > 1:
            caveats.append(f"linear over {units} {units_called}")
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
    unit_hours = asked.hours / speed.rtfx
    working_hours = unit_hours / instance.units(speed.per) / asked.utilisation
    starting_hours = asked.instances * Range.of(asked.startup_s) / 3600
    GB = asked.hours * Range.of(asked.GB_per_hour)
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
        instance_hours=working_hours + starting_hours,
        kWh=kWh,
    )


def break_even_rtfx(a: TranscriptionCost, b: TranscriptionCost) -> Range | None:
    """The RTFx that a unit of `a` needs for its machines to cost as much as those of `b`.

    None if the startup of `a` alone costs more. Storage and egress do not depend on the machine and
    are left out. The lowest end is for `a` cheap and `b` dear, the highest the other way round;
    price, utilisation and startup of `a` are at the same end.
    """
    expect(
        a.terms.hours == b.terms.hours,
        "hours",
        "as many for both",
        f"{a.terms.hours:g} and {b.terms.hours:g}",
    )
    units = a.instance.units(a.speed.per)
    budgets = b.parts["compute"] + b.parts["startup"]
    cases = zip(
        a.instance.usd_per_hour.ends,
        reversed(Range.of(a.terms.utilisation).ends),
        a.parts["startup"].ends,
        reversed(budgets.ends),
        strict=True,
    )
    needed = []
    for price, utilisation, startup, budget in cases:
        if budget <= startup:
            return None
        needed.append(price * a.terms.hours / (units * utilisation * (budget - startup)))
    return Range(*needed)


def compare(costs: Sequence[TranscriptionCost]) -> list[dict[str, Any]]:
    """A row for each cost, cheapest first; ranges are [lowest, middle, highest].

    `break_even_rtfx` is against the cheapest of the same model on the other unit, cores or GPUs, or
    if there is none on another instance.
    """
    ordered = sorted(costs, key=lambda cost: cost.usd.middle)
    return [_row(cost, _compared_with(cost, ordered)) for cost in ordered]


def _compared_with(
    cost: TranscriptionCost, ordered: Sequence[TranscriptionCost]
) -> TranscriptionCost | None:
    """The first of `ordered` that `cost` is compared with, None if there is none."""
    same_model = [other for other in ordered if other.speed.model == cost.speed.model]
    for other in same_model:
        if other.speed.per != cost.speed.per:
            return other
    for other in same_model:
        if other.instance.name != cost.instance.name:
            return other
    return None


def _row(cost: TranscriptionCost, other: TranscriptionCost | None) -> dict[str, Any]:
    speed = cost.speed
    break_even = None
    against = None
    if other:
        break_even = break_even_rtfx(cost, other)
        against = other.name
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
        "instance_hours": cost.instance_hours.ends,
        "parts": {part: usd.ends for part, usd in cost.parts.items() if usd.high},
        "break_even_rtfx": _ends(break_even),
        "against": against,
        "kWh": _ends(cost.kWh),
        "caveats": cost.caveats,
    }


def _ends(value: Range | None) -> list[float] | None:
    """[lowest, middle, highest] of what is known."""
    if value is None:
        return None
    return value.ends


def cheapest_pair(
    costs: Sequence[TranscriptionCost], *, model: str = DEFAULT_MODEL
) -> tuple[TranscriptionCost, TranscriptionCost] | None:
    """The cheapest cost on cores and the cheapest on GPUs, of one model.

    That is `model` if there are costs of it on both, else the model with the cheapest cost that has
    both; None if no model has.
    """
    ordered = sorted(costs, key=lambda cost: cost.usd.middle)
    cheapest: dict[tuple[str, str], TranscriptionCost] = {}
    for cost in ordered:
        cheapest.setdefault((cost.speed.model, cost.speed.per), cost)
    for name in (model, *(cost.speed.model for cost in ordered)):
        on_cores = cheapest.get((name, "core"))
        on_gpus = cheapest.get((name, "gpu"))
        if on_cores and on_gpus:
            return on_cores, on_gpus
    return None


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
    differences = []
    for name, (of_a, of_b) in properties.items():
        if of_a != of_b:
            differences.append(f"{name}: {of_a} against {of_b}")
    return differences


def sensitivity(outcome: Callable[..., float], **inputs: Range) -> dict[str, tuple[float, float]]:
    """The outcome at the lowest and at the highest value of each input, with the others in the
    middle; the input that changes it most comes first.

    >>> sensitivity(lambda price, rtfx: price / rtfx, price=Range(1, 2, 3), rtfx=Range(1, 1, 4))
    {'price': (1.0, 3.0), 'rtfx': (2.0, 0.5)}
    """
    middle = {name: value.middle for name, value in inputs.items()}
    outcomes = {}
    for name, value in inputs.items():
        at_lowest = outcome(**middle | {name: value.low})
        at_highest = outcome(**middle | {name: value.high})
        outcomes[name] = (at_lowest, at_highest)
    return dict(sorted(outcomes.items(), key=_spread, reverse=True))


def _spread(item: tuple[str, tuple[float, float]]) -> float:
    _, (at_lowest, at_highest) = item
    return abs(at_highest - at_lowest)


def stated_inputs() -> list[Row]:
    """The inputs of document 000's comparison: `stated` there ("" was not), `taken` here, and from
    where.
    """
    return read_table("cost_inputs.csv", dict)
