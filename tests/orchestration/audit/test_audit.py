"""`isthmus audit REPO`: each fault in a Feast repository is named with its cause, and a clean one has none."""

import html
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from isthmus.features.errors import ConfigurationError, DependencyError, GateFailed, IsthmusError
from isthmus.features.feast.existing import encoding
from isthmus.orchestration.audit.audit import audit
from isthmus.orchestration.audit.page import page
from isthmus.orchestration.audit.report import AuditReport
from tests.commandline import run
from tests.orchestration.audit.repository import (
    CITY,
    DAY,
    DRIVER,
    KEYS,
    BigQuerySource,
    FileSource,
    Registry,
    Value,
    build,
    change,
    digest,
    entity_key,
    feast,
    ft,
    key_bytes,
    now,
    put,
    python_values_to_proto_values,
    rewrite,
    rows,
    serialize_entity_key,
)
from tests.orchestration.cli.test_cli import strictly
from tests.servers import free_port, redis_server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
PREVIOUS = -2 * KEYS
"""The first of the rows before the latest ones."""


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("clean") / "repo", rows())


@pytest.fixture
def repo(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "repo"))


def causes(report: AuditReport) -> set[str]:
    assert not [error for view in report.views for error in view.errors]
    return {finding.cause for _, finding in report.findings}


def test_a_clean_repository_has_no_findings_and_stays_as_it_is(repo: Path) -> None:
    before = digest(repo)
    report = audit(repo)
    report.require()
    assert (report.passed, report.mend, digest(repo)) == (True, "", before)
    (view,) = report.views
    assert (view.rows, view.keys, view.compared, view.rows_in, view.rows_out) == (200, KEYS, 3 * KEYS, 120, 120)
    assert {name: count["differing"] for name, count in view.features.items()} == {"trips": 0, "rate": 0, "name": 0}


# --- the ten faults


def _late_ttl(repo: Path) -> None:
    change(repo, "UPDATE TABLE SET event_ts = event_ts + 600 WHERE entity_key = ?", key_bytes(3))


def _rounded(repo: Path) -> None:
    rewrite(repo, lambda data: data.assign(trips=data["trips"].where(data["driver"] != 3, 2**53 + 1)))
    put(repo, 3, "trips", int64_val=2**53)
    # The latest rows alone: earlier ones are not online.


def _duplicate(repo: Path) -> None:
    rewrite(repo, lambda data: pd.concat([data, data.tail(1)]))


def _missing(repo: Path) -> None:
    change(repo, "DELETE FROM TABLE WHERE entity_key = ?", key_bytes(3))


def _zone(repo: Path) -> None:
    change(repo, "UPDATE TABLE SET event_ts = event_ts - 7200")


def _stale(repo: Path) -> None:
    later = {"event_timestamp": now() - timedelta(minutes=5), "created": now(), "rate": 7.0}
    rewrite(repo, lambda data: pd.concat([data, data.tail(1).assign(**later)]))


def _tie(repo: Path) -> None:
    rewrite(repo, lambda data: pd.concat([data, data.tail(1).assign(rate=7.0)]))


def _null(repo: Path) -> None:
    latest = pd.read_parquet(repo / "rows.parquet").tail(KEYS)
    put(repo, int(latest[latest["name"].isna()]["driver"].iloc[0]), "name", string_val="")


def _expired(repo: Path) -> None:
    late = timedelta(days=3)
    rewrite(repo, lambda data: data.assign(
        event_timestamp=data["event_timestamp"].where(data["driver"] != 3, data["event_timestamp"] - late),
        created=data["created"].where(data["driver"] != 3, data["created"] - late),
    ))  # fmt: skip
    change(repo, "UPDATE TABLE SET event_ts = event_ts - 259200 WHERE entity_key = ?", key_bytes(3))


def _another(repo: Path) -> None:
    statement = (
        "UPDATE TABLE SET value = (SELECT t.value FROM TABLE t WHERE t.entity_key = ? "
        "AND t.feature_name = TABLE.feature_name) WHERE entity_key = ?"
    )
    change(repo, statement, key_bytes(4), key_bytes(3))


FAULTS: dict[str, Callable[[Path], None]] = {
    "late ttl": _late_ttl,
    "rounded": _rounded,
    "duplicate rows": _duplicate,
    "missing key": _missing,
    "wrong time zone": _zone,
    "stale row": _stale,
    "tie": _tie,
    "null as a value": _null,
    "expired": _expired,
    "another entity's row": _another,
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_is_named_with_its_cause_and_no_other(repo: Path, cause: str) -> None:
    FAULTS[cause](repo)
    before = digest(repo)
    report = audit(repo)
    assert (causes(report), digest(repo)) == ({cause}, before)
    with pytest.raises(GateFailed, match=cause):
        report.require()
    for _, finding in report.findings:
        assert 1 <= len(finding.examples) <= 3
        for example in finding.examples:
            eval(example.check, {"feast": feast, "pandas": pd})  # noqa: S307 - the line works as it stands
    assert html.escape(cause) in page(report)
    json.dumps(report.as_dict(), default=str)


def test_an_integer_that_went_through_pandas_is_rounded(tmp_path: Path) -> None:
    """Feast's own materialization does this to a column of large integers with nulls."""
    data = rows(1)
    data["trips"] = pd.array([None, 2**53 + 1, *range(2, KEYS)], "Int64")
    report = audit(build(tmp_path / "repo", data))
    assert causes(report) == {"rounded"}
    ((_, finding),) = report.findings
    (example,) = finding.examples
    assert (example.key, example.source, example.online) == ({"driver": 1}, 2**53 + 1, 2**53)
    assert "batch_engine: isthmus.feast.IsthmusComputeEngine" in report.mend


def test_a_row_that_was_pushed_past_the_source_is_unknown(repo: Path) -> None:
    change(repo, "UPDATE TABLE SET event_ts = event_ts + 300 WHERE entity_key = ?", key_bytes(3))
    put(repo, 3, "rate", double_val=7.0)
    put(repo, 5, "rate", double_val=7.0)
    change(repo, "DELETE FROM TABLE WHERE entity_key = ? AND feature_name = ?", key_bytes(6), "trips")
    found = {finding.cause: finding for _, finding in audit(repo).findings}
    drivers = {cause: finding.examples[0].key["driver"] for cause, finding in found.items()}
    assert drivers == {"unknown row": 3, "other value": 5, "missing feature": 6}


def test_a_damaged_value_is_a_difference(repo: Path) -> None:
    statement = "UPDATE TABLE SET value = ? WHERE entity_key = ? AND feature_name = 'rate'"
    change(repo, statement, b"\xff", key_bytes(3))
    report = audit(repo)
    assert causes(report) == {"other value"}
    assert report.views[0].findings[0].examples[0].online == b"\xff"
    assert run("audit", str(repo), "--json").returncode == 1


# --- the other stores


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    client = Redis(port=port)
    with redis_server(tmp_path_factory.mktemp("redis"), "--port", str(port), client=client):
        yield f"redis://localhost:{port}"


def test_redis(tmp_path: Path, redis_url: str) -> None:
    address = redis_url.removeprefix("redis://")
    repo = build(tmp_path / "repo", rows(), online=f'{{type: redis, connection_string: "{address}"}}')
    with Redis.from_url(redis_url) as client:
        assert audit(repo).passed
        client.delete(key_bytes(3) + b"prod")
        before = {key: client.dump(key) for key in client.scan_iter()}
        report = audit(repo)
        assert {key: client.dump(key) for key in client.scan_iter()} == before
        client.flushall()
    assert (causes(report), report.views[0].compared) == ({"missing key"}, 3 * (KEYS - 1))


def test_a_write_ahead_log_is_read_and_left(repo: Path) -> None:
    writer = sqlite3.connect(repo / "online.db")
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute('DELETE FROM "prod_stats" WHERE entity_key = ?', [key_bytes(3)])
    writer.commit()
    before = digest(repo)
    assert "online.db-wal" in before
    assert (causes(audit(repo)), digest(repo)) == ({"missing key"}, before)
    writer.execute('DELETE FROM "prod_stats"')  # nothing is locked
    writer.close()


def test_a_sample_reads_some_keys_of_both_sides(repo: Path) -> None:
    report = audit(repo, sample=7)
    assert (report.passed, report.views[0].keys, report.views[0].compared) == (True, 7, 21)
    change(repo, "DELETE FROM TABLE")
    assert [finding.count for _, finding in audit(repo, sample=7).findings] == [7]


# --- input that is not as it should be


def _refusal(folder: Path, kind: type[IsthmusError] = IsthmusError) -> str:
    with pytest.raises(kind) as caught:
        audit(folder)
    return str(caught.value)


def test_a_repository_that_cannot_be_read_is_refused(repo: Path) -> None:
    registry, settings = repo / "registry.pb", repo / "feature_store.yaml"
    content, text = registry.read_bytes(), settings.read_text()
    newer = Registry.FromString(content)
    newer.registry_schema_version = "2"
    registry.write_bytes(newer.SerializeToString())
    assert "has schema 2; expected 1, which Feast 0" in _refusal(repo, ConfigurationError)
    registry.write_bytes(content[: len(content) // 2])
    assert "is damaged, or not a registry of Feast" in _refusal(repo, DependencyError)
    registry.unlink()
    assert "registry.pb" in _refusal(repo, DependencyError)
    for path in ("https://me:hunter2@host/registry.pb", "s3://"):
        settings.write_text(text.replace("registry.pb", path))
        assert "hunter2" not in _refusal(repo)
    settings.write_text("project: a\n password: [hunter2")
    assert "hunter2" not in _refusal(repo, ConfigurationError)
    settings.unlink()
    assert "feature_store.yaml: is missing" in _refusal(repo, ConfigurationError)


def test_a_repository_without_views_does_not_pass(repo: Path) -> None:
    registry = Registry.FromString((repo / "registry.pb").read_bytes())
    del registry.feature_views[:]
    (repo / "registry.pb").write_bytes(registry.SerializeToString())
    report = audit(repo)
    assert not report.passed
    with pytest.raises(DependencyError, match="has no view with a source"):
        report.require()


def test_a_registry_of_a_newer_feast_is_read_with_a_note(repo: Path) -> None:
    with (repo / "registry.pb").open("ab") as file:
        file.write(b"\xc0\x0c\x01")  # field 200
    report = audit(repo)
    assert report.passed
    assert "A newer Feast wrote the registry" in report.notes[0]


@pytest.mark.parametrize("online", [
    '{type: redis, connection_string: "localhost:1,password=hunter2"}',
    "{type: postgres, host: localhost, port: 1, user: hunter2, password: hunter2}", "{type: nosuch.Store}",
])  # fmt: skip
def test_a_store_that_cannot_be_reached_is_said_without_secrets(repo: Path, online: str) -> None:
    settings = repo / "feature_store.yaml"
    settings.write_text(settings.read_text().replace("{type: sqlite, path: online.db}", online))
    report = audit(repo)
    (error,) = report.views[0].errors
    assert "view stats, online store: cannot be read" in error
    assert "hunter2" not in json.dumps(report.as_dict(), default=str) + page(report)
    assert report.views[0].rows_out == 120  # the offline side is still compared
    with pytest.raises(DependencyError, match="not everything could be compared"):
        report.require()


def test_a_registry_in_sql_is_read_and_left(repo: Path) -> None:
    file = repo / "registry.sqlite"
    content = (repo / "feature_store.yaml").read_text()
    section = f'{{registry_type: sql, path: "sqlite:///{file}", cache_ttl_seconds: 0}}'
    views = feast.FeatureStore(repo_path=str(repo)).list_feature_views()
    (repo / "feature_store.yaml").write_text(content.replace("registry.pb", section))
    feast.FeatureStore(repo_path=str(repo)).apply([DRIVER, *views])
    (repo / "registry.pb").unlink()
    before = digest(repo)
    report = audit(repo)
    assert (report.passed, report.views[0].compared, digest(repo)) == (True, 3 * KEYS, before)


def test_other_views_go_on(tmp_path: Path) -> None:
    """Composite keys, no entity, a source that is a query, a file that is gone, and a view that is only offline."""
    repo = build(tmp_path / "repo", rows())
    store = feast.FeatureStore(repo_path=str(repo))
    moments = [now() - timedelta(minutes=30)] * 4
    both = pd.DataFrame({"driver": [1, 1, 11, 2], "city": ["1", "11", "1", "é"], "visits": range(4)})
    both.assign(event_timestamp=moments).to_parquet(repo / "both.parquet")

    def table(name: str, **more: Any) -> FileSource:
        return FileSource(name=name, path=f"{name}.parquet", timestamp_field="event_timestamp", **more)

    visits, driver, city = (feast.Field(name=name, dtype=dtype) for name, dtype in
                            (("visits", ft.Int64), ("driver", ft.Int64), ("city", ft.String)))  # fmt: skip
    views = [
        feast.FeatureView(name="pairs", entities=[DRIVER, CITY], schema=[driver, city, visits], source=table("both")),
        feast.FeatureView(name="world", entities=[], schema=[visits], source=table("both")),
        feast.FeatureView(name="gone", entities=[DRIVER], schema=[driver, visits], source=table("later")),
        feast.FeatureView(
            name="offline", entities=[DRIVER], schema=[driver, visits], source=table("both"), online=False
        ),
    ]
    (repo / "later.parquet").write_bytes((repo / "both.parquet").read_bytes())
    store.apply([DRIVER, CITY, *views])
    (repo / "later.parquet").unlink()
    query = BigQuerySource(name="asked", query="SELECT 1", timestamp_field="event_timestamp")
    asks = feast.FeatureView(name="asks", entities=[DRIVER], schema=[driver, visits], source=query)
    store.registry.apply_feature_view(asks, "prod")
    for name in ("pairs", "world"):
        store.materialize(now() - DAY, now(), [name])
    unusable = both.assign(event_timestamp=moments, city=None)
    pd.concat([pd.read_parquet(repo / "both.parquet"), unusable]).to_parquet(repo / "both.parquet")
    report = audit(repo)
    found = {view.name: view for view in report.views}
    assert [*found] == ["asks", "gone", "offline", "pairs", "stats", "world"]
    assert "has a BigQuerySource, which the offline store dask does not read" in found["asks"].errors[0]
    assert "nothing at" in found["gone"].errors[0]
    assert not any(found[name].errors for name in ("offline", "pairs", "stats"))
    assert (found["stats"].compared, found["pairs"].compared, found["offline"].compared) == (120, 4, 0)
    assert (found["pairs"].findings, found["stats"].findings) == ([], [])
    assert found["world"].keys == 1
    assert {finding.cause for finding in found["world"].findings} == {"tie"}
    change(repo, 'UPDATE "prod_pairs" SET value = ? WHERE entity_key = (SELECT max(entity_key) FROM "prod_pairs")',
           Value(int64_val=9).SerializeToString())  # fmt: skip
    ((view, finding),) = [(view, finding) for view, finding in audit(repo, views=["pairs"]).findings]
    assert (view.name, finding.cause, set(finding.examples[0].key)) == ("pairs", "other value", {"driver", "city"})
    with pytest.raises(ConfigurationError, match=r"pears: is not a view \(did you mean pairs\?\)"):
        audit(repo, views=["pears"])


# --- the command


def test_the_command_has_a_page_a_document_and_an_exit_code(repo: Path) -> None:
    done = run("audit", str(repo), "--json")
    document = strictly(done.stdout)
    assert (done.returncode, document["passed"], document["views"]["stats"]["findings"]) == (0, True, [])
    _stale(repo)
    _expired(repo)
    done = run("audit", str(repo), "--html", str(repo.parent / "page.html"))
    assert (done.returncode, "stale row" in done.stdout, "2 findings" in done.stdout) == (1, True, False)
    assert "    feast.FeatureStore(" in done.stdout
    content = (repo.parent / "page.html").read_text()
    for text in (
        "stale row",
        "expired but served",
        "online_store: {type: isthmus.feast.IsthmusOnlineStore",
        "import feast",
    ):
        assert text in content
    (repo / "registry.pb").unlink()
    assert run("audit", str(repo)).returncode == 3


def test_the_settings_mend_what_they_promise(repo: Path, redis_url: str) -> None:
    """With our classes in the same repository, as the page says, the expired value is null and no row is lost."""
    _expired(repo)
    settings = repo / "feature_store.yaml"
    report = audit(repo)
    lines = report.mend.replace("redis://localhost:6379", redis_url)
    assert set(yaml.safe_load(lines)) == {"online_store", "offline_store"}
    settings.write_text(settings.read_text().replace("online_store: {type: sqlite, path: online.db}\n", "") + lines)
    feast.FeatureStore(repo_path=str(repo)).materialize(now() - timedelta(days=900), now())
    after = audit(repo)
    assert causes(after) == set()
    assert (after.online_store, after.views[0].rows_in, after.views[0].rows_out) == (
        "isthmus.feast.IsthmusOnlineStore", 120, 120,
    )  # fmt: skip


# --- the encoding


NUMBERS = [None, 0, 1, -1, 127, 128, 2**31 - 1, -(2**31)]
COLUMNS: list[tuple[Any, pa.DataType, list[Any]]] = [
    (ft.Int32, pa.int32(), NUMBERS),
    (ft.Int64, pa.int64(), [*NUMBERS, 2**63 - 1, -(2**63), 2**53 + 1]),
    (ft.Float32, pa.float32(), [None, 0.0, -0.0, 0.1, float("inf")]),
    (ft.Float64, pa.float64(), [None, 0.0, -0.0, 0.1, float("-inf")]),
    (ft.Bool, pa.bool_(), [None, True, False]),
    (ft.String, pa.string(), [None, "", "é", "x" * 300]),
    (ft.Bytes, pa.binary(), [None, b"", b"\x00", b"x" * 70_000]),
    (ft.Array(ft.Float32), pa.list_(pa.float32()), [None, [], [0.5, -1.0]]),
]


@pytest.mark.parametrize(("dtype", "kind", "values"), COLUMNS, ids=str)
def test_values_are_encoded_as_feast_writes_them(dtype: Any, kind: pa.DataType, values: list[Any]) -> None:
    column = pa.chunked_array([pa.array(values, kind)])
    encoded = encoding.encode(column, dtype, "").to_pylist()
    protos = python_values_to_proto_values(column.to_pylist(), dtype.to_value_type())
    assert encoded == [proto.SerializeToString() for proto in protos]


@given(drivers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), city=st.text(max_size=5))
def test_keys_are_encoded_as_feast_writes_them(drivers: list[int], city: str) -> None:
    columns = {
        "driver": (pa.chunked_array([pa.array(drivers, pa.int64())]), ft.Int64),
        "city": (pa.chunked_array([pa.array([city] * len(drivers))]), ft.String),
    }
    expected = [serialize_entity_key(entity_key(driver=driver, city=city), 3) for driver in drivers]
    assert encoding.entity_keys(columns, "").to_pylist() == expected
