"""Reports on runs: charts and a self-contained page, from the files that training writes."""

from comera_rec.report.page import require_summary, summary_table, write_report, write_summary
from comera_rec.report.runs import read_runs

__all__ = ["read_runs", "require_summary", "summary_table", "write_report", "write_summary"]
