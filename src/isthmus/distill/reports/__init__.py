"""What is told of a run, from its `report.json` alone: an HTML page, a model card and a boundary card."""

from isthmus.distill.reports.boundarycard import boundary_card, require_boundary
from isthmus.distill.reports.figures import images
from isthmus.distill.reports.modelcard import model_card
from isthmus.distill.reports.page import page
from isthmus.distill.reports.searchpage import search_page

__all__ = ["boundary_card", "images", "model_card", "page", "require_boundary", "search_page"]
