"""`asrkit ledger`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asrkit.cli.command import Command, Options, finish, say, table_width
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
        "more records to judge by, beside those that come with asrkit: files, or folders",
        flag="",
        nargs="*",
    )
    document: str | None = described(
        None, 'only the claims of one document, as "004"', metavar="NAME"
    )
    appendix: bool = described(
        False, "also list the claims of the appendix: tautologies, and what is not about speech"
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
    rows = ledger.claims_table(claims, [one for path in paths for one in records.read(path)])
    answers = ledger.document_answers(rows)
    shown = rows if options.appendix else ledger.listed(rows)
    for answer in answers:
        heading = f"{answer.document}: {answer.title}, {answer.url}"
        table = _table([row for row in shown if row["document"] == answer.document])
        say(options, *paragraph(heading), *paragraph(answer.sentence), "", *table, "")
    summary = ledger.summary(rows)
    documents = [asdict(answer) for answer in answers]
    result = {"summary": summary, "documents": documents, "claims": rows}
    told = f"{summary} What each claim says is on the page of claims of a report, and in --json."
    finish(options, result, "\n".join(paragraph(told)))
    return 0


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    from asrkit.workbench.tables import aligned

    cells = [[*COLUMNS.values()]]
    for row in rows:
        value, _, _machine = row["recorded"].partition(" on ")
        cells.append([{**row, "recorded": value}[key] for key in COLUMNS])
    return aligned(cells, width=table_width())


COMMAND = Command(
    name="ledger",
    summary="Judge the published claims: an answer for each document, a row for each claim.",
    details="Verdicts come from measurements on this machine; a value of another one is shown with "
    "what it is there. JSON also says which machine, commit and day that was, and always has the "
    "claims of the appendix, marked.",
    options=LedgerOptions,
    run=_ledger,
    examples=[
        "asrkit ledger",
        "asrkit ledger reports/latest    # with the records of the last report",
        "asrkit ledger --document 004 --appendix",
    ],
)
