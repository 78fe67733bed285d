"""`asrkit cost`: its options, and which instances and speeds they name."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.cli.command import Command, finish
from asrkit.cli.cost_text import cost_lines

SHOWN = ("c7a.48xlarge", "c7i.48xlarge", "p4de.24xlarge", "hf-h200")  # without --instance
OWN_RECORDS = Path("reports/bench.jsonl")
DOCUMENT = {  # what document 000 compares
    "instance": ["c7a.48xlarge", "p4de.24xlarge"],
    "on": "2024-09-24",
    "model": "parakeet_rnnt_1_1b",
}
DEFAULTS = {"hours": "1e6", "startup": "0", "instances": 1, "storage": "0", "months": "1"}
NEEDS = {"per": "rtfx", "months": "storage", "instances": "startup"}  # no effect without these
EXCLUDES = {  # what would have no effect beside each of these
    "document": ("hours", "instance", "on", "model", "rtfx", "per", "measured", "price", "units"),
    "rtfx": ("model", "measured"),
    "units": ("instance", "on"),
}


def _cost(args: argparse.Namespace) -> int:
    from asrkit.workbench import cost
    from asrkit.workbench.cost import Range

    _check_combinations(args)
    _fill_defaults(args)
    terms = {
        "hours": Range.parse(args.hours, "hours", single=True).middle,
        "utilisation": Range.parse(args.utilisation, "utilisation"),
        "startup_s": Range.parse(args.startup, "startup"),
        "instances": args.instances,
        "months": Range.parse(args.months, "months"),
        "storage_usd_per_GB_month": Range.parse(args.storage, "storage"),
        "egress_usd_per_GB": Range.parse(args.egress, "egress"),
    }
    instances = _instances(args)
    known_speeds = _known_speeds(args)
    costs = [
        cost.transcription_cost(instance, speed, **terms)
        for instance in instances
        for speed in _speeds(args, instance, known_speeds)
    ]
    _check_costs(args, costs)
    result = _result(args, costs, terms["hours"])
    names = {instance.name for instance in instances}
    names_with_speed = {entry.instance.name for entry in costs}
    result["left_out"] = sorted(names - names_with_speed)
    finish(args, result, "\n".join(cost_lines(args, result)))
    return 0


def _passed(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were passed, or that have a default of their own."""
    return {
        name: value
        for name, value in vars(args).items()
        if value is not None and value is not False
    }


def _check_combinations(args: argparse.Namespace) -> None:
    """Raise ValueError for an option that would have no effect."""
    from asrkit.shapes import expect

    passed = _passed(args)
    for name, needed in NEEDS.items():
        if name in passed:
            expect(needed in passed, name, f"--{needed} beside it", passed[name])
    for name, excluded in EXCLUDES.items():
        if name not in passed:
            continue
        for other in excluded:
            expect(other not in passed, other, f"none beside --{name}", passed.get(other))


def _fill_defaults(args: argparse.Namespace) -> None:
    """Set the options that were not passed, after the check that has to tell them apart."""
    defaults = DEFAULTS
    if args.document:
        defaults = DEFAULTS | DOCUMENT
    vars(args).update(defaults | _passed(args))


def _instances(args: argparse.Namespace) -> list[Any]:
    """The instances that were asked for, at the price that was asked for; or one of --units."""
    from asrkit.shapes import expect
    from asrkit.workbench.cost import Range, load_prices

    price = None
    if args.price is not None:
        price = Range.parse(args.price, "price")
    if args.units is not None:
        return [_own_instance(args, price)]
    if args.on is None:
        known = load_prices()
    else:
        known = load_prices(on=args.on)
    expect(bool(known), "on", "a day of which there are prices", args.on)
    names = args.instance or [name for name in SHOWN if name in known]
    unknown = [name for name in names if name not in known]
    expect(not unknown, "instance", "one of " + ", ".join(known), ", ".join(unknown))
    instances = [known[name] for name in dict.fromkeys(names)]
    if price is None:
        return instances
    one_named = len(names) == len(args.instance or ()) == 1
    expect(one_named, "price", "one --instance, or --units", args.price)
    return [replace(instances[0], usd_per_hour=price, prices=())]


def _own_instance(args: argparse.Namespace, price: Any) -> Any:
    """The machine that --units and --price describe."""
    from asrkit.shapes import expect
    from asrkit.workbench.cost import Instance

    complete = price is not None and args.rtfx is not None
    expect(complete, "units", "--price and --rtfx beside it", args.units)
    expect(1 <= args.units <= 10**9, "units", "at least 1, at most 1e9", args.units)
    if args.per == "gpu":
        return Instance(name="own", usd_per_hour=price, gpus=args.units)
    return Instance(name="own", usd_per_hour=price, cores=args.units)


def _known_speeds(args: argparse.Namespace) -> list[Any]:
    """RTFx that were published and, except for --document, those that were recorded."""
    from asrkit.shapes import expect
    from asrkit.workbench import cost

    if args.document:
        return cost.published_speeds()
    own = []
    if args.measured and args.measured.is_file():
        own = [args.measured]
    expect(
        bool(own) or args.measured in (None, OWN_RECORDS),
        "measured",
        "a file of records",
        repr(str(args.measured)),
    )
    recorded = cost.recorded_speeds(files.shipped("records"), own=own)
    speeds = [*cost.published_speeds(), *recorded]
    models = dict.fromkeys(speed.model for speed in speeds)
    expect(args.model in (None, *models), "model", "one of " + ", ".join(models), repr(args.model))
    return speeds


def _speeds(args: argparse.Namespace, instance: Any, known: list[Any]) -> list[Any]:
    """The RTFx to use for `instance`: --rtfx, else what was measured here, else what is known.

    None at all is an error only for an instance that was asked for by name.
    """
    from asrkit.shapes import expect
    from asrkit.workbench import cost

    if args.rtfx is not None:
        rtfx = cost.Range.parse(args.rtfx, "rtfx")
        return [cost.Speed(rtfx=rtfx, per=args.per or instance.per, origin="assumed")]
    measured = []
    if args.measured:
        measured = _measured_speeds(args, instance, known)
    if measured or (args.measured and instance.per == "core"):
        known = measured
    fitting = cost.speeds_for(instance, known, model=args.model or cost.DEFAULT_MODEL)
    if not fitting and args.instance:  # of another maker's cores, but this was asked for
        fitting = measured
    if args.model is not None:
        fitting = [speed for speed in fitting if speed.model == args.model]
    expect(
        bool(fitting) or not args.instance,
        "rtfx",
        f"yours for {instance.name}",
        "none that is known",
    )
    if args.document:
        return fitting[:1]
    return fitting


def _measured_speeds(args: argparse.Namespace, instance: Any, known: list[Any]) -> list[Any]:
    """Of the known RTFx those that --measured stands for, of a core or GPU like `instance`'s."""
    from asrkit.shapes import expect
    from asrkit.workbench import cost

    origin = cost.SAME_KIND
    if args.measured.is_file():
        origin = "measured here"
    measured = [speed for speed in known if speed.origin == origin]
    expect(
        bool(measured),
        "measured",
        "records of a whole recogniser on this machine",
        "none",
        "asrkit bench encoder makes them.",
    )
    return [speed for speed in measured if speed.per == instance.per]


def _check_costs(args: argparse.Namespace, costs: Sequence[Any]) -> None:
    from asrkit.shapes import expect
    from asrkit.workbench import cost

    origins = {entry.speed.origin for entry in costs}
    measured = bool(origins & {"measured here", cost.SAME_KIND})
    expect(
        measured or not args.measured,
        "instance",
        "one with cores, for those of this machine",
        args.instance or "none of its maker",
    )
    expect(
        bool(costs),
        "instance",
        f"one of which an RTFx of {args.model} is known",
        "none. Name it, or another day or model",
    )


def _result(args: argparse.Namespace, costs: Sequence[Any], hours: float) -> dict[str, Any]:
    """What --json prints, and what the text is made of."""
    from asrkit.workbench import cost

    result: dict[str, Any] = {"hours": hours, "on": args.on, "rows": cost.compare(costs)}
    pair = cost.cheapest_pair(costs, model=args.model or cost.DEFAULT_MODEL)
    if pair:
        on_cores, on_gpus = pair
        result["cores_over_gpus"] = (on_cores.usd / on_gpus.usd).ends
        result["model"] = on_cores.speed.model
        result["unequal"] = cost.unequal(on_cores.speed, on_gpus.speed)
    elif {entry.speed.per for entry in costs} == {"core", "gpu"}:
        result["cores_over_gpus"] = None
    if args.document:
        unstated = [row["input"] for row in cost.stated_inputs() if not row["stated"]]
        result["not_stated"] = unstated
    return result


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hours", metavar="N", help="hours of speech to transcribe (default: 1e6)")
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
        help=f"use this machine's records in FILE (without FILE: {OWN_RECORDS}, or if there is "
        "none the records that come with asrkit, of machines of this kind)",
    )


def _add_other_costs(parser: argparse.ArgumentParser) -> None:
    other = parser.add_argument_group("startup, storage and transfer")
    other.add_argument(
        "--startup",
        metavar="RANGE",
        help="seconds that are paid before an instance works (default: 0)",
    )
    other.add_argument(
        "--instances",
        type=int,
        metavar="N",
        help="how many instances are started in all; needs --startup (default: 1)",
    )
    other.add_argument(
        "--storage",
        metavar="RANGE",
        help="USD a GB and month; an hour of speech is 0.1152 GB (default: 0)",
    )
    other.add_argument(
        "--months",
        metavar="RANGE",
        help="how long the speech is stored; needs --storage (default: 1)",
    )
    other.add_argument(
        "--egress", default="0", metavar="RANGE", help="USD for moving a GB of speech"
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
