"""Rollouts as one self-contained HTML page: the mismatch before and after replay, the supports, the text."""

from keepmask.report.page import write_report

__all__ = ["write_report"]
