"""Benchmarks: suites of cases whose arms are compared first and then timed on the same inputs.

`run` measures one suite and returns its records, `table` prints records, `check` compares the arms
of one case, and `SUITES` lists what there is to measure.
"""

from asrkit.workbench.bench.agreement import check, compare_arms
from asrkit.workbench.bench.cases import Case, PeerArms, Suite
from asrkit.workbench.bench.peers.processes import Peers
from asrkit.workbench.bench.runner import run
from asrkit.workbench.bench.suites import SUITES
from asrkit.workbench.bench.table import legend, table

__all__ = [
    "SUITES",
    "Case",
    "PeerArms",
    "Peers",
    "Suite",
    "check",
    "compare_arms",
    "legend",
    "run",
    "table",
]
