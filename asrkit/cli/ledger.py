"""`asrkit ledger`."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asrkit.cli.command import Command, finish, say, table_width

COLUMNS = {  # key of a row -> heading
    "id": "claim",
    "published": "published",
    "tolerance": "tolerance",
    "measured": "measured or computed",
    "recorded": "recorded elsewhere",
    "verdict": "verdict",
}


def _ledger(args: argparse.Namespace) -> int:
    from asrkit.files import shipped
    from asrkit.shapes import expect
    from asrkit.workbench import claims as ledger
    from asrkit.workbench import records
    from asrkit.workbench.tables import paragraph

    claims = ledger.load_claims()
    known = sorted({claim.source["document"] for claim in claims})
    if args.document is not None:
        expect(args.document in known, "document", f"one of {', '.join(known)}", args.document)
        claims = [claim for claim in claims if claim.source["document"] == args.document]
    found = [record for path in args.paths for record in records.read(path)]
    rows = ledger.claims_table(claims, [*records.read(shipped("records")), *found])
    answers = ledger.document_answers(rows)
    shown = rows if args.appendix else ledger.listed(rows)
    for answer in answers:
        heading = f"{answer.document}: {answer.title}, {answer.url}"
        say(args, *paragraph(heading), *paragraph(answer.sentence), "")
        of_document = [row for row in shown if row["document"] == answer.document]
        say(args, *_lines(of_document), "")
    summary = ledger.summary(rows)
    result = {
        "summary": summary,
        "documents": [asdict(answer) for answer in answers],
        "claims": rows,
    }
    finish(args, result, "\n".join(paragraph(summary)))
    return 0


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of claims, and below it the machines that values were recorded on."""
    from asrkit.workbench.tables import aligned

    if not rows:
        return []
    cells = [[*COLUMNS.values()]]
    origins: list[str] = []
    for row in rows:
        value, _, origin = row["recorded"].partition(" on ")
        if origin and origin not in origins:
            origins.append(origin)
        if origin:
            value += f" [{origins.index(origin) + 1}]"
        shown = {**row, "recorded": value}
        cells.append([shown[key] for key in COLUMNS])
    lines = aligned(cells, width=table_width())
    for number, origin in enumerate(origins, 1):
        lines.append(f"[{number}] {origin}")
    return lines


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        help="more records to judge by, beside those that come with asrkit: files, or folders",
    )
    parser.add_argument(
        "--document",
        metavar="NAME",
        help='only the claims of one document, as "004"',
    )
    parser.add_argument(
        "--appendix",
        action="store_true",
        help="also list the claims of the appendix: tautologies, and what is not about speech",
    )


COMMAND = Command(
    name="ledger",
    summary="Judge the published claims: an answer for each document, a row for each claim.",
    details="Verdicts come from measurements on this machine; a value of another one is shown with "
    "what it is there. "
    "With --json the claims of the appendix are always included, and marked.",
    run=_ledger,
    add_arguments=_add_arguments,
    examples=[
        "asrkit ledger",
        "asrkit ledger reports/latest    # with the records of the last report",
        "asrkit ledger --document 004 --appendix",
    ],
)
