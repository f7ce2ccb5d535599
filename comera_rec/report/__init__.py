"""Reports on runs: charts and a self-contained page, from the files that training writes."""

from comera_rec.report.page import summary_table, write_report, write_summary

__all__ = ["summary_table", "write_report", "write_summary"]
