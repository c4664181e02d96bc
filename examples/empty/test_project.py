"""The features are what they should be, and what is served is what was built."""

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
"""Who came, after how many days, what was spent and how much saved. Each visit takes half an hour."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """These definitions over a few rows of our own, built and materialized. The state of the project stays as it is."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("isthmus.toml", "definitions.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    rows = []
    for who, days, spent, saved in VISITS:
        began = START + timedelta(days=days)
        rows.append((who, began.isoformat(), (began + timedelta(minutes=30)).isoformat(), spent, "lamps", saved))
    write(rows, folder / "data" / "visits.csv")
    with pytest.MonkeyPatch.context() as environment:
        # Whatever isthmus.toml says: a test writes into stores of its own.
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
        ("ann", 0, None, None, None, "not_found"),  # the first visit has begun, and is not known yet
        ("ann", 1, 1, 5.0, 2, "present"),
        ("ann", 2, 1, 5.0, 2, "present"),
        ("ann", 2.1, 2, 5.0, 4, "present"),
        ("ann", 13, 1, 7.5, 1, "present"),  # more than seven days later, the others do not count
        ("bob", 19, 1, 0.0, 0, "present"),
        ("eve", 19, None, None, None, "not_found"),
    ],
)
def test_a_value_at_a_moment(
    project: Project, who: str, days: float, visits: int | None, spent: float | None, saved: int | None, status: str
) -> None:
    asked = pa.table({"visitor": [who], "event_timestamp": [START + timedelta(days=days)]})
    (row,) = training_data(project, ["habits"], asked).table().to_pylist()
    found = [row[f"habits__{name}"] for name in ("visits_7d", "spent_7d", "saved", "status")]
    assert found == [visits, spent, saved, status]


def test_what_is_served_is_what_was_built(project: Project) -> None:
    verdict = verify(project, all_keys=True)
    assert verdict.passed, verdict.as_dict()
    assert verdict.compared > 0
