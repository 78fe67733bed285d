"""`asrkit records add`."""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asrkit import files
from asrkit.cli.command import Command, count, finish, say


def _add(args: argparse.Namespace) -> int:
    from asrkit.shapes import expect
    from asrkit.workbench import collect, records

    checkout = files.HERE.parent
    if args.into is None:
        expect(
            (checkout / ".git").exists(),
            "into",
            "a folder, for this is no checkout of asrkit",
            None,
        )
    into = args.into or checkout / "data" / "records"
    added = collect.add(args.paths, into, dirty=args.dirty)
    numbers = Counter((record["machine"]["id"], record["what"]) for record in added)
    for (machine, what), number in sorted(numbers.items()):
        say(args, f"{machine}  {what}: {number}")
    known: list[dict[str, Any]] = []
    if into.exists():
        known = records.read(into)
    machines = sorted({record["machine"]["id"] for record in added})
    result = {
        "added": len(added),
        "machines": machines,
        "claims": _judge(args, added, known),
        "into": str(into),
    }
    where = f"{count(len(added), 'record')} of {count(len(machines), 'machine')} added to {into}"
    finish(args, result, where)
    return 0


def _judge(
    args: argparse.Namespace, added: Sequence[Mapping[str, Any]], known: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """Verdicts by claim id, of those claims that the added records are about."""
    from asrkit.workbench import ledger

    measured = {record["what"] for record in added}
    machines = {record["machine"]["id"]: record["machine"] for record in added}
    verdicts = {}
    for claim in ledger.load_claims():
        if claim.id not in measured:
            continue
        for machine in machines.values():
            verdict = ledger.verdict(claim, known, machine)
            if verdict.measured is None:
                continue
            verdicts[claim.id] = verdict.label
            ours = claim.show(verdict.measured)
            published = claim.show(claim.quoted)
            say(args, f"{claim.id}: {verdict.label}, {ours} where {published} is published")
    return verdicts


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        help="folders written by `bench all --minutes`, or files of records",
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="DIR",
        help="folder of records to add to (default: data/records of this checkout)",
    )
    parser.add_argument(
        "--dirty",
        action="store_true",
        help="also add records of code that no commit of this checkout holds",
    )


COMMAND = Command(
    name="records add",
    summary="Import records that another machine wrote, and say which claims they settle.",
    details="Adds all records or, if one of them is damaged, none.",
    run=_add,
    add_arguments=_add_arguments,
    examples=["asrkit records add share/", "asrkit records add bench.jsonl --into data/records"],
)
