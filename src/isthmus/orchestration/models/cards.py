"""The papers of a student, beside it: the report as a page, a model card, and the boundary card with both halves."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.distill.gates import check_gates
from isthmus.distill.onnx.host import host
from isthmus.features.files import read_pointer, write_atomically
from isthmus.orchestration.artifacts import Artifacts, read_json, read_report, serving_file
from isthmus.orchestration.project import Project

if TYPE_CHECKING:
    from isthmus.distill.declaration import Distillation
    from isthmus.distill.export.export import ExportReport

PAGE, MODEL_CARD, BOUNDARY_CARD = "report.html", "MODEL_CARD.md", "BOUNDARY.md"
SEARCH = "search.html"


def measured(exported: "ExportReport") -> None:
    """Keeps what a package cost where it was measured: the serving half of the boundary."""
    half = {
        **msgspec.structs.asdict(exported.served),
        "runtime": exported.runtime,
        "device": "cpu",
        "host": host(),
    }
    write_atomically(serving_file(exported.path), json.dumps(half, indent=2).encode())


def write_search(folder: Path, found: Mapping[str, Any]) -> None:
    """Writes the page of a search."""
    from isthmus.distill.reports import search_page

    write_atomically(folder / SEARCH, search_page(found).encode())


def _searched(project: Project, declared: "Distillation") -> dict[str, Any] | None:
    """What the last search found; None if there was none, or it is gone."""
    try:
        return read_json(read_pointer(Artifacts(project, declared).searches / "latest") / "search.json", "search")
    except (FileNotFoundError, ValueError):
        return None


def write(project: Project, declared: "Distillation", model: Path, package: Path | None = None) -> None:
    """Writes all papers of a student anew, from what is known of it now."""
    from isthmus.distill.reports import boundary_card, model_card, page

    report, prices = read_report(model, package), project.settings.prices
    report["description"] = declared.description
    report["gates"] = [
        {
            "metric": one.gate.metric,
            "at_least": one.gate.at_least,
            "at_most": one.gate.at_most,
            "found": one.value,
            "holds": one.holds,
        }
        for one in check_gates(report, declared.required, declared.where)
    ]
    found = _searched(project, declared)
    write_atomically(model / PAGE, page(report, prices.hour, prices.currency, found).encode())
    write_atomically(model / MODEL_CARD, model_card(report).encode())
    write_atomically(model / BOUNDARY_CARD, boundary_card(report, prices.hour, prices.currency).encode())
