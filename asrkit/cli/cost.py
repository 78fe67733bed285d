"""`asrkit cost`: which instances and speeds its options name, and what it prints."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from asrkit.cli.command import Command, Options, count, finish, table_width
from asrkit.shapes import expect
from asrkit.transcribe.options import described

SHOWN = ("c7a.48xlarge", "c7i.48xlarge", "p4de.24xlarge", "hf-h200")  # without --instance
OWN_RECORDS = Path("reports/bench.jsonl")
DOCUMENT: dict[str, Any] = {  # what document 000 compares
    "instance": ["c7a.48xlarge", "p4de.24xlarge"],
    "on": "2024-09-24",
    "model": "parakeet_rnnt_1_1b",
}
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
    document: bool = described(
        False,
        "repeat the comparison of document 000, NVIDIA's blog of 2024-09-24, and list what "
        "it does not state",
    )
    instance: list[str] = described(
        (),
        f"cloud instances, of data/prices.csv (default: {' '.join(SHOWN)})",
        metavar="NAME",
        group="machines and prices",
    )
    on: str | None = described(
        None, "use the prices of this day, as 2024-09-24 (default: newest)", metavar="DAY"
    )
    price: str | None = described(
        None,
        "your own price in USD an hour, for one --instance or for --units",
        metavar="RANGE",
    )
    units: int | None = described(
        None,
        "a machine of your own with N cores or GPUs, as --per says; needs --price and --rtfx",
        metavar="N",
    )
    utilisation: str = described(
        "1", "share of the paid time in which the machine transcribes", metavar="RANGE"
    )
    model: str | None = described(
        None,
        "use the RTFx of this model only (default: parakeet_rnnt_1_1b, or where it has none "
        "any other)",
        metavar="NAME",
        group="speed",
    )
    rtfx: str | None = described(None, "your own RTFx, of one core or GPU", metavar="RANGE")
    per: Literal["core", "gpu"] | None = described(
        None, "what --rtfx is of (default: gpu where the machine has one)"
    )
    measured: Path | None = described(
        None,
        "take the RTFx of cores from the records in FILE, which asrkit bench encoders makes "
        f"(without FILE: {OWN_RECORDS})",
        metavar="FILE",
        nargs="?",
        const=OWN_RECORDS,
    )
    startup: str = described(
        "0",
        "seconds that are paid before an instance works",
        metavar="RANGE",
        group="startup, storage and transfer",
    )
    instances: int = described(1, "how many instances are started", metavar="N")
    per_gb: str = described(
        "0",
        "USD for storing and moving a GB of speech; an hour of speech is 0.1152 GB",
        metavar="RANGE",
    )


def _cost(asked: CostOptions) -> int:
    from asrkit.workbench.cost import money

    if asked.document:
        for name in DOCUMENT:
            value = getattr(asked, name)
            expect(not value, name, "none beside --document", value)
        asked = replace(asked, **DOCUMENT)
    instances, known = _instances(asked), _known_speeds(asked)
    costs = [
        money.transcription_cost(
            instance,
            speed,
            hours=asked.hours,
            instances=asked.instances,
            utilisation=money.Range.parse(asked.utilisation, "utilisation"),
            startup_s=money.Range.parse(asked.startup, "startup"),
            usd_per_GB=money.Range.parse(asked.per_gb, "per_gb"),
        )
        for instance in instances
        for speed in _speeds(asked, instance, known)
    ]
    expect(bool(costs), "model", "one whose RTFx is known on these machines", asked.model)
    left_out = {one.name for one in instances} - {one.instance.name for one in costs}
    result = _result(asked, costs) | {"left_out": sorted(left_out)}
    finish(asked, result, "\n".join(_lines(result)))
    return 0


def _instances(asked: CostOptions) -> list[Any]:
    """The instances that were asked for, at the price that was asked for; or one of --units."""
    from asrkit.workbench.cost.money import Instance, Range, load_prices

    price = Range.parse(asked.price, "price") if asked.price is not None else None
    if asked.units is not None:
        complete = price is not None and asked.rtfx is not None and not asked.instance
        expect(complete, "units", "--price and --rtfx beside it, no --instance", asked.units)
        expect(1 <= asked.units <= 10**9, "units", "1 to 1e9", asked.units)
        assert price is not None
        units: dict[str, Any] = {"gpus" if asked.per == "gpu" else "cores": asked.units}
        return [Instance(name="own", usd_per_hour=price, **units)]
    known = load_prices(**{"on": asked.on} if asked.on is not None else {})
    expect(bool(known), "on", "a day of which there are prices", asked.on)
    names = asked.instance or [name for name in SHOWN if name in known]
    unknown = [name for name in names if name not in known]
    expect(not unknown, "instance", "one of " + ", ".join(known), ", ".join(unknown))
    found = [known[name] for name in dict.fromkeys(names)]
    if price is None:
        return found
    expect(len(found) == 1, "price", "one --instance, or --units", asked.price)
    return [replace(found[0], usd_per_hour=price, prices=())]


def _known_speeds(asked: CostOptions) -> list[Any]:
    """RTFx that were published, and but for --document those that were recorded."""
    from asrkit.workbench.cost import money

    if asked.document:
        return money.published_speeds()
    file, remedy = asked.measured, "asrkit bench encoders makes them."
    found = file is None or file.is_file()
    expect(found, "measured", "a file of records", repr(str(file)), remedy)
    recorded = money.recorded_speeds(file)
    expect(bool(recorded), "measured", "records of a whole recogniser", "none")
    speeds = [*money.published_speeds(), *recorded]
    models = dict.fromkeys(speed.model for speed in speeds)
    known = asked.model in (None, *models)
    expect(known, "model", "one of " + ", ".join(models), repr(asked.model))
    return speeds


def _speeds(asked: CostOptions, instance: Any, known: list[Any]) -> list[Any]:
    """The RTFx to use for `instance`: --rtfx, else those of --measured, else what is known.

    None at all is an error only for an instance that was asked for by name.
    """
    from asrkit.workbench.cost import money

    if asked.rtfx is not None:
        rtfx = money.Range.parse(asked.rtfx, "rtfx")
        return [money.Speed(rtfx=rtfx, per=asked.per or instance.per, origin="assumed")]
    if asked.measured and instance.per == "core":  # of whatever maker
        fitting = [one for one in known if (one.per, one.origin) == ("core", "recorded")]
    else:
        fitting = money.speeds_for(instance, known, model=asked.model or money.DEFAULT_MODEL)
    fitting = [one for one in fitting if asked.model in (None, one.model)]
    known_one = bool(fitting) or not asked.instance
    expect(known_one, "rtfx", f"yours for {instance.name}", "none that is known")
    return fitting[:1] if asked.document else fitting


def _result(asked: CostOptions, costs: list[Any]) -> dict[str, Any]:
    """What --json prints, and what the text is made of."""
    from asrkit.workbench.cost import money

    result: dict[str, Any] = {"hours": asked.hours, "on": asked.on, "rows": money.compare(costs)}
    model = asked.model or money.DEFAULT_MODEL
    if asked.rtfx is not None:
        model = ""
    pair = money.cheapest_pair(costs, model=model)
    if pair:
        on_cores, on_gpus = pair
        result["cores_over_gpus"] = (on_cores.usd / on_gpus.usd).ends
        result["model"] = model
        result["unequal"] = money.unequal(on_cores.speed, on_gpus.speed)
    if asked.document:
        unstated = [row for row in money.read_table("cost_inputs.csv") if not row["stated"]]
        result["not_stated"] = {row["input"]: row["taken"] for row in unstated}
    return result


def _lines(result: Mapping[str, Any]) -> Iterable[str]:
    """The lines of the text: tables of costs and of sources, then what was assumed."""
    rows = [row | {"number": number} for number, row in enumerate(result["rows"], 1)]
    for row in rows:
        row["shown_units"] = count(row["units"], row["per"])
        row["shown_source"] = ", ".join(filter(None, [row["origin"], row["device"], row["date"]]))
    yield f"USD for {result['hours']:,.0f} hours of speech; RTFx: seconds of speech that one core "
    yield "or GPU transcribes in a second"
    yield from ("", *_table(rows, COSTS), "", *_table(rows, SOURCES), "")
    if result["left_out"]:
        yield f"left out, for want of an RTFx: {', '.join(result['left_out'])}"
    if "cores_over_gpus" in result:
        ratio = _cell(result["cores_over_gpus"])
        model = result["model"] or "at the RTFx given"
        yield f"{model}: the cheapest on cores costs {ratio} times as much as the cheapest on GPUs"
    for caveat in dict.fromkeys(caveat for row in rows for caveat in row["caveats"]):
        names = dict.fromkeys(row["instance"] for row in rows if caveat in row["caveats"])
        yield f"  assumed for {', '.join(names)}: {caveat}"
    for difference in result.get("unequal", []):
        yield f"  the cheapest of each: {difference}"
    for name, value in result.get("not_stated", {}).items():
        yield f"  not stated in document 000: {name}; here {value}"


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
        "asrkit cost --instance p4de.24xlarge --on 2025-01-01",
        "asrkit cost --units 10 --price 2 --rtfx 4:5:8 --hours 1000",
        "asrkit cost --measured",
        "asrkit cost --document",
    ],
)
