"""A GPU machine's whole share in one command; see `share.supervisor`."""

from asrkit.workbench.bench.share.supervisor import report, share

__all__ = ["report", "share"]
