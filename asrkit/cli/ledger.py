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

    wanted = options.document
    claims = ledger.load_claims()
    if wanted is not None:
        known = ", ".join(sorted({claim.source["document"] for claim in claims}))
        claims = [claim for claim in claims if claim.source["document"] == wanted]
        expect(bool(claims), "document", f"one of {known}", wanted)
    found = [
        record for path in (shipped("records"), *options.paths) for record in records.read(path)
    ]
    rows = ledger.claims_table(claims, found)
    answers = ledger.document_answers(rows)
    shown = rows if options.appendix else ledger.listed(rows)
    for answer in answers:
        heading = f"{answer.document}: {answer.title}, {answer.url}"
        of_document = [row for row in shown if row["document"] == answer.document]
        lines = [*paragraph(heading), *paragraph(answer.sentence), "", *_lines(of_document), ""]
        say(options, *lines)
    summary = ledger.summary(rows)
    documents = [asdict(answer) for answer in answers]
    result = {"summary": summary, "documents": documents, "claims": rows}
    finish(options, result, "\n".join(paragraph(summary)))
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


COMMAND = Command(
    name="ledger",
    summary="Judge the published claims: an answer for each document, a row for each claim.",
    details="Verdicts come from measurements on this machine; a value of another one is shown with "
    "what it is there. "
    "With --json the claims of the appendix are always included, and marked.",
    options=LedgerOptions,
    run=_ledger,
    examples=[
        "asrkit ledger",
        "asrkit ledger reports/latest    # with the records of the last report",
        "asrkit ledger --document 004 --appendix",
    ],
)
