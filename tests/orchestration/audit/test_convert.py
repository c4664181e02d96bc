"""`isthmus init --from-feast`: the definitions of a Feast repository load, and give the values that it has."""

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from isthmus.features.errors import ConfigurationError
from isthmus.orchestration.audit.convert import init_from_feast
from isthmus.orchestration.project import Project
from isthmus.project import apply, build
from tests.commandline import run
from tests.orchestration.audit.repository import DRIVER, KEYS, BigQuerySource, FileSource, feast, ft, now, rows
from tests.orchestration.audit.repository import build as build_feast

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def feast_repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A view with two versions of a row, and views with awkward names, types and times."""
    data = rows()
    again = data.tail(1).assign(rate=7.0, created=now())
    repo = build_feast(tmp_path_factory.mktemp("feast") / "repo", pd.concat([data, again]))
    store = feast.FeatureStore(repo_path=str(repo))
    at = pd.Timestamp(now()).tz_localize(None) - timedelta(minutes=9)
    odd = pd.DataFrame({"id": [1, 2], "when": [at] * 2, "x y": [0.5, None], "x_y": [1.0, 2.0], "doc": ["{}", "[]"]})
    odd.to_parquet(repo / "odd.parquet", coerce_timestamps="us", allow_truncated_timestamps=True)
    source = FileSource(name="odd-rows", path="odd.parquet", timestamp_field="when", field_mapping={"id": "driver"})

    def view(name: str, source: Any, *fields: str, entities: Any = (DRIVER,), **types: Any) -> feast.FeatureView:
        known = {"x y": ft.Float32, "x_y": ft.Float32, "doc": ft.Json, "when": ft.UnixTimestamp, "driver": ft.Int64}
        schema = [feast.Field(name=name, dtype={**known, **types}[name]) for name in fields]
        return feast.FeatureView(
            name=name, entities=list(entities), schema=schema, source=source, description='A "view"'
        )

    asked = BigQuerySource(name="asked", query="SELECT 1", timestamp_field="when")
    store.apply(
        [DRIVER, view("class", source, "driver", "doc", "x y", "x_y"), view("alone", source, "x y", entities=())]
    )
    store.registry.apply_feature_view(view("asks", asked, "driver", "doc"), "prod")
    return repo


def test_the_definitions_load_and_build_the_rows_of_feast(feast_repo: Path, tmp_path: Path) -> None:
    done = run("init", str(tmp_path / "shop"), "--from-feast", str(feast_repo), "--json")
    made = json.loads(done.stdout)
    assert (done.returncode, made["files"]) == (0, [".gitignore", "README.md", "definitions.py", "isthmus.toml"])
    text = (tmp_path / "shop" / "definitions.py").read_text()
    assert "TODO" not in text
    assert sorted(note.partition(":")[0] for note in made["left_out"]) == [
        "the name alone",
        "the name class",
        "the name class",
        "view asks",
    ]
    project = Project(tmp_path / "shop")
    apply(project)
    contract = project.applied()
    assert {name: [key.name for key in view.keys] for name, view in contract.views.items()} == {
        "stats": ["driver"], "view_class": ["driver"], "alone": ["everything"],
    }  # fmt: skip
    assert [field.name for field in contract.views["view_class"].fields] == ["doc", "x_y_2", "x_y"]
    assert contract.views["stats"].ttl == 86_400_000_000
    assert [*contract.services] == ["drivers"]
    build(project)
    table = project.offline_store().history(contract.views["stats"]).table().to_pandas()
    assert len(table) == 5 * KEYS
    assert table.sort_values("event_timestamp")["rate"].eq(7.0).sum() == 1


def test_nothing_is_written_if_feast_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="is missing"):
        init_from_feast(tmp_path / "shop", tmp_path / "empty")
    assert not (tmp_path / "shop").exists()
    shutil.rmtree(tmp_path / "empty")
