"""Tests of feature values and of served values."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from visits import write

from isthmus import training_data
from isthmus.project import Project, apply, build, materialize, verify

START = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(days=20)
VISITS = [("ann", 0, 5.0, 2), ("bob", 1, 0.0, 0), ("ann", 2, 0.0, 4), ("ann", 12, 7.5, 1)]
"""Visitor, start in days, amount spent, items saved. Each visit takes half an hour."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The definitions over a few rows, built and materialized in a temporary folder."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("isthmus.toml", "definitions.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    rows = []
    for who, days, spent, saved in VISITS:
        began = START + timedelta(days=days)
        rows.append((who, began.isoformat(), (began + timedelta(minutes=30)).isoformat(), spent, "lamps", saved))
    write(rows, folder / "data" / "visits.csv")
    with pytest.MonkeyPatch.context() as environment:
        # Tests use their own stores, not those of isthmus.toml.
        environment.setenv("ISTHMUS_STORES__ONLINE", "embedded")
        environment.setenv("ISTHMUS_STORES__OFFLINE", "offline")
        opened = Project(folder)
    apply(opened)
    build(opened)
    materialize(opened)
    return opened


@pytest.mark.parametrize(
    ("who", "days", "visits", "spent", "saved", "status"),
    [
        ("ann", 0, None, None, None, "not_found"),  # the first visit has not ended yet
        ("ann", 1, 1, 5.0, 2, "present"),
        ("ann", 2, 1, 5.0, 2, "present"),
        ("ann", 2.1, 2, 5.0, 4, "present"),
        ("ann", 13, 1, 7.5, 1, "present"),  # the earlier visits are more than seven days old
        ("bob", 19, 1, 0.0, 0, "present"),
        ("eve", 19, None, None, None, "not_found"),
    ],
)
def test_feature_values(
    project: Project, who: str, days: float, visits: int | None, spent: float | None, saved: int | None, status: str
) -> None:
    spine = pa.table({"visitor": [who], "event_timestamp": [START + timedelta(days=days)]})
    (row,) = training_data(project, ["habits"], spine).table().to_pylist()
    values = [row[f"habits__{name}"] for name in ("visits_7d", "spent_7d", "saved", "status")]
    assert values == [visits, spent, saved, status]


def test_served_values_equal_built_values(project: Project) -> None:
    verdict = verify(project, all_keys=True)
    assert verdict.passed, verdict.as_dict()
    assert verdict.compared > 0
