"""Claims of the literature against measurements.

Verdicts are computed from records, never written by hand.
"""

from asrkit.workbench.claims.answers import (
    DocumentAnswer,
    count_verdicts,
    document_answers,
    headline,
    summary,
)
from asrkit.workbench.claims.claims import Claim, Record
from asrkit.workbench.claims.computed import Verdict
from asrkit.workbench.claims.evidence import Evidence, origin
from asrkit.workbench.claims.formulas import evaluate
from asrkit.workbench.claims.grids import grid_lines, published
from asrkit.workbench.claims.labels import LABELS, LEGEND, NOT_COMPARABLE
from asrkit.workbench.claims.load import load_claims
from asrkit.workbench.claims.notebook_table import claim_row, claims_table
from asrkit.workbench.claims.verdicts import verdict

__all__ = [
    "LABELS",
    "LEGEND",
    "NOT_COMPARABLE",
    "Claim",
    "DocumentAnswer",
    "Evidence",
    "Record",
    "Verdict",
    "claim_row",
    "claims_table",
    "count_verdicts",
    "document_answers",
    "evaluate",
    "grid_lines",
    "headline",
    "load_claims",
    "origin",
    "published",
    "summary",
    "verdict",
]
