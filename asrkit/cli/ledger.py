"""`asrkit ledger`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from asrkit.cli.command import Command, Options, finish, print_text, table_width
from asrkit.shapes import expect
from asrkit.transcribe.options import described

COLUMNS = {  # key of a row -> heading
    "id": "claim",
    "published": "published",
    "tolerance": "tolerance",
    "measured": "measured or computed",
    "recorded": "recorded elsewhere",
    "verdict": "verdict",
}


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(Options):
    """The options of the command."""

    paths: list[Path] = described(
        (),
        "files or folders with more records to judge by; those of asrkit always count",
        flag="",
        nargs="*",
    )
    document: str | None = described(
        None, 'only the claims of one document, such as "004"', metavar="NAME"
    )
    appendix: bool = described(
        False, "also list the claims of the appendix: tautologies, and claims not about speech"
    )


def _ledger(options: LedgerOptions) -> int:
    from asrkit.files import shipped
    from asrkit.workbench import claims as ledger
    from asrkit.workbench import records
    from asrkit.workbench.tables import paragraph

    claims = ledger.load_claims()
    known = sorted({claim.source["document"] for claim in claims})
    wanted = [options.document] if options.document else known
    expect({*wanted} <= {*known}, "document", f"one of {', '.join(known)}", options.document)
    claims = [claim for claim in claims if claim.source["document"] in wanted]
    paths = [shipped("records"), *options.paths]
    rows = ledger.claims_table(claims, [*chain.from_iterable(map(records.read, paths))])
    answers = ledger.document_answers(rows)
    shown = rows if options.appendix else ledger.listed(rows)
    for answer in answers:
        heading = f"{answer.document}: {answer.title}, {answer.url}"
        table = _table([row for row in shown if row["document"] == answer.document])
        print_text(options, *paragraph(heading), *paragraph(answer.sentence), "", *table, "")
    summary = ledger.summary(rows)
    documents = [asdict(answer) for answer in answers]
    result = {"summary": summary, "documents": documents, "claims": rows}
    text = f"{summary} The text of each claim is on the claims page of a report, and in --json."
    finish(options, result, "\n".join(paragraph(text)))
    return 0


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    from asrkit.workbench.tables import aligned

    cells = [[*COLUMNS.values()]]
    for row in rows:
        value, _, _ = row["recorded"].partition(" on ")
        cells.append([{**row, "recorded": value}[key] for key in COLUMNS])
    return aligned(cells, width=table_width())


COMMAND = Command(
    name="ledger",
    summary="Judge the published claims: an answer for each document, a row for each claim.",
    details="Verdicts come from measurements on this machine. A value from another machine is "
    "shown with its verdict there. JSON also has the machine, commit and day of that value, and "
    "always includes the claims of the appendix, marked.",
    options=LedgerOptions,
    run=_ledger,
    examples=[
        "asrkit ledger",
        "asrkit ledger reports/latest    # with the records of the last report",
        "asrkit ledger --document 004 --appendix",
    ],
)
