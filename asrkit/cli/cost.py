"""`asrkit cost`."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from asrkit.cli.options import Commands

PER = ("core", "gpu")
SHOWN = ("c7a.48xlarge", "c7i.48xlarge", "p4de.24xlarge", "hf-h200")
OWN = Path("reports/bench.jsonl")
DOCUMENT = {"instance": ["c7a.48xlarge", "p4de.24xlarge"], "on": "2024-09-24", "hours": "1e6", "model": "parakeet_rnnt_1_1b"}


def _cost(args: argparse.Namespace) -> int:
    from asrkit import cost
    from asrkit.shapes import expect

    if args.document:
        vars(args).update(DOCUMENT)
    terms = {
        "hours": _range(args.hours, "hours", width=False).middle, "utilisation": _range(args.utilisation, "utilisation"),
        "startup_s": _range(args.startup, "startup"), "instances": args.instances, "months": _range(args.months, "months"),
        "storage_usd_per_GB_month": _range(args.storage, "storage"), "egress_usd_per_GB": _range(args.egress, "egress"),
    }  # fmt: skip
    machines, known = _machines(args), _known(args)
    costs = [cost.transcription_cost(one, speed, **terms) for one in machines for speed in _speeds(args, one, known)]
    here = any(one.speed.origin == "measured here" for one in costs)
    expect(here or not args.measured, "instance", "one with cores, for those of this machine", args.instance or "none of its maker")
    rows = cost.compare(costs)
    told: dict[str, Any] = {"hours": terms["hours"], "on": args.on, "rows": rows}
    print("\n".join(_table(rows, terms["hours"])))
    taken = dict[str, list[str]]()
    for row in rows:
        for text in row["caveats"]:
            taken.setdefault(text, []).append(row["instance"])
    lines = [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in taken.items()]
    if pair := cost.cheapest_pair(costs, model=args.model):
        ratio, model, differ = pair[0].usd / pair[1].usd, pair[0].speed.model, cost.unequal(pair[0].speed, pair[1].speed)
        told |= {"cores_over_gpus": ratio.ends, "model": model, "unequal": differ}
        lines += [f"the cheapest of each: {text}" for text in differ]
        print(f"\n{model or 'at the RTFx given'}: the cheapest on cores costs {ratio} times as much as the cheapest on GPUs")
    elif {one.speed.per for one in costs} == {*PER}:
        told["cores_over_gpus"] = None
        print("\nno model here has an RTFx on cores and on GPUs: what they cost is not compared")
    if lines:
        print("\n  ".join(["\ntaken for granted", *lines]))
    if args.document:
        missing = [row for row in cost.stated_inputs() if not row["stated"]]
        told["not_stated"] = [row["input"] for row in missing]
        print("\n  ".join(["\nnot stated in document 000", *(f"{row['input']}; here {row['taken']}" for row in missing)]))
    print(json.dumps(told))
    return 0


def _range(text: str, name: str, *, width: bool = True) -> Any:
    """A range from `4`, `4:6` (the mean in the middle) or `4:5:6`; only the first without `width`."""
    from asrkit.cost import Range
    from asrkit.shapes import expect

    try:
        ends = [float(part) for part in text.split(":")]
    except ValueError:
        ends = []
    wanted = "a number not below 0" + ", or LOW:HIGH, or LOW:MIDDLE:HIGH" * width
    fits = 1 <= len(ends) <= (3 if width else 1) and all(0 <= end < float("inf") for end in ends) and ends == sorted(ends)
    expect(fits, name, wanted, repr(text))
    return Range(ends[0], ends[1] if len(ends) == 3 else sum(ends) / len(ends), ends[-1])


def _machines(args: argparse.Namespace) -> list[Any]:
    """The instances that are asked for, at the price that is asked for; or one of the reader's own."""
    from asrkit.cost import Instance, load_prices
    from asrkit.shapes import expect

    price = [_range(args.price, "price")] if args.price else []
    expect(not args.per or bool(args.rtfx), "per", "--rtfx beside it", args.per)
    if args.units is not None:
        expect(bool(price and args.rtfx and not args.instance), "units", "--price and --rtfx, and no --instance", args.units)
        expect(args.units >= 1, "units", "at least 1", args.units)
        return [Instance(name="own", usd_per_hour=price[0], **{"gpus" if args.per == "gpu" else "cores": args.units})]
    known = load_prices(on=args.on or "9999-12-31")
    expect(bool(known), "on", "a day of which there are prices", args.on)
    names = args.instance or [name for name in SHOWN if name in known]
    unknown = [name for name in names if name not in known]
    expect(not unknown, "instance", "one of " + ", ".join(known), ", ".join(unknown))
    expect(not price or len(names) == len(args.instance or ()) == 1, "price", "one --instance, or --units", args.price)
    return [replace(known[name], usd_per_hour=price[0], prices=()) if price else known[name] for name in dict.fromkeys(names)]


def _known(args: argparse.Namespace) -> list[Any]:
    """RTFx that were published, and unless the document is asked for, those that were recorded."""
    from asrkit import cost, records
    from asrkit.shapes import expect

    if args.document:
        return cost.published_speeds()
    own = [args.measured] if args.measured and args.measured.exists() else []
    expect(bool(own) or args.measured in (None, OWN), "measured", "a file of records", repr(str(args.measured)))
    return [*cost.published_speeds(), *cost.recorded_speeds(records.shipped("records"), *own)]


def _speeds(args: argparse.Namespace, machine: Any, known: list[Any]) -> list[Any]:
    """RTFx for `machine`: given, measured here, or what is known."""
    from asrkit import cost
    from asrkit.shapes import expect

    if args.rtfx:
        return [cost.Speed(rtfx=_range(args.rtfx, "rtfx"), per=args.per or machine.per, origin="assumed")]
    if args.measured:
        here = [speed for speed in known if speed.origin == "measured here"]
        expect(bool(here), "measured", "records of a whole recogniser on this machine", "none", "asrkit bench encoder makes them.")
        mine = [speed for speed in here if speed.per == machine.per]
        found = cost.speeds_for(machine, mine, model=args.model) or mine * bool(args.instance)  # another maker's only if asked for
        if found or machine.per == "core":
            return found
    models = dict.fromkeys(speed.model for speed in known)
    expect(args.model in models, "model", "one of " + ", ".join(models), args.model)
    found = cost.speeds_for(machine, known, model=args.model)
    expect(bool(found), "rtfx", f"yours for {machine.name}", "none that is known")
    return found[:1] if args.document else found


def _table(rows: list[dict[str, Any]], hours: float) -> list[str]:
    """Aligned lines, one a cost; a range as middle (lowest–highest)."""
    whole = f"USD/{hours:,.0f} hours"
    lines = [("instance", "RTFx", "of one", "model", "batch", "RTFx is", "USD/1M hours", whole, "break-even", "kWh")]
    for row in rows:
        lines.append((
            row["instance"], _text(row["rtfx"]), f"{row['per']} of {row['units']}", row["model"] or "–", str(row["batch"] or "–"),
            ", ".join(filter(None, (row["origin"], row["device"], row["date"]))), _text(row["usd_per_million_hours"]),
            _text(row["usd"]), _text(row["break_even_rtfx"]), _text(row["kWh"]),
        ))  # fmt: skip
    columns = [column for column in zip(*lines, strict=True) if hours != 1e6 or column[0] != whole]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]


def _text(ends: list[float] | None) -> str:
    from asrkit.cost import Range

    return str(Range(*ends)) if ends else "–"


# fmt: off
COMMANDS: Commands = {
    "cost": (_cost, "What speech costs to transcribe, on cores and on GPUs, and where each number is from. "
                    "A RANGE is a number, LOW:HIGH or LOW:MIDDLE:HIGH.", [
        ("--hours", {"default": "1e6", "help": "of speech"}),
        ("--instance", {"nargs": "+", "metavar": "NAME", "help": f"of data/prices.csv (none: {' '.join(SHOWN)})"}),
        ("--on", {"metavar": "DAY", "help": "prices as of this day, such as 2024-09-24 (none: the newest)"}),
        ("--model", {"default": "parakeet_rnnt_1_1b", "help": "whose RTFx is taken, where it is known"}),
        ("--rtfx", {"metavar": "RANGE", "help": "your own RTFx, of one core or GPU"}),
        ("--per", {"choices": PER, "help": "what --rtfx is of (none: gpu where the machine has one)"}),
        ("--measured", {"nargs": "?", "type": Path, "const": OWN, "metavar": "FILE",
                        "help": f"take this machine's newest records, shipped or in FILE (FILE left out: {OWN})"}),
        ("--price", {"metavar": "RANGE", "help": "your own, USD an hour of the one --instance, or of --units"}),
        ("--units", {"type": int, "metavar": "N", "help": "a machine of your own with N of --per; needs --price and --rtfx"}),
        ("--utilisation", {"default": "1", "metavar": "RANGE", "help": "share of the time paid in which the machine transcribes"}),
        ("--startup", {"default": "0", "metavar": "RANGE", "help": "seconds that are paid before an instance works"}),
        ("--instances", {"type": int, "default": 1, "metavar": "N", "help": "how many are started in all"}),
        ("--storage", {"default": "0", "metavar": "RANGE", "help": "USD a GB and month; an hour of speech is 0.1152 GB"}),
        ("--months", {"default": "1", "metavar": "RANGE", "help": "that the speech is stored"}),
        ("--egress", {"default": "0", "metavar": "RANGE", "help": "USD a GB of speech moved"}),
        ("--document", {"action": "store_true", "help": "document 000's comparison, and what it does not state"})]),
}
# fmt: on
