"""Claims of the literature against measurements.

Verdicts are computed from records, never written by hand.
"""

from asrkit.workbench.claims.answers import (
    OF_LABEL,
    OUTCOMES,
    DocumentAnswer,
    Row,
    claim_row,
    claims_table,
    count_outcomes,
    document_answers,
    listed,
    settled_elsewhere,
    summary,
    value_elsewhere,
)
from asrkit.workbench.claims.arithmetic import evaluate, grid_lines, published
from asrkit.workbench.claims.claims import Claim, load_claims
from asrkit.workbench.claims.verdicts import (
    LEGEND,
    NOT_COMPARABLE,
    Evidence,
    Verdict,
    origin,
    verdict,
)
from asrkit.workbench.records import Record

__all__ = [
    "LEGEND",
    "NOT_COMPARABLE",
    "OF_LABEL",
    "OUTCOMES",
    "Claim",
    "DocumentAnswer",
    "Evidence",
    "Record",
    "Row",
    "Verdict",
    "claim_row",
    "claims_table",
    "count_outcomes",
    "document_answers",
    "evaluate",
    "grid_lines",
    "listed",
    "load_claims",
    "origin",
    "published",
    "settled_elsewhere",
    "summary",
    "value_elsewhere",
    "verdict",
]
