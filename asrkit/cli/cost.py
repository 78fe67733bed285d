"""`asrkit cost`: which instances and speeds its options name, and what it prints."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asrkit.cli.command import Command, Options, finish, table_width
from asrkit.shapes import count, expect
from asrkit.transcribe.options import described

SHOWN = ("c7a.48xlarge", "c7i.48xlarge", "p4de.24xlarge", "hf-h200")  # without --instance
COSTS = {  # heading -> key of a row
    "#": "number",
    "instance": "instance",
    "units": "shown_units",
    "RTFx of one": "rtfx",
    "batch": "batch",
    "USD": "usd",
    "kWh": "kWh",
}
SOURCES = {  # likewise, and the RTFx at which a row would cost as much as another
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
        SHOWN, "cloud instances, of data/prices.csv", metavar="NAME", group="machines and prices"
    )
    cores: int | None = described(
        None, "in place of --instance: a machine with N cores, with --price and --rtfx", metavar="N"
    )
    gpus: int | None = described(None, "likewise, with N GPUs", metavar="N")
    price: str | None = described(
        None, "your own price in USD an hour, for one machine", metavar="RANGE"
    )
    utilisation: str = described(
        "1", "share of the paid time in which a machine transcribes", metavar="RANGE"
    )
    model: str | None = described(
        None,
        "use the RTFx of this model only (default: parakeet_rnnt_1_1b, or where it has none "
        "any other)",
        metavar="NAME",
        group="speed",
    )
    rtfx: str | None = described(None, "your own RTFx, of one core or GPU", metavar="RANGE")


def _cost(asked: CostOptions) -> int:
    from asrkit.workbench.cost import money

    costs = [
        money.transcription_cost(
            instance,
            speed,
            hours=asked.hours,
            utilisation=money.Range.parse(asked.utilisation, "utilisation"),
        )
        for instance in _instances(asked)
        for speed in _speeds(asked, instance)
    ]
    expect(bool(costs), "model", "one whose RTFx is known on these machines", asked.model)
    result: dict[str, Any] = {"hours": asked.hours, "rows": money.compare(costs)}
    finish(asked, result, "\n".join(_lines(result)))
    return 0


def _instances(asked: CostOptions) -> list[Any]:
    """The instances that were asked for, at the price that was asked for; or a machine of one's
    own.
    """
    from asrkit.workbench.cost.money import Instance, Range, load_prices

    if asked.cores or asked.gpus:
        units: dict[str, Any] = {"cores": asked.cores or 0, "gpus": asked.gpus or 0}
        price = Range.parse(asked.price or "", "price")
        return [Instance(name="your machine", usd_per_hour=price, **units)]
    known = load_prices()
    for name in asked.instance:
        expect(name in known, "instance", "one of " + ", ".join(known), name)
    found = [known[name] for name in dict.fromkeys(asked.instance)]
    if asked.price:
        expect(len(found) == 1, "price", "one --instance, --cores or --gpus with it", asked.price)
        found = [replace(found[0], usd_per_hour=Range.parse(asked.price, "price"))]
    return found


def _speeds(asked: CostOptions, instance: Any) -> list[Any]:
    """The RTFx to use for `instance`: that of --rtfx, or those that were published or recorded.

    Of the machines that are shown by default, those without any are left out.
    """
    from asrkit.workbench.cost import money

    if asked.rtfx:
        rtfx = money.Range.parse(asked.rtfx, "rtfx")
        return [money.Speed(rtfx=rtfx, per=instance.per, origin="assumed")]
    known = [*money.published_speeds(), *money.recorded_speeds()]
    fitting = money.speeds_for(instance, known, model=asked.model or money.DEFAULT_MODEL)
    fitting = [one for one in fitting if asked.model in (None, one.model)]
    found = bool(fitting) or instance.name in SHOWN
    expect(found, "rtfx", f"that of {instance.name}", "none that is known")
    return fitting


def _lines(result: Mapping[str, Any]) -> Iterable[str]:
    """The lines of the text: tables of costs and of sources, then what was assumed."""
    rows = [row | {"number": number} for number, row in enumerate(result["rows"], 1)]
    for row in rows:
        row["shown_units"] = count(row["units"], row["per"].replace("gpu", "GPU"))
        row["shown_source"] = ", ".join(filter(None, [row["origin"], row["device"], row["date"]]))
    yield f"USD for {result['hours']:,.0f} hours of speech"
    yield "RTFx: seconds of speech that one core or GPU transcribes in a second"
    yield from ("", *_table(rows, COSTS), "", *_table(rows, SOURCES), "")
    for caveat in dict.fromkeys(caveat for row in rows for caveat in row["caveats"]):
        names = dict.fromkeys(row["instance"] for row in rows if caveat in row["caveats"])
        yield f"  assumed for {', '.join(names)}: {caveat}"


def _table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    from asrkit.workbench.tables import aligned

    cells = [[_cell(row[key]) for key in columns.values()] for row in rows]
    return aligned([[*columns], *cells], width=table_width())


def _cell(value: Any) -> str:
    """The text of a number, a name or a range; a dash for what is not known."""
    from asrkit.workbench.cost.money import range_text

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
