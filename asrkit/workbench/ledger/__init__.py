"""Claims of the literature against measurements.

Verdicts are computed from records, never written by hand.
"""

from asrkit.workbench.ledger.answers import (
    DocumentAnswer,
    count_verdicts,
    document_answers,
    headline,
    summary,
)
from asrkit.workbench.ledger.claims import Claim, Record
from asrkit.workbench.ledger.computed import Verdict
from asrkit.workbench.ledger.evidence import Evidence, origin
from asrkit.workbench.ledger.formulas import evaluate
from asrkit.workbench.ledger.grids import grid_lines, published
from asrkit.workbench.ledger.labels import LABELS, LEGEND
from asrkit.workbench.ledger.load import load_claims
from asrkit.workbench.ledger.notebook_table import table
from asrkit.workbench.ledger.verdicts import verdict

__all__ = [
    "LABELS",
    "LEGEND",
    "Claim",
    "DocumentAnswer",
    "Evidence",
    "Record",
    "Verdict",
    "count_verdicts",
    "document_answers",
    "evaluate",
    "grid_lines",
    "headline",
    "load_claims",
    "origin",
    "published",
    "summary",
    "table",
    "verdict",
]
