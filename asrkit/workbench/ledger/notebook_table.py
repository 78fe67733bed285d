"""The ledger as a table of text for notebooks; the report's table is in `report/columns.py`."""

from collections import Counter
from collections.abc import Mapping, Sequence

from asrkit.workbench.ledger.claims import Claim, Record
from asrkit.workbench.ledger.verdicts import LABELS, verdict
from asrkit.workbench.records import code_version


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
        rows.append(
            {
                "id": claim.id,
                "claim": claim.text,
                "published": claim.show(claim.quoted),
                "recorded": recorded,
                "measured": claim.show(judged.measured),
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
            }
        )
    return rows


def origin(record: Record) -> str:
    """Device, code version and day of a record."""
    gpus = " + ".join(gpu["name"] for gpu in record["machine"]["gpus"])
    device = gpus or record["machine"]["cpu_model"]
    return f"{device}, {code_version(record)}, {record['captured_at'][:10]}"


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """One sentence: how many of the rows of a table have which verdict."""
    counts = Counter(row["verdict"] for row in rows)
    parts = [f"{counts[label]} {label}" for label in LABELS if counts[label]]
    return f"{len(rows)} claims: {', '.join(parts)}."
