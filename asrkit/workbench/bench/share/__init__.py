"""All checks and suites of a GPU machine in one command; see `share.supervisor`."""

from asrkit.workbench.bench.share.supervisor import report, share

__all__ = ["report", "share"]
