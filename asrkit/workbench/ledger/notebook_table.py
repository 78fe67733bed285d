"""The ledger as a table of text; the table of the report's page is in `report/columns.py`."""

from collections.abc import Sequence

from asrkit.workbench.ledger.claims import Claim, Record
from asrkit.workbench.ledger.computed import Verdict
from asrkit.workbench.ledger.evidence import device, origin
from asrkit.workbench.ledger.verdicts import verdict


def table(
    claims: Sequence[Claim], records: Sequence[Record], machine: Record | None = None
) -> list[dict[str, str]]:
    """A row of text for each claim, with its verdict.

    Args:
        claims: The claims, in the order of the rows.
        records: Records of any claims and machines.
        machine: The machine whose records decide; by default this one.
    """
    rows = []
    for claim in claims:
        judged = verdict(claim, records, machine)
        recorded = value_elsewhere(claim, judged)
        if judged.recorded:
            recorded += f" on {origin(judged.recorded)}"
        measured = claim.show(judged.measured)
        if claim.formula and judged.measured is not None:
            measured += " (computed)"
        rows.append(
            {
                "id": claim.id,
                "claim": claim.text,
                "published": claim.show(claim.quoted),
                "tolerance": claim.rule,
                "recorded": recorded,
                **label_elsewhere(judged),
                "measured": measured,
                "verdict": judged.label,
                "why": judged.why,
                "notebook": claim.notebook,
                "title": claim.source["title"],
                "url": claim.source["url"],
                "section": claim.source["section"],
                "document": claim.source["document"],
                "kind": claim.kind,
                "needs": claim.needs,
                "status": claim.status,
                "appendix": claim.appendix,
            }
        )
    return rows


def value_elsewhere(claim: Claim, judged: Verdict) -> str:
    """What another machine recorded, and what that is there: "1.17× (reproduced there)"."""
    if judged.recorded is None:
        return "–"
    value = claim.show(judged.recorded["value"])
    if judged.there:
        value += f" ({judged.there} there)"
    return value


def label_elsewhere(judged: Verdict) -> dict[str, str]:
    """Columns of a row: the label that another machine's record has there, and its device."""
    if judged.recorded is None or not judged.there:
        return {"there": "", "device": ""}
    return {"there": judged.there, "device": device(judged.recorded)}
