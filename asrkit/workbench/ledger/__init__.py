"""Claims of the literature against measurements.

Verdicts are computed from records, never written by hand.
"""

from asrkit.workbench.ledger.claims import Claim, Record
from asrkit.workbench.ledger.formulas import evaluate
from asrkit.workbench.ledger.grids import grid_lines, published
from asrkit.workbench.ledger.load import load_claims
from asrkit.workbench.ledger.notebook_table import origin, summary, table
from asrkit.workbench.ledger.verdicts import LABELS, Verdict, verdict

__all__ = [
    "LABELS",
    "Claim",
    "Record",
    "Verdict",
    "evaluate",
    "grid_lines",
    "load_claims",
    "origin",
    "published",
    "summary",
    "table",
    "verdict",
]
