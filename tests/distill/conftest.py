from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from isthmus.distill.distillation import DistillationReport
from isthmus.distill.export.export import ExportReport, export
from isthmus.features.profiles import ServingProfile
from isthmus.features.progress import Progress, silent
from isthmus.package.manifest import DeviceManifest, KeptView
from tests.distill.support import material, run, training_set

SERVING = ServingProfile(latency_objective_ms=50)
DEVICE = DeviceManifest("flights", "features", "5" * 64, 3_600_000_000, (
    KeptView("carriers", (("carrier", "String"), ("day", "UnixTimestamp")), (("late", "Float32"),), None),
))  # fmt: skip
"""What a phone keeps for the exported student."""


@pytest.fixture(scope="session")
def table() -> pa.Table:
    return training_set()


@pytest.fixture(scope="session")
def trained(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> DistillationReport:
    return run(tmp_path_factory.mktemp("distill"), table)


@pytest.fixture(scope="session")
def exported(table: pa.Table, trained: DistillationReport, tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    return make_package(trained.path, table, tmp_path_factory.mktemp("packages"))


def make_package(
    model: Path, table: pa.Table, packages: Path, profile: ServingProfile = SERVING,
    progress: Progress = silent, **changes: Any,
) -> ExportReport:  # fmt: skip
    """Of a student that lies where `run` put it."""
    return export(
        material(table, **changes), model, packages, contract={"views": {}}, profile=profile,
        cache=model.parents[1] / "cache", device=DEVICE, progress=progress,
    )  # fmt: skip
