"""`asrkit cost`: its options, and which instances and speeds they name."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from asrkit.cli.command import Command, finish
from asrkit.cli.cost_text import cost_lines

SHOWN = ("c7a.48xlarge", "c7i.48xlarge", "p4de.24xlarge", "hf-h200")  # without --instance
OWN_RECORDS = Path("reports/bench.jsonl")
DOCUMENT = {  # what document 000 compares
    "instance": ["c7a.48xlarge", "p4de.24xlarge"],
    "on": "2024-09-24",
    "model": "parakeet_rnnt_1_1b",
}
TERMS = {  # option -> argument of transcription_cost that is its range
    "utilisation": "utilisation",
    "startup": "startup_s",
    "per_gb": "usd_per_GB",
}


def _cost(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect
    from asrkit.workbench.cost import money

    if args.document:
        for name, value in DOCUMENT.items():
            passed = getattr(args, name)
            expect(passed is None, name, "none beside --document", passed)
            setattr(args, name, value)
    terms = {field: money.Range.parse(getattr(args, name), name) for name, field in TERMS.items()}
    instances = _instances(args)
    known = _known_speeds(args)
    costs = [
        money.transcription_cost(
            instance, speed, hours=args.hours, instances=args.instances, **terms
        )
        for instance in instances
        for speed in _speeds(args, instance, known)
    ]
    expect(bool(costs), "model", "one whose RTFx is known on these machines", args.model)
    named = {instance.name for instance in instances}
    result = _result(args, costs)
    result["left_out"] = sorted(named - {entry.instance.name for entry in costs})
    finish(args, result, "\n".join(cost_lines(result)))
    return 0


def _instances(args: argparse.Namespace) -> list[Any]:
    """The instances that were asked for, at the price that was asked for; or one of --units."""
    from asrkit.shapes import expect
    from asrkit.workbench.cost.money import Instance, Range, load_prices

    if args.units is not None:
        complete = args.price is not None and args.rtfx is not None and not args.instance
        expect(complete, "units", "--price and --rtfx beside it, no --instance", args.units)
        expect(1 <= args.units <= 10**9, "units", "1 to 1e9", args.units)
        count = {"gpus" if args.per == "gpu" else "cores": args.units}
        price = Range.parse(args.price, "price")
        return [Instance(name="own", usd_per_hour=price, **count)]
    known = load_prices() if args.on is None else load_prices(on=args.on)
    expect(bool(known), "on", "a day of which there are prices", args.on)
    names = args.instance or [name for name in SHOWN if name in known]
    unknown = [name for name in names if name not in known]
    expect(not unknown, "instance", "one of " + ", ".join(known), ", ".join(unknown))
    instances = [known[name] for name in dict.fromkeys(names)]
    if args.price is not None:
        price = Range.parse(args.price, "price")
        expect(len(instances) == 1, "price", "one --instance, or --units", args.price)
        instances = [replace(instances[0], usd_per_hour=price, prices=())]
    return instances


def _known_speeds(args: argparse.Namespace) -> list[Any]:
    """RTFx that were published, and but for --document those that were recorded."""
    from asrkit.shapes import expect
    from asrkit.workbench.cost import money

    if args.document:
        return money.published_speeds()
    if args.measured:
        remedy = "asrkit bench encoders makes them."
        found = args.measured.is_file()
        expect(found, "measured", "a file of records", repr(str(args.measured)), remedy)
    recorded = money.recorded_speeds(args.measured)
    expect(bool(recorded), "measured", "records of a whole recogniser", "none")
    speeds = [*money.published_speeds(), *recorded]
    models = dict.fromkeys(speed.model for speed in speeds)
    expect(args.model in (None, *models), "model", "one of " + ", ".join(models), repr(args.model))
    return speeds


def _speeds(args: argparse.Namespace, instance: Any, known: list[Any]) -> list[Any]:
    """The RTFx to use for `instance`: --rtfx, else those of --measured, else what is known.

    None at all is an error only for an instance that was asked for by name.
    """
    from asrkit.shapes import expect
    from asrkit.workbench.cost import money

    if args.rtfx is not None:
        rtfx = money.Range.parse(args.rtfx, "rtfx")
        return [money.Speed(rtfx=rtfx, per=args.per or instance.per, origin="assumed")]
    if args.measured and instance.per == "core":  # of whatever maker
        fitting = [speed for speed in known if (speed.per, speed.origin) == ("core", "recorded")]
    else:
        fitting = money.speeds_for(instance, known, model=args.model or money.DEFAULT_MODEL)
    if args.model is not None:
        fitting = [speed for speed in fitting if speed.model == args.model]
    known_one = bool(fitting) or not args.instance
    expect(known_one, "rtfx", f"yours for {instance.name}", "none that is known")
    if args.document:
        return fitting[:1]
    return fitting


def _result(args: argparse.Namespace, costs: list[Any]) -> dict[str, Any]:
    """What --json prints, and what the text is made of."""
    from asrkit.workbench.cost import money

    result: dict[str, Any] = {"hours": args.hours, "on": args.on, "rows": money.compare(costs)}
    model = args.model or money.DEFAULT_MODEL
    if args.rtfx is not None:
        model = ""
    pair = money.cheapest_pair(costs, model=model)
    if pair:
        on_cores, on_gpus = pair
        result["cores_over_gpus"] = (on_cores.usd / on_gpus.usd).ends
        result["model"] = model
        result["unequal"] = money.unequal(on_cores.speed, on_gpus.speed)
    if args.document:
        unstated = [row for row in money.read_table("cost_inputs.csv") if not row["stated"]]
        result["not_stated"] = {row["input"]: row["taken"] for row in unstated}
    return result


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hours", type=float, default=1e6, metavar="N", help="hours of speech to transcribe"
    )
    _add_machine_arguments(parser)
    _add_speed_arguments(parser)
    _add_other_costs(parser)
    parser.add_argument(
        "--document",
        action="store_true",
        help="repeat the comparison of document 000, NVIDIA's blog of 2024-09-24, and list what "
        "it does not state",
    )


def _add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_argument_group("machines and prices")
    machine.add_argument(
        "--instance",
        nargs="+",
        metavar="NAME",
        help=f"cloud instances, of data/prices.csv (default: {' '.join(SHOWN)})",
    )
    machine.add_argument(
        "--on", metavar="DAY", help="use the prices of this day, as 2024-09-24 (default: newest)"
    )
    machine.add_argument(
        "--price",
        metavar="RANGE",
        help="your own price in USD an hour, for one --instance or for --units",
    )
    machine.add_argument(
        "--units",
        type=int,
        metavar="N",
        help="a machine of your own with N cores or GPUs, as --per says; needs --price and --rtfx",
    )
    machine.add_argument(
        "--utilisation",
        default="1",
        metavar="RANGE",
        help="share of the paid time in which the machine transcribes",
    )


def _add_speed_arguments(parser: argparse.ArgumentParser) -> None:
    speed = parser.add_argument_group("speed")
    speed.add_argument(
        "--model",
        metavar="NAME",
        help="use the RTFx of this model only (default: parakeet_rnnt_1_1b, or where it has none "
        "any other)",
    )
    speed.add_argument("--rtfx", metavar="RANGE", help="your own RTFx, of one core or GPU")
    speed.add_argument(
        "--per",
        choices=("core", "gpu"),
        help="what --rtfx is of (default: gpu where the machine has one)",
    )
    speed.add_argument(
        "--measured",
        nargs="?",
        type=Path,
        const=OWN_RECORDS,
        metavar="FILE",
        help="take the RTFx of cores from the records in FILE, which asrkit bench encoders makes "
        f"(without FILE: {OWN_RECORDS})",
    )


def _add_other_costs(parser: argparse.ArgumentParser) -> None:
    other = parser.add_argument_group("startup, storage and transfer")
    other.add_argument(
        "--startup",
        default="0",
        metavar="RANGE",
        help="seconds that are paid before an instance works",
    )
    other.add_argument(
        "--instances", type=int, default=1, metavar="N", help="how many instances are started"
    )
    other.add_argument(
        "--per-gb",
        default="0",
        metavar="RANGE",
        help="USD for storing and moving a GB of speech; an hour of speech is 0.1152 GB",
    )


COMMAND = Command(
    name="cost",
    summary="Compute what transcription costs on CPUs and GPUs, with the source of each number.",
    details="A RANGE is a number, LOW:HIGH or LOW:MIDDLE:HIGH.",
    run=_cost,
    add_arguments=_add_arguments,
    examples=[
        "asrkit cost",
        "asrkit cost --instance p4de.24xlarge --on 2025-01-01",
        "asrkit cost --units 10 --price 2 --rtfx 4:5:8 --hours 1000",
        "asrkit cost --measured",
        "asrkit cost --document",
    ],
)
