"""Notebooks in, one offline HTML report out."""

from asrkit.report.run import NotebookRun, run_notebooks
from asrkit.report.site import ReportResult, report

__all__ = ["NotebookRun", "ReportResult", "report", "run_notebooks"]
