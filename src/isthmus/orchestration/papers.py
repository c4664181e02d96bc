"""The papers of a student, beside it: the report as a page, a model card, and the boundary card with both halves."""

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.distill.gates import held
from isthmus.features.errors import DataError
from isthmus.features.files import write_atomically
from isthmus.orchestration.project import Project

if TYPE_CHECKING:
    from isthmus.distill.declaration import Distillation
    from isthmus.distill.export import ExportReport

REPORT, SERVING = "report.json", "serving.json"
PAGE, MODEL_CARD, BOUNDARY_CARD = "report.html", "MODEL_CARD.md", "BOUNDARY.md"


def read(model: Path) -> dict[str, Any]:
    """The report of a student, with its serving half once a package was made of it.

    Raises:
        DataError: one of both is damaged.
    """
    report = _read(model / REPORT, "distill")
    report["serving"] = _read(model / SERVING, "export") if (model / SERVING).exists() else None
    return report


def _read(file: Path, verb: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(str(file), f"cannot be read: {error}", remedy=f"run `isthmus {verb}` again") from error


def measured(project: Project, model: Path, exported: "ExportReport") -> None:
    """Keeps what the package of a student cost where it was measured: the serving half of the boundary."""
    profile = project.settings.profiles.serving
    half = {
        "package": exported.path.name,
        "runtime": exported.runtime,
        "precision": profile.precision,
        "threads": profile.threads,
        **exported.latency,
        "requests_per_second": exported.requests_per_second,
        "memory_mb": exported.memory_mb,
        "device": "cpu",
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    write_atomically(model / SERVING, json.dumps(half, indent=2).encode())


def write(project: Project, declared: "Distillation", model: Path) -> None:
    """Writes all papers of a student anew, from what is known of it now."""
    from isthmus.distill.papers import boundary_card, model_card, page

    report, prices = read(model), project.settings.prices
    report["description"] = declared.description
    report["gates"] = [
        {
            "metric": one.gate.metric,
            "at_least": one.gate.at_least,
            "at_most": one.gate.at_most,
            "found": one.found,
            "holds": one.holds,
        }
        for one in held(report, declared.gates, declared.where)
    ]
    write_atomically(model / PAGE, page(report, prices.hour, prices.currency).encode())
    write_atomically(model / MODEL_CARD, model_card(report).encode())
    write_atomically(model / BOUNDARY_CARD, boundary_card(report, prices.hour, prices.currency).encode())
