"""`asrkit cost`."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.cli.options import Commands

PER = ("core", "gpu")
LEGEND = "RTFx: seconds of speech a second, of one core or GPU. even at RTFx: what it would need to cost as much as the one beside it."
SHOWN = ("c7a.48xlarge", "c7i.48xlarge", "p4de.24xlarge", "hf-h200")
OWN = Path("reports/bench.jsonl")
DOCUMENT = {
    "instance": ["c7a.48xlarge", "p4de.24xlarge"],
    "on": "2024-09-24",
    "model": "parakeet_rnnt_1_1b",
}
DEFAULTS = {"hours": "1e6", "startup": "0", "instances": 1, "storage": "0", "months": "1"}
BESIDE = {
    "per": "rtfx",
    "months": "storage",
    "instances": "startup",
}  # without the second the first says nothing
INSTEAD = {
    "document": "hours instance on model rtfx per measured price units",
    "rtfx": "model measured",
    "units": "instance on",
}


def _cost(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect
    from asrkit.workbench import cost, ledger

    _settle(args)
    terms = {
        "hours": _range(args.hours, "hours", width=False).middle,
        "utilisation": _range(args.utilisation, "utilisation"),
        "startup_s": _range(args.startup, "startup"),
        "instances": args.instances,
        "months": _range(args.months, "months"),
        "storage_usd_per_GB_month": _range(args.storage, "storage"),
        "egress_usd_per_GB": _range(args.egress, "egress"),
    }
    machines, known = _machines(args), _known(args)
    costs = [
        cost.transcription_cost(one, speed, **terms)
        for one in machines
        for speed in _speeds(args, one, known)
    ]
    here = any(one.speed.origin in ("measured here", cost.KIN) for one in costs)
    expect(
        here or not args.measured,
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
    missing = sorted({one.name for one in machines} - {one.instance.name for one in costs})
    rows = cost.compare(costs)
    told: dict[str, Any] = {
        "hours": terms["hours"],
        "on": args.on,
        "rows": rows,
        "left_out": missing,
    }
    print("\n".join(_table(rows, terms["hours"])))
    print(f"\n{LEGEND}")
    if missing:
        told_of = f"of {args.model} " * bool(args.model) + "measured on such cores " * bool(
            args.measured
        )
        print(f"left out: {', '.join(missing)}: no RTFx {told_of}is known")
    taken = dict[str, list[str]]()
    for row in rows:
        for text in row["caveats"]:
            taken.setdefault(text, []).append(row["instance"])
    lines = [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in taken.items()]
    if pair := cost.cheapest_pair(costs, model=args.model or cost.MODEL):
        ratio, model, differ = (
            pair[0].usd / pair[1].usd,
            pair[0].speed.model,
            cost.unequal(pair[0].speed, pair[1].speed),
        )
        told |= {"cores_over_gpus": ratio.ends, "model": model, "unequal": differ}
        lines += [f"the cheapest of each: {text}" for text in differ]
        print(
            f"\n{model or 'at the RTFx given'}: the cheapest on cores costs {ratio} times as much as the cheapest on GPUs"
        )
    elif {one.speed.per for one in costs} == {*PER}:
        told["cores_over_gpus"] = None
        print("\nno model here has an RTFx on cores and on GPUs: what they cost is not compared")
    if lines:
        print("\n  ".join(["\ntaken for granted", *lines]))
    if args.document:
        unstated = [row for row in cost.stated_inputs() if not row["stated"]]
        source = next(
            claim.source for claim in ledger.load_claims() if claim.id == "cpu-rtfx-parakeet"
        )
        told["not_stated"] = [row["input"] for row in unstated]
        said = f"\nnot stated in document 000, {source['title']} ({source['url']})"
        print("\n  ".join([said, *(f"{row['input']}; here {row['taken']}" for row in unstated)]))
    print(json.dumps(told))
    return 0


def _settle(args: argparse.Namespace) -> None:
    """Refuses what would be ignored, then fills in what was not given."""
    from asrkit.shapes import expect

    given = {
        name: value
        for name, value in vars(args).items()
        if value is not None and value is not False
    }
    for name, other in BESIDE.items():
        expect(name not in given or other in given, name, f"--{other} beside it", given.get(name))
    for name, others in INSTEAD.items():
        for other in others.split():
            expect(not {name, other} <= {*given}, other, f"none beside --{name}", given.get(other))
    vars(args).update(DEFAULTS | (DOCUMENT if args.document else {}) | given)


def _range(text: str, name: str, *, width: bool = True) -> Any:
    """A range from `4`, `4:6` (the mean in the middle) or `4:5:6`; only the first without `width`."""
    from asrkit.shapes import expect
    from asrkit.workbench.cost import Range

    try:
        ends = [float(part) for part in text.split(":")]
    except ValueError:
        ends = []
    wanted = "a number, 0 or in 1e-12..1e12" + ", or LOW:HIGH, or LOW:MIDDLE:HIGH" * width
    fits = (
        1 <= len(ends) <= (3 if width else 1)
        and all(end == 0 or 1e-12 <= end <= 1e12 for end in ends)
        and ends == sorted(ends)
    )
    expect(fits, name, wanted, repr(text))
    return Range(ends[0], ends[1] if len(ends) == 3 else sum(ends) / len(ends), ends[-1])


def _machines(args: argparse.Namespace) -> list[Any]:
    """The instances that are asked for, at the price that is asked for; or one of the reader's own."""
    from asrkit.shapes import expect
    from asrkit.workbench.cost import Instance, load_prices

    price = [] if args.price is None else [_range(args.price, "price")]
    if args.units is not None:
        expect(
            bool(price) and args.rtfx is not None,
            "units",
            "--price and --rtfx beside it",
            args.units,
        )
        expect(1 <= args.units <= 10**9, "units", "at least 1, at most 1e9", args.units)
        return [
            Instance(
                name="own",
                usd_per_hour=price[0],
                **{"gpus" if args.per == "gpu" else "cores": args.units},
            )
        ]
    known = load_prices(on="9999-12-31" if args.on is None else args.on)
    expect(bool(known), "on", "a day of which there are prices", args.on)
    names = args.instance or [name for name in SHOWN if name in known]
    unknown = [name for name in names if name not in known]
    expect(not unknown, "instance", "one of " + ", ".join(known), ", ".join(unknown))
    expect(
        not price or len(names) == len(args.instance or ()) == 1,
        "price",
        "one --instance, or --units",
        args.price,
    )
    return [
        replace(known[name], usd_per_hour=price[0], prices=()) if price else known[name]
        for name in dict.fromkeys(names)
    ]


def _known(args: argparse.Namespace) -> list[Any]:
    """RTFx that were published, and unless the document is asked for, those that were recorded."""
    from asrkit.shapes import expect
    from asrkit.workbench import cost, records

    if args.document:
        return cost.published_speeds()
    own = [args.measured] if args.measured and args.measured.is_file() else []
    expect(
        bool(own) or args.measured in (None, OWN),
        "measured",
        "a file of records",
        repr(str(args.measured)),
    )
    wrong = records.verify(own)
    expect(
        not wrong,
        "measured",
        "records as they were sealed",
        "; ".join(wrong[:3]),
        "Leave those lines out.",
    )
    known = [*cost.published_speeds(), *cost.recorded_speeds(files.shipped("records"), own=own)]
    models = dict.fromkeys(speed.model for speed in known)
    expect(args.model in (None, *models), "model", "one of " + ", ".join(models), repr(args.model))
    return known


def _speeds(args: argparse.Namespace, machine: Any, known: list[Any]) -> list[Any]:
    """RTFx for `machine`: given, measured here, or what is known; none if nothing is and it was not
    asked for by name.
    """
    from asrkit.shapes import expect
    from asrkit.workbench import cost

    if args.rtfx is not None:
        return [
            cost.Speed(
                rtfx=_range(args.rtfx, "rtfx"), per=args.per or machine.per, origin="assumed"
            )
        ]
    mine, model = [], args.model or cost.MODEL
    if args.measured:
        origin = "measured here" if args.measured.is_file() else cost.KIN
        here = [speed for speed in known if speed.origin == origin]
        expect(
            bool(here),
            "measured",
            "records of a whole recogniser on this machine",
            "none",
            "asrkit bench encoder makes them.",
        )
        mine = [speed for speed in here if speed.per == machine.per]
        known = mine if mine or machine.per == "core" else known
    found = cost.speeds_for(machine, known, model=model) or mine * bool(
        args.instance
    )  # another maker's only if asked for
    found = [speed for speed in found if args.model in (None, speed.model)]
    expect(
        bool(found) or not args.instance, "rtfx", f"yours for {machine.name}", "none that is known"
    )
    return found[:1] if args.document else found


def _table(rows: list[dict[str, Any]], hours: float) -> list[str]:
    """Aligned lines, one a cost; a range as middle (lowest–highest)."""
    whole = f"USD/{hours:,.0f} hours"
    lines = [
        (
            "instance",
            "units",
            "RTFx of one",
            "batch",
            "model",
            "RTFx is from",
            "USD/1M hours",
            whole,
            "even at RTFx",
            "with",
            "kWh",
        )
    ]
    for row in rows:
        lines.append(
            (
                row["instance"],
                f"{row['units']} {row['per']}{'s' * (row['units'] > 1)}",
                _text(row["rtfx"]),
                str(row["batch"] or "–"),
                row["model"] or "–",
                ", ".join(filter(None, (row["origin"], row["device"], row["date"]))),
                _text(row["usd_per_million_hours"]),
                _text(row["usd"]),
                _text(row["break_even_rtfx"]),
                row["against"] or "–",
                _text(row["kWh"]),
            )
        )
    columns = [column for column in zip(*lines, strict=True) if hours != 1e6 or column[0] != whole]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


def _text(ends: list[float] | None) -> str:
    from asrkit.workbench.cost import Range

    return str(Range(*ends)) if ends else "–"


# fmt: off
COMMANDS: Commands = {
    "cost": (_cost, "What speech costs to transcribe, on cores and on GPUs, and where each number is from. "
                    "A RANGE is a number, LOW:HIGH or LOW:MIDDLE:HIGH.", [
        ("--hours", {"help": "of speech (none: 1e6)"}),
        ("--instance", {"nargs": "+", "metavar": "NAME", "help": f"of data/prices.csv (none: {' '.join(SHOWN)})"}),
        ("--on", {"metavar": "DAY", "help": "prices as of this day, such as 2024-09-24 (none: the newest)"}),
        ("--model", {"help": "whose RTFx is taken, and no other's (none: parakeet_rnnt_1_1b, or another where it is not known)"}),
        ("--rtfx", {"metavar": "RANGE", "help": "your own RTFx, of one core or GPU"}),
        ("--per", {"choices": PER, "help": "what --rtfx is of (none: gpu where the machine has one)"}),
        ("--measured", {"nargs": "?", "type": Path, "const": OWN, "metavar": "FILE",
                        "help": f"take this machine's records, of FILE (left out: {OWN}, or shipped, of a machine of this kind)"}),
        ("--price", {"metavar": "RANGE", "help": "your own, USD an hour of the one --instance, or of --units"}),
        ("--units", {"type": int, "metavar": "N", "help": "a machine of your own with N of --per; needs --price and --rtfx"}),
        ("--utilisation", {"default": "1", "metavar": "RANGE", "help": "share of the time paid in which the machine transcribes"}),
        ("--startup", {"metavar": "RANGE", "help": "seconds that are paid before an instance works (none: 0)"}),
        ("--instances", {"type": int, "metavar": "N", "help": "how many are started in all; needs --startup (none: 1)"}),
        ("--storage", {"metavar": "RANGE", "help": "USD a GB and month; an hour of speech is 0.1152 GB (none: 0)"}),
        ("--months", {"metavar": "RANGE", "help": "that the speech is stored; needs --storage (none: 1)"}),
        ("--egress", {"default": "0", "metavar": "RANGE", "help": "USD a GB of speech moved"}),
        ("--document", {"action": "store_true",
                        "help": "the comparison of document 000, NVIDIA's blog of 2024-09-24, and what it leaves out"})]),
}
# fmt: on
