"""Notebooks in, one offline HTML report out; two of them side by side."""

from asrkit.workbench.report.compare import Comparison, compare
from asrkit.workbench.report.execute import run_notebooks
from asrkit.workbench.report.notebook_run import NotebookRun
from asrkit.workbench.report.run import ReportResult, report

__all__ = ["Comparison", "NotebookRun", "ReportResult", "compare", "report", "run_notebooks"]
