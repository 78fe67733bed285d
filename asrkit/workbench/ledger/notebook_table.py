"""The ledger as a table of text for notebooks; the report's table is in `report/columns.py`."""

from collections.abc import Sequence

from asrkit.workbench.ledger.claims import Claim, Record
from asrkit.workbench.ledger.evidence import origin
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
        recorded = "–"
        if judged.recorded:
            recorded = f"{claim.show(judged.recorded['value'])} on {origin(judged.recorded)}"
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
