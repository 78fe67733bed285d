"""What a run found, in a sentence and a number each, computed from its records.

A finding whose record is missing, or which says the opposite, is left out: nothing here is typed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asrkit.workbench.report.notebook_run import NotebookRun

Record = Mapping[str, Any]
MOST = 6


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a finding: `share` of the longest one, 0 to 1."""

    label: str
    text: str
    share: float


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding on the index; `notebook` is where it leads, `quantity` what the bars measure."""

    notebook: str
    number: str
    sentence: str
    quantity: str
    bars: Sequence[Bar]


def of_run(runs: Sequence[NotebookRun]) -> list[Finding]:
    """Findings that the records of a run support, at most six."""
    of_notebook = {run.name: run.records for run in runs}
    found = []
    for declared in DECLARED:
        finding = declared(of_notebook)
        if finding is not None:
            found.append(finding)
    return found[:MOST]


Declared = Callable[[Mapping[str, Sequence[Record]]], Finding | None]
DECLARED: Sequence[Declared] = ()
