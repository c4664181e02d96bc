"""Documents of a student: the report page, the model card, and the boundary card with training and serving cost."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.distill.gates import check_gates
from isthmus.distill.onnx.host import host
from isthmus.features.files import read_pointer, write_atomically
from isthmus.orchestration.artifacts import Artifacts, read_json, read_report, serving_file

if TYPE_CHECKING:
    from isthmus.distill.export.export import ExportReport

PAGE, MODEL_CARD, BOUNDARY_CARD = "report.html", "MODEL_CARD.md", "BOUNDARY.md"
SEARCH = "search.html"


def write_serving(exported: "ExportReport") -> None:
    half = {
        **msgspec.structs.asdict(exported.served), "runtime": exported.runtime, "device": "cpu", "host": host(),
        "left_out": exported.left_out,
    }  # fmt: skip
    write_atomically(serving_file(exported.path), json.dumps(half, indent=2).encode())


def _last_search(artifacts: Artifacts) -> dict[str, Any] | None:
    try:
        return read_json(read_pointer(artifacts.searches / "latest") / "search.json", "model search")
    except (FileNotFoundError, ValueError):
        return None


def write(artifacts: Artifacts, model: Path, package: Path | None = None) -> None:
    """Write the report page, model card and boundary card of a student to its folder `model`, replacing older ones.

    Called after training and after an export. The boundary card states the cost of training and serving. `package` is
    the folder of the student's package; its serving cost is included if it was measured. The report page also shows the
    last search for a better student. Raise DataError if the student's report.json is missing, or if it, the search or
    the measurement is damaged. Raise ConfigurationError if a gate names a metric that the report lacks.
    """
    from isthmus.distill.reports.boundarycard import boundary_card
    from isthmus.distill.reports.modelcard import model_card
    from isthmus.distill.reports.page import page

    declared, prices = artifacts.declared, artifacts.project.settings.prices
    report = read_report(model, package)
    report["description"] = declared.description
    report["gates"] = [asdict(result) for result in check_gates(report, declared.required, declared.where)]
    document = page(report, prices.hour, prices.currency, _last_search(artifacts))
    write_atomically(model / PAGE, document.encode())
    write_atomically(model / MODEL_CARD, model_card(report).encode())
    write_atomically(model / BOUNDARY_CARD, boundary_card(report, prices.hour, prices.currency).encode())
