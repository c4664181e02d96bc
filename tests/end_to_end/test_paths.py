"""A path is a path: names that libraries take for patterns, escapes or URLs."""

import json
import string
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isthmus.features.errors import ConfigurationError
from isthmus.features.pointintime.spine import spine_rows
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.graph.instance import dagster_home
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.set import write_training_set
from tests.commandline import run

NAMES = [
    *string.punctuation.replace("/", ""), *string.whitespace, "aZ09", "\x01", "\x7f", "é", "e\u0301", "漢", "😀",
    "\u202e", "%2F", "%41", "%25", "{a,b}", "[1]", "..", "?*", "a=b", "$HOME",
]  # fmt: skip
REFUSED = {*"[]^|\\\t\n\r\x0b\x0c\x01\x7f", "%2F", "%41", "%25", "[1]"}
"""Names of folders that no Delta table can be in."""

DEFINITIONS = """\
from pyspark.sql import DataFrame

from isthmus import Entity, FeatureService, Field, Int64, Source, String, transform

sales = Source("sales", path={path!r}, timestamp="ts")
more = Source("more", path={folder!r}, timestamp="ts")
shop = Entity("shop", join_keys={{"k": String}})


@transform(entities=[shop], sources=[sales, more], ttl=None, schema=[Field("x", Int64)])
def v(sales: DataFrame, more: DataFrame) -> DataFrame:
    rows = sales.unionByName(more)
    return rows.select("k", rows.ts.alias("event_timestamp"), "x")


svc = FeatureService("svc", features=[v])
"""


def _rows(key: str, value: int) -> pa.Table:
    time = pa.array([datetime(2024, 1, 1, tzinfo=UTC)], pa.timestamp("us", tz="UTC"))
    return pa.table({"k": [key], "ts": time, "x": [value]})


def _write(root: Path, name: str) -> None:
    """A project with a source in a file and a source in a folder, beside files whose names a pattern would match."""
    data = root / "data"
    data.mkdir(parents=True)
    (root / "isthmus.toml").write_text('[project]\nname = "sales"\nnow = 2024-01-02T00:00:00Z\n')
    file, folder = f"data/q{name}.parquet", f"data/f{name}"
    (root / "definitions.py").write_text(DEFINITIONS.format(path=file, folder=folder))
    for decoy in ("q1.parquet", "qa.parquet", "qA.parquet", "q.parquet", "f/q.parquet", "fa/q.parquet", "f1/q.parquet"):
        (data / decoy).parent.mkdir(exist_ok=True)
        pq.write_table(_rows("a", -1), data / decoy)
    (root / file).parent.mkdir(exist_ok=True)
    pq.write_table(_rows("a", 5), root / file)
    (root / folder).mkdir(exist_ok=True)
    for stale in (root / folder).glob("*"):
        stale.unlink()
    pq.write_table(_rows("b", 6), root / folder / f"r{name}.parquet")
    pq.write_table(_rows("c", 7), root / folder / "s.parquet")


def _walk(root: Path, name: str) -> None:
    """Takes a project from its sources to Redis, and joins a spine beside it."""
    _write(root, name)
    project = Project(root)
    apply(project)
    assert build(project)["v"].rows == 3
    assert not build(Project(root))["v"].changed
    materialize(Project(root))
    found = json.loads(run("features", "lookup", "svc", "k=a", "k=b", "k=c", "--json", "--project", str(root)).stdout)
    assert found["results"][found["metadata"]["feature_names"].index("v__x")]["values"] == [5, 6, 7]
    spine = root / f"spine{name}.parquet"
    pq.write_table(_rows("a", 0).select(["k", "ts"]).rename_columns(["k", "event_timestamp"]), spine)
    out = root / f"set{name}"
    joined = write_training_set(Project(root), spine=str(spine), features="svc", out=out)
    assert joined.table().select(["k", "v__x"]).to_pylist() == [{"k": "a", "v__x": 5}]
    again = write_training_set(Project(root), like=str(out))
    assert again.id == joined.id


@pytest.mark.parametrize(("folder", "name"), [("c# {a,b}*%?='é", "[1]*?{a,b}%2F#\\|^=:' \"\n漢")])
def test_odd_names_from_sources_to_a_training_set(folder: str, name: str, tmp_path: Path) -> None:
    _walk(tmp_path / folder, name)


@pytest.mark.accept
@pytest.mark.slowest
@pytest.mark.parametrize("name", NAMES)
def test_every_name(name: str, tmp_path: Path) -> None:
    if name in REFUSED:
        _check_refused(tmp_path / f"p{name}p")
    _walk(tmp_path / ("p" if name in REFUSED else f"p{name}p"), name)


@pytest.mark.parametrize("name", ["a%2Fx", "a[1]", "a\\b", "a\nb"])
def test_a_project_in_a_folder_of_no_delta_table_is_refused(name: str, tmp_path: Path) -> None:
    _check_refused(tmp_path / name)


def _check_refused(root: Path) -> None:
    _write(root, "z")
    before = sorted(root.rglob("*"))
    for verb in ("apply", "build", "materialize", "status"):
        done = run(verb, "--project", str(root))
        assert done.returncode == 2, done.stderr
        assert "ename the folder" in done.stderr
        assert "remove" not in done.stderr
    assert sorted(root.rglob("*")) == before


def test_the_remedy_for_such_a_folder_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_STORES__OFFLINE", str(tmp_path / "tables"))
    _walk(tmp_path / "job_feature%2Fx[1]", "z")


def test_a_spine_in_a_file_has_no_columns_of_the_folders_above_it(tmp_path: Path) -> None:
    file = tmp_path / "k=7" / "label=1" / "spine.parquet"
    file.parent.mkdir(parents=True)
    pq.write_table(_rows("a", 0), file)
    assert spine_rows(file, {}).schema.names == ["k", "ts", "x"]
    assert spine_rows(file.parents[1], {}).schema.names == ["k", "ts", "x", "label"]


def test_dagster_is_refused_where_its_databases_would_lie_elsewhere(tmp_path: Path) -> None:
    _write(tmp_path / "a?b", "z")
    with pytest.raises(
        ConfigurationError,
        match=r"contains a \?, and Dagster cuts the paths of its databases there.* Rename the folder",
    ):
        dagster_home(Project(tmp_path / "a?b"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a?b"]
