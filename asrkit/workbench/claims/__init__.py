"""Claims of the literature against measurements.

Verdicts are computed from records, never written by hand.
"""

from asrkit.workbench.claims.answers import claims_table, document_answers, listed, summary
from asrkit.workbench.claims.arithmetic import evaluate, published
from asrkit.workbench.claims.claims import Claim, load_claims
from asrkit.workbench.claims.verdicts import LEGEND, Verdict, origin, verdict

__all__ = [
    "LEGEND",
    "Claim",
    "Verdict",
    "claims_table",
    "document_answers",
    "evaluate",
    "listed",
    "load_claims",
    "origin",
    "published",
    "summary",
    "verdict",
]
