"""The papers of a student, beside it: the report as a page, a model card, and the boundary card with both halves."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.distill.gates import held
from isthmus.distill.host import host
from isthmus.features.errors import DataError
from isthmus.features.files import read_pointer, write_atomically
from isthmus.features.profiles import FASTEST, ServingProfile
from isthmus.orchestration.project import Project

if TYPE_CHECKING:
    from isthmus.distill.declaration import Distillation
    from isthmus.distill.export import ExportReport

REPORT = "report.json"
PAGE, MODEL_CARD, BOUNDARY_CARD = "report.html", "MODEL_CARD.md", "BOUNDARY.md"
SEARCH = "search.html"


def read(model: Path, package: Path | None = None) -> dict[str, Any]:
    """The report of a student, with the serving half that was measured with a package of it.

    Raises:
        DataError: one of both is damaged.
    """
    report = _read(model / REPORT, "distill")
    measured = None if package is None else _serving(package)
    report["serving"] = _read(measured, "export") if measured and measured.exists() else None
    return report


def _read(file: Path, verb: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(str(file), f"cannot be read: {error}", remedy=f"run `isthmus {verb}` again") from error


def measured(exported: "ExportReport") -> None:
    """Keeps what a package cost where it was measured: the serving half of the boundary."""
    half = {
        **msgspec.structs.asdict(exported.served),
        "runtime": exported.runtime,
        "device": "cpu",
        "host": host(),
    }
    write_atomically(_serving(exported.path), json.dumps(half, indent=2).encode())


def serving_profile(project: Project, package: Path) -> ServingProfile:
    """How a package is served: where the profile asks for the fastest precision, in the one that was when exported.

    Raises:
        DataError: what was measured is not there.
    """
    profile = project.settings.profiles.serving
    if profile.precision != FASTEST:
        return profile
    return replace(profile, precision=_read(_serving(package), "export")["precision"])


def _serving(package: Path) -> Path:
    """Not in the package: figures inside would make its bytes differ from one export to the next."""
    return package.parents[1] / "serving" / f"{package.name}.json"


def searches(project: Project, declared: "Distillation") -> Path:
    """The folder of the searches of a distillation."""
    return project.state / "search" / declared.name


def write_search(folder: Path, found: Mapping[str, Any]) -> None:
    """Writes the page of a search."""
    from isthmus.distill.papers import search_page

    write_atomically(folder / SEARCH, search_page(found).encode())


def _searched(project: Project, declared: "Distillation") -> dict[str, Any] | None:
    """What the last search found; None if there was none, or it is gone."""
    try:
        return _read(read_pointer(searches(project, declared) / "latest") / "search.json", "search")
    except (FileNotFoundError, ValueError):
        return None


def write(project: Project, declared: "Distillation", model: Path, package: Path | None = None) -> None:
    """Writes all papers of a student anew, from what is known of it now."""
    from isthmus.distill.papers import boundary_card, model_card, page

    report, prices = read(model, package), project.settings.prices
    report["description"] = declared.description
    report["gates"] = [
        {
            "metric": one.gate.metric,
            "at_least": one.gate.at_least,
            "at_most": one.gate.at_most,
            "found": one.found,
            "holds": one.holds,
        }
        for one in held(report, declared.required, declared.where)
    ]
    found = _searched(project, declared)
    write_atomically(model / PAGE, page(report, prices.hour, prices.currency, found).encode())
    write_atomically(model / MODEL_CARD, model_card(report).encode())
    write_atomically(model / BOUNDARY_CARD, boundary_card(report, prices.hour, prices.currency).encode())
