"""Runs notebooks, and writes one offline HTML report about them."""

from asrkit.workbench.report.execute import NotebookRun, jobs_of, run_notebooks
from asrkit.workbench.report.run import ReportResult, report

__all__ = ["NotebookRun", "ReportResult", "jobs_of", "report", "run_notebooks"]
