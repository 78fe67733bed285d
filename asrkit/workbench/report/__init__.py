"""Notebooks in, one offline HTML report out."""

from asrkit.workbench.report.execute import run_notebooks
from asrkit.workbench.report.notebook_run import NotebookRun
from asrkit.workbench.report.run import ReportResult, report

__all__ = ["NotebookRun", "ReportResult", "report", "run_notebooks"]
