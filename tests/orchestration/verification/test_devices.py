"""The snapshot in the verdict: every row that devices keep is the tables', and what is not is found."""

import shutil
from pathlib import Path

import pytest

from isthmus.features.snapshot.file import SnapshotFile, read_snapshot
from isthmus.features.snapshot.kept import kept_views
from isthmus.features.verdict import Verdict
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.build.build import build
from isthmus.orchestration.build.materialize import materialize
from isthmus.orchestration.device.snapshot import shelf, signer, snapshot
from isthmus.orchestration.project import Project
from isthmus.orchestration.verification.verify import verify
from tests.orchestration.shop import with_device, write

SERVICE, VIEW = "late_order_device", "snapshot shelf_demand"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("devices") / "shop"
    with_device(write(root), '{"store": ["s1", "s2"]}')
    for step in (apply, build, materialize, snapshot):
        step(Project(root))
    return root


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Project:
    return Project(shutil.copytree(made, tmp_path / "shop"))


def _replace(project: Project, changed: dict[bytes, bytes | None]) -> None:
    """Puts another snapshot on the shelf, signed by the project's own key: rows are replaced, or left out."""
    place, views = shelf(project, SERVICE), kept_views(project.applied(), SERVICE)
    latest = place.latest()
    assert latest is not None
    file = read_snapshot(place.snapshot(latest.snapshot), views)
    rows = {key: row for key, row in {**file.rows["shelf_demand"], **changed}.items() if row is not None}
    fields = {name: getattr(file.header, name) for name in file.header.__struct_fields__}
    header = type(file.header)(**{**fields, "views": (("shelf_demand", len(rows)),)})
    sealed = signer(project).seal(SnapshotFile(header, {"shelf_demand": rows}))
    place.add(sealed, views, 0, discloses=latest.discloses, tables=latest.tables)


def _rows(project: Project) -> dict[bytes, bytes]:
    place = shelf(project, SERVICE)
    latest = place.latest()
    assert latest is not None
    return dict(
        read_snapshot(place.snapshot(latest.snapshot), kept_views(project.applied(), SERVICE)).rows["shelf_demand"]
    )


def _differing(verdict: Verdict) -> set[str]:
    return {name for name, part in verdict.named().items() if part.differing}


def test_a_snapshot_of_the_tables_passes(project: Project) -> None:
    verdict = verify(project)
    assert verdict.passed
    assert {name: part.compared for name, part in verdict.views[VIEW].items()} == {
        "sold_1d": 30, "distance": 30, "status": 30,
    }  # fmt: skip
    assert "the snapshot" not in verdict.skipped


def test_whatever_is_wrong_in_it_is_found(project: Project) -> None:
    rows = _rows(project)
    first, second, third, *_ = rows
    changed = bytearray(rows[first])
    changed[-1] ^= 1
    other = first.replace(b"s1", b"s9")
    # A value, a row that is missing, and one of a key that the tables lack.
    _replace(project, {first: bytes(changed), third: None, other: rows[second]})
    verdict = verify(project)
    assert not verdict.passed
    found = {name: part.differing for name, part in verdict.views[VIEW].items()}
    assert found["status"] == 2
    assert found["distance"] >= 1
    assert all(name.startswith(VIEW) for name in _differing(verdict))


def test_what_cannot_be_compared_is_said(project: Project) -> None:
    place = shelf(project, SERVICE)
    latest = place.latest()
    assert latest is not None
    place.path(latest.snapshot).write_bytes(place.snapshot(latest.snapshot)[:-1] + b"x")
    assert "not signed by the key of the project" in verify(project).skipped["the snapshot"]
    (project.root / "data" / "orders.parquet").touch()
    shutil.rmtree(place.folder)
    assert verify(project).skipped["the snapshot"] == "none is written: run `isthmus snapshot`"
