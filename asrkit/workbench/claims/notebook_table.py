"""The ledger as a table of text; the table of the report's page is in `report/columns.py`."""

from collections.abc import Sequence

from asrkit.workbench.claims.claims import Claim, Record
from asrkit.workbench.claims.computed import Verdict
from asrkit.workbench.claims.evidence import device, origin
from asrkit.workbench.claims.verdicts import verdict


def claims_table(
    claims: Sequence[Claim], records: Sequence[Record], machine: Record | None = None
) -> list[dict[str, str]]:
    """A row of text for each claim, with its verdict.

    Args:
        claims: The claims, in the order of the rows.
        records: Records of any claims and machines.
        machine: The machine whose records decide; by default this one.
    """
    return [claim_row(claim, verdict(claim, records, machine)) for claim in claims]


def claim_row(claim: Claim, judged: Verdict) -> dict[str, str]:
    """A claim and its verdict as text."""
    recorded = value_elsewhere(claim, judged)
    there = device_there = ""
    if judged.recorded:
        recorded += f" on {origin(judged.recorded)}"
        there = judged.there
        device_there = device(judged.recorded)
    measured = claim.show(judged.measured)
    if claim.formula and judged.measured is not None:
        measured += " (computed)"
    return {
        "id": claim.id,
        "claim": claim.text,
        "published": claim.show(claim.quoted),
        "tolerance": claim.rule,
        "recorded": recorded,
        "device": device_there,
        "there": there,
        "measured": measured,
        "verdict": judged.label,
        "why": judged.why,
        "notebook": claim.notebook,
        **claim.source,
        "kind": claim.kind,
        "needs": claim.needs,
        "status": claim.status,
        "appendix": claim.appendix,
    }


def value_elsewhere(claim: Claim, judged: Verdict) -> str:
    """What another machine recorded, and what that is there: "1.17× (reproduced there)"."""
    if judged.recorded is None:
        return "–"
    value = claim.show(judged.recorded["value"])
    if judged.there:
        value += f" ({judged.there} there)"
    return value
