"""`asrkit cost`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asrkit.cli.command import Command, Options, finish, table_width
from asrkit.shapes import count, expect
from asrkit.transcribe.options import described

DEFAULT_INSTANCES = ("c7a.48xlarge", "c7i.48xlarge", "p4de.24xlarge", "hf-h200")
COST_COLUMNS = {  # heading -> key of a row
    "#": "number",
    "instance": "instance",
    "units": "shown_units",
    "RTFx of one": "rtfx",
    "batch": "batch",
    "USD": "usd",
    "kWh": "kWh",
}
SOURCE_COLUMNS = {
    "#": "number",
    "model": "model",
    "RTFx is from": "shown_source",
    "costs as much as": "against",
    "at an RTFx of": "break_even_rtfx",
}


@dataclass(frozen=True, kw_only=True)
class CostOptions(Options):
    """The options of the command."""

    hours: float = described(1e6, "hours of speech to transcribe", metavar="N")
    instance: list[str] = described(
        DEFAULT_INSTANCES,
        "cloud instances listed in data/prices.csv",
        metavar="NAME",
        group="machines and prices",
    )
    cores: int | None = described(
        None,
        "instead of --instance: a machine with N cores; needs --price and --rtfx",
        metavar="N",
    )
    gpus: int | None = described(
        None, "instead of --instance: a machine with N GPUs; needs --price and --rtfx", metavar="N"
    )
    price: str | None = described(
        None, "your own price in USD an hour, for one machine", metavar="RANGE"
    )
    utilisation: str = described(
        "1", "share of the paid time in which a machine transcribes", metavar="RANGE"
    )
    model: str | None = described(
        None,
        "use only the RTFx of this model (default: parakeet_rnnt_1_1b, or any other model on a "
        "machine where it has no RTFx)",
        metavar="NAME",
        group="speed",
    )
    rtfx: str | None = described(None, "your own RTFx of one core or GPU", metavar="RANGE")


def _cost(options: CostOptions) -> int:
    from asrkit.workbench.cost.money import compare, transcription_cost
    from asrkit.workbench.cost.ranges import Range

    costs = [
        transcription_cost(
            instance,
            speed,
            hours=options.hours,
            utilisation=Range.parse(options.utilisation, "utilisation"),
        )
        for instance in _instances(options)
        for speed in _speeds(options, instance)
    ]
    expect(bool(costs), "model", "one whose RTFx is known on these machines", options.model)
    result: dict[str, Any] = {"hours": options.hours, "rows": compare(costs)}
    finish(options, result, "\n".join(_lines(result)))
    return 0


def _instances(options: CostOptions) -> list[Any]:
    """The instances of the options at their price, or the user's own machine."""
    from asrkit.workbench.cost.money import Instance, load_prices
    from asrkit.workbench.cost.ranges import Range

    if options.cores or options.gpus:
        units: dict[str, Any] = {"cores": options.cores or 0, "gpus": options.gpus or 0}
        price = Range.parse(options.price or "", "price")
        return [Instance(name="your machine", usd_per_hour=price, **units)]
    known = load_prices()
    for name in options.instance:
        expect(name in known, "instance", "one of " + ", ".join(known), name)
    instances = [known[name] for name in dict.fromkeys(options.instance)]
    if options.price:
        wanted = "one --instance, --cores or --gpus with it"
        expect(len(instances) == 1, "price", wanted, options.price)
        price = Range.parse(options.price, "price")
        instances = [replace(instances[0], usd_per_hour=price)]
    return instances


def _speeds(options: CostOptions, instance: Any) -> list[Any]:
    """The RTFx to use for `instance`: from --rtfx, or published and recorded ones.

    A machine that is shown by default may have none; it is then left out.
    """
    from asrkit.workbench.cost import money, ranges, rtfx

    if options.rtfx:
        own_rtfx = ranges.Range.parse(options.rtfx, "rtfx")
        return [rtfx.Speed(rtfx=own_rtfx, per=instance.per, origin="assumed")]
    known = [*rtfx.published_speeds(), *rtfx.recorded_speeds()]
    speeds = money.speeds_for(instance, known, model=options.model or money.DEFAULT_MODEL)
    speeds = [speed for speed in speeds if options.model in (None, speed.model)]
    may_be_empty = instance.name in DEFAULT_INSTANCES
    expect(bool(speeds) or may_be_empty, "rtfx", f"an RTFx for {instance.name}", "none is known")
    return speeds


def _lines(result: Mapping[str, Any]) -> Iterable[str]:
    """The lines of the text: tables of costs and of sources, then the assumptions."""
    rows = [row | {"number": number} for number, row in enumerate(result["rows"], 1)]
    for row in rows:
        row["shown_units"] = count(row["units"], row["per"].replace("gpu", "GPU"))
        row["shown_source"] = ", ".join(filter(None, [row["origin"], row["device"], row["date"]]))
    yield f"USD for {result['hours']:,.0f} hours of speech"
    yield "RTFx: seconds of speech that one core or GPU transcribes in a second"
    yield from ("", *_table(rows, COST_COLUMNS), "", *_table(rows, SOURCE_COLUMNS), "")
    for caveat in dict.fromkeys(caveat for row in rows for caveat in row["caveats"]):
        names = dict.fromkeys(row["instance"] for row in rows if caveat in row["caveats"])
        yield f"  assumed for {', '.join(names)}: {caveat}"


def _table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    from asrkit.workbench.tables import aligned

    cells = [[_cell(row[key]) for key in columns.values()] for row in rows]
    return aligned([[*columns], *cells], width=table_width())


def _cell(value: Any) -> str:
    """A number, a name or a range as text; a dash if the value is unknown."""
    from asrkit.workbench.cost.ranges import range_text

    return range_text(value) if isinstance(value, list) else str(value or "–")


COMMAND = Command(
    name="cost",
    summary="Compute what transcription costs on CPUs and GPUs, with the source of each number.",
    details="A RANGE is a number, LOW:HIGH or LOW:MIDDLE:HIGH.",
    options=CostOptions,
    run=_cost,
    examples=[
        "asrkit cost",
        "asrkit cost --instance c7i.48xlarge --rtfx 17.6",
        "asrkit cost --cores 10 --price 2 --rtfx 4:5:8 --hours 1000",
    ],
)
