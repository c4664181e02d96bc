"""What is told of a run, from its `report.json` alone: an HTML page, a model card and a boundary card."""

from isthmus.distill.papers.boundarycard import boundary_card, require_boundary
from isthmus.distill.papers.figures import images
from isthmus.distill.papers.modelcard import model_card
from isthmus.distill.papers.page import page
from isthmus.distill.papers.searchpage import search_page

__all__ = ["boundary_card", "images", "model_card", "page", "require_boundary", "search_page"]
