"""Reports on runs: charts and a self-contained page, from the files that training writes."""

from comera_rec.report.page import require_summary, summary_table, write_report, write_summary

__all__ = ["require_summary", "summary_table", "write_report", "write_summary"]
