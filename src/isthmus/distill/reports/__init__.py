"""Render a run from its `report.json` as an HTML page, a model card and a boundary card."""

from isthmus.distill.reports.boundarycard import boundary_card, require_boundary
from isthmus.distill.reports.comparison import comparison, explained, legend, measures
from isthmus.distill.reports.findings import teacher_gain, warnings
from isthmus.distill.reports.modelcard import model_card
from isthmus.distill.reports.page import images, page
from isthmus.distill.reports.report import Report, read_report
from isthmus.distill.reports.searchpage import read_search, search_page

__all__ = [
    "Report",
    "boundary_card",
    "comparison",
    "explained",
    "images",
    "legend",
    "measures",
    "model_card",
    "page",
    "read_report",
    "read_search",
    "require_boundary",
    "search_page",
    "teacher_gain",
    "warnings",
]
