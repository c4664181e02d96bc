"""Feast's own SDK over our offline store: the naive join is the oracle, and Feast's defects stay Feast's."""

import itertools
import threading
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.fs as fs
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.contract.schema import Contract
from isthmus.features.definition.compile import compile_contract
from isthmus.features.definition.spec import Entity, FeatureView, Field, Source
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, DependencyError, RequestError
from isthmus.features.feast import registry
from isthmus.features.feast.files import filesystem_of
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import point_in_time
from isthmus.features.types import Bool, Float32, Int64, String
from tests.features.feast_project import CITY, DRIVER, OFFLINE, REGISTRY, STRICT, repository, source, view
from tests.features.support import join_naively, make_view, same_bits, table, times, values_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import feast
    import feast.types as ft
    from feast.data_format import DeltaFormat
    from feast.data_source import PushMode
    from feast.errors import (
        EntityTimestampInferenceException,
        FeastEntityDFMissingColumnsError,
        FeastJoinKeysDuringMaterialization,
        FeatureNameCollisionError,
        SavedDatasetLocationAlreadyExists,
    )
    from feast.feature_logging import LoggingConfig
    from feast.infra.offline_stores.file_source import FileLoggingDestination, SavedDatasetFileStorage
    from feast.on_demand_feature_view import on_demand_feature_view

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
)

START = datetime(2024, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
ONLINE = "{type: sqlite, path: online.db}"


def at(hours: float) -> datetime:
    return START + hours * HOUR


def hours(*values: float | None) -> list[datetime | None]:
    return [None if value is None else at(value) for value in values]


@pytest.fixture
def store(tmp_path: Path) -> feast.FeatureStore:
    return repository(tmp_path, ONLINE, offline=OFFLINE)


@pytest.fixture
def strict(tmp_path: Path) -> feast.FeatureStore:
    """Rows are visible once they are created, and values have the declared types."""
    return repository(tmp_path, ONLINE, offline=STRICT)


def rows(folder: Path, name: str = "stats", /, **columns: Any) -> pd.DataFrame:
    """Writes the source of a view; true and created in the hours that are given."""
    events = columns.pop("event")
    data = {"event_timestamp": hours(*events), "created": hours(*columns.pop("created", events)), **columns}
    frame = pd.DataFrame(data)
    frame.to_parquet(folder / f"{name}_rows.parquet")
    return frame


def asked(*moments: float, **columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"event_timestamp": pd.to_datetime(hours(*moments)), **columns})


def answer(store: feast.FeatureStore, spine: Any, features: Any, **more: Any) -> dict[str, list[Any]]:
    """The columns that the features add, as Python values."""
    found = store.get_historical_features(spine, features, **more).to_arrow()
    known = set() if spine is None or isinstance(spine, str) else {*spine}
    return {name: found[name].to_pylist() for name in found.column_names if name not in known}


# --- the oracle


FIELDS = {"a": Float32, "b": Int64, "c": String, "d": Bool}
TYPES = {"a": ft.Float32, "b": ft.Int64, "c": ft.String, "d": ft.Bool}
PAIR = [feast.Entity(name=name, join_keys=[name], value_type=CITY.value_type) for name in ("left", "right")]
MOMENTS = st.integers(-4, 4)
NAMES = st.sampled_from(["1", "11", "", "é"])


@pytest.fixture(scope="module", params=[OFFLINE, STRICT], ids=["event", "created"])
def joined(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[feast.FeatureStore, Path, bool]:
    """Three views: one key and a ttl; two keys; two keys and no created timestamp."""
    folder = tmp_path_factory.mktemp("joined")
    store = repository(folder, ONLINE, offline=request.param)
    for name, keys in (("one", {"driver": Int64}), ("two", {"left": String, "right": String})):
        pq.write_table(table(make_view(FIELDS, keys), []), folder / f"{name}_rows.parquet")
    pq.write_table(table(make_view(FIELDS, {"left": String, "right": String}), []), folder / "three_rows.parquet")
    store.apply(
        [DRIVER, *PAIR, _view(folder, "one", [DRIVER], timedelta(microseconds=3)), _view(folder, "two", PAIR),
         _view(folder, "three", PAIR, created=False)]
    )  # fmt: skip
    return store, folder, request.param == OFFLINE


def _view(folder: Path, name: str, entities: list[feast.Entity], ttl: timedelta = timedelta(0), *,
          created: bool = True) -> feast.FeatureView:  # fmt: skip
    made = view(folder, TYPES, entities, name=name, ttl=ttl)
    made.batch_source = feast.FileSource(
        name=f"{name}_rows", path=f"{name}_rows.parquet", timestamp_field="event_timestamp",
        created_timestamp_column="known_at" if created else "",
    )  # fmt: skip
    return made


def _rows(keys: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    key = st.fixed_dictionaries(dict(keys))
    row = st.tuples(key, MOMENTS, MOMENTS, values_of(FIELDS))
    made = row.map(lambda row: {**row[0], "_event": row[1], "_known": row[2], **row[3]})
    return st.lists(made, max_size=8)


@given(
    one=_rows({"driver": st.integers(0, 2)}),
    two=_rows({"left": NAMES, "right": NAMES}),
    three=_rows({"left": NAMES, "right": NAMES}),
    spine=st.lists(st.tuples(MOMENTS, st.integers(0, 2) | st.none(), NAMES, NAMES | st.none()), max_size=8),
)
def test_the_join_through_feasts_api_is_the_time_rule(
    joined: tuple[feast.FeatureStore, Path, bool],
    one: list[dict[str, Any]],
    two: list[dict[str, Any]],
    three: list[dict[str, Any]],
    spine: list[tuple[Any, ...]],
) -> None:
    store, folder, by_event = joined
    for row in three:
        row["_known"] = row["_event"]
    questions = pa.table(
        {
            "event_timestamp": times([row[0] for row in spine]),
            "driver": pa.array([row[1] for row in spine], pa.int64()),
            "left": pa.array([row[2] for row in spine], pa.string()),
            "right": pa.array([row[3] for row in spine], pa.string()),
        }
    )
    expected = questions
    pair = {"left": String, "right": String}
    for name, keys, found in (("one", {"driver": Int64}, one), ("two", pair, two), ("three", pair, three)):
        contract = make_view(FIELDS, keys, 3 if name == "one" else None, name)
        history = table(contract, found)
        pq.write_table(history.drop(["content_hash"]), folder / f"{name}_rows.parquet")
        if by_event:
            history = _visible_at_once(history)
        expected = join_naively(expected, ViewHistory(contract, history, 0)).drop([f"{name}__status"])
    features = [f"{name}:{feature}" for name in ("one", "two", "three") for feature in FIELDS]
    result = store.get_historical_features(questions, features, full_feature_names=True).to_arrow()
    assert same_bits(result, expected)
    # A feature asked for alone is of the same row as all of them together.
    alone = store.get_historical_features(questions, ["two:b"], full_feature_names=True).to_arrow()
    assert alone["two__b"].to_pylist() == expected["two__b"].to_pylist()


def _visible_at_once(history: pa.Table) -> pa.Table:
    """Rows that are visible at their event; those of one event in the order of created time and content."""
    order = history.append_column("n", pa.array(np.arange(len(history)))).sort_by(
        [("known_at", "ascending"), ("content_hash", "ascending")]
    )["n"]
    ranks = np.empty(len(order), np.int64)
    ranks[order.to_numpy()] = np.arange(len(order))
    for name, column in (("known_at", history["event_timestamp"]), ("content_hash", pa.array(ranks))):
        history = history.set_column(history.column_names.index(name), name, column)
    return history


# --- what Feast's stores do wrong


def test_no_row_is_lost_and_duplicates_stay_in_their_order(store: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, driver=[1, 2], event=[0, 0], trips=[10, 20])
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64}, ttl=2 * HOUR)])
    spine = asked(1, 3, 1, 2, 1, -1, driver=[2, 2, 9, 1, 2, 1])
    spine["label"] = range(6)
    found = store.get_historical_features(spine, ["stats:trips"]).to_df()
    assert found["label"].tolist() == list(range(6))
    assert found["trips"].astype("Int64").tolist() == [20, pd.NA, pd.NA, 10, 20, pd.NA]
    pd.testing.assert_frame_equal(found[list(spine)], spine, check_dtype=False)


def test_exactly_ttl_old_is_valid(store: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, driver=[1], event=[0], trips=[10])
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64}, ttl=2 * HOUR)])
    spine = asked(2, 2, driver=[1, 1])
    spine.loc[1, "event_timestamp"] += pd.Timedelta(microseconds=1)
    assert answer(store, spine, ["stats:trips"]) == {"trips": [10, None]}


def test_composite_keys_do_not_collide(store: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, left=["1", "11"], right=["11", "1"], event=[0, 0], trips=[1, 2])
    store.apply([*PAIR, view(tmp_path, {"trips": ft.Int64}, PAIR)])
    spine = asked(1, 1, 1, left=["11", "1", "111"], right=["1", "11", ""])
    assert answer(store, spine, ["stats:trips"]) == {"trips": [2, 1, None]}


def test_ties_multiply_nothing_and_depend_on_no_order(store: feast.FeatureStore, tmp_path: Path) -> None:
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64, "rate": ft.Float64})])
    found = set()
    for order in itertools.permutations(range(3)):
        trips, rates = [1, 2, 3], [0.1, 0.2, 0.3]
        rows(tmp_path, driver=[1] * 3, event=[0] * 3, trips=[trips[n] for n in order], rate=[rates[n] for n in order])
        both = answer(store, asked(1, driver=[1]), ["stats:trips", "stats:rate"])
        alone = answer(store, asked(1, driver=[1]), ["stats:rate"])
        assert alone["rate"] == both["rate"]
        found.add((*both["trips"], *both["rate"]))
    assert len(found) == 1
    assert found < {(1, 0.1), (2, 0.2), (3, 0.3)}


def test_a_row_that_was_created_late_does_not_leak(strict: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, driver=[1, 1], event=[0, 1], created=[0, 5], trips=[1, 2])
    strict.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    spine = asked(0.5, 4.9, 5, driver=[1, 1, 1])
    assert answer(strict, spine, ["stats:trips"]) == {"trips": [1, 1, 2]}


def test_of_one_event_the_correction_counts(strict: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, driver=[1, 1], event=[0, 0], created=[3, 0], trips=[2, 1])
    strict.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    assert answer(strict, asked(2, 3, driver=[1, 1]), ["stats:trips"]) == {"trips": [1, 2]}


def test_a_backfilled_source_is_read_as_feast_reads_it(store: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, driver=[1, 1, 1], event=[0, 1, 1], created=[99, 98, 97], trips=[1, 2, 3])
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    spine = asked(0.5, 1, 98, driver=[1, 1, 1])
    assert answer(store, spine, ["stats:trips"]) == {"trips": [1, 2, 2]}
    cut = answer(store, spine, ["stats:trips"], filter_by_created_timestamp=True)
    assert cut == {"trips": [None, None, 2]}


def test_rows_that_nobody_sees_are_counted(
    store: feast.FeatureStore, strict: feast.FeatureStore, tmp_path: Path
) -> None:
    rows(tmp_path, driver=[1, 1, 1, 1], event=[0, 1, 1, 9], created=[99, 98, 2, 100], trips=[1, 2, 3, 4])
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    said = r"view stats: 2 of \d rows are hidden: they were created after .* 2024-01-01 08:00:00.*known_at: event"
    for asks, more in ((strict, {}), (store, {"filter_by_created_timestamp": True})):
        with pytest.warns(UserWarning, match=said):
            assert answer(asks, asked(3, 8, driver=[1, 1]), ["stats:trips"], **more) == {"trips": [3, 3]}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "view stats")
        assert answer(store, asked(3, driver=[1]), ["stats:trips"]) == {"trips": [2]}
        assert answer(strict, asked(100, driver=[1]), ["stats:trips"]) == {"trips": [4]}


def test_the_values_are_those_of_feasts_duckdb_rule_where_it_is_right(tmp_path: Path) -> None:
    """One row per key and hour, created at once: there Feast's own file store answers right, if nothing is missing."""
    random = np.random.default_rng(7)
    size = 2000
    data = {
        "driver": random.integers(0, 50, size),
        "event": random.permutation(size) / 100,
        "rate": random.random(size),
    }
    answers = []
    for name, offline in (("ours", OFFLINE), ("theirs", "{type: dask}")):
        folder = tmp_path / name
        store = repository(folder, ONLINE, offline=offline)
        rows(folder, **data)
        store.apply([DRIVER, view(folder, {"rate": ft.Float64})])
        spine = asked(*(np.arange(200) / 10 + 5.001), driver=np.arange(200) % 50)
        found = store.get_historical_features(spine, ["stats:rate"]).to_df()
        answers.append(found.dropna().sort_values(["event_timestamp", "driver"])["rate"].tolist())
    assert answers[0] == answers[1]
    assert len(answers[0]) > 190


# --- what is expected of any store


def _shop(folder: Path, store: feast.FeatureStore) -> dict[str, Any]:
    rows(folder, driver=[1, 2], event=[0, 0], rate=np.array([0.5, 0.25], np.float32), trips=[10, 20])
    rows(folder, "place", city=["x", "y"], event=[0, 1], sun=[1.5, 2.5])
    rows(folder, "world", event=[0, 2], day=["monday", "tuesday"])
    stats = view(folder, {"rate": ft.Float32, "trips": ft.Int64})
    place = view(folder, {"sun": ft.Float64}, [CITY], name="place")
    world = view(folder, {"day": ft.String}, [], name="world")
    wish = feast.RequestSource(name="wish", schema=[feast.Field(name="more", dtype=ft.Int64)])

    @on_demand_feature_view(sources=[stats, wish], schema=[feast.Field(name="total", dtype=ft.Int64),
                                                           feast.Field(name="less", dtype=ft.Int64)])  # type: ignore[untyped-decorator]  # so in Feast  # fmt: skip
    def total(inputs: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame({"total": inputs["trips"] + inputs["more"], "less": inputs["trips"] - inputs["more"]})

    store.apply([DRIVER, CITY, stats, place, world, total])
    return {"stats": stats, "place": place, "world": world, "total": total}


def test_views_aliases_join_keys_and_views_on_demand_together(store: feast.FeatureStore, tmp_path: Path) -> None:
    views = _shop(tmp_path, store)
    spine = asked(1, 3, 3, driver=[1, 2, 9], city=["x", "y", "x"], home=["y", "x", "x"])
    spine["more"] = [1, 2, 3]
    home = views["place"].with_name("origin").with_join_key_map({"city": "home"})
    service = feast.FeatureService(
        name="all",
        features=[
            views["stats"][["rate"]],
            views["place"].with_name("here"),
            home,
            views["world"],
            views["total"][["total"]],
        ],
    )
    store.apply([service])
    found = answer(store, spine, service, full_feature_names=True)
    assert found.pop("total__total")[:2] == [11, 22]
    found.pop("stats__trips")
    assert found == {
        "stats__rate": [0.5, 0.25, None],
        "here__sun": [1.5, 2.5, 1.5],
        "origin__sun": [2.5, 1.5, 1.5],
        "world__day": ["monday", "tuesday", "tuesday"],
    }
    short = answer(store, spine[:2], ["total:total", "world:day", "stats:rate"])
    assert {**short, "trips": None} == {
        "day": ["monday", "tuesday"], "rate": [0.5, 0.25], "trips": None, "total": [11, 22],
    }  # fmt: skip
    with pytest.raises(FeatureNameCollisionError):
        store.get_historical_features(spine, ["place:sun", "place:sun"])


def test_columns_of_the_source_under_other_names(store: feast.FeatureStore, tmp_path: Path) -> None:
    pd.DataFrame({"drv": [1, 1], "ts": hours(0, 1), "made": hours(0, 1), "n": [1, 2]}).to_parquet(
        tmp_path / "raw.parquet"
    )
    raw = feast.FileSource(
        path="raw.parquet", timestamp_field="when", created_timestamp_column="made",
        field_mapping={"drv": "driver", "n": "trips", "ts": "when"},
    )  # fmt: skip
    schema = [feast.Field(name="driver", dtype=ft.Int64), feast.Field(name="trips", dtype=ft.Int64)]
    store.apply([DRIVER, feast.FeatureView(name="stats", entities=[DRIVER], schema=schema, source=raw)])
    assert answer(store, asked(0.5, 1, driver=[1, 1]), ["stats:trips"]) == {"trips": [1, 2]}


def test_the_spine_may_be_a_query(store: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, driver=[1, 2], event=[0, 0], trips=[10, 20])
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    asked(1, 2, -1, driver=[2, 1, 1]).rename(columns={"event_timestamp": "ts"}).to_parquet(tmp_path / "orders.parquet")
    query = "SELECT driver, ts AS event_timestamp FROM 'orders.parquet' ORDER BY ts"
    assert answer(store, query, ["stats:trips"])["trips"] == [None, 20, 10]
    for wrong in ("SELECT nothing FROM 'orders.parquet'", "SELECT 1 +"):
        with pytest.raises(DataError, match="the query fails"):
            store.get_historical_features(wrong, ["stats:trips"])


def test_without_a_spine_every_moment_of_every_key_answers_once(strict: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, driver=[1, 1, 1, 2, 1], event=[1, 2, 3, 2, 1.5], created=[1, 2, 3, 2, 4], trips=[1, 2, 3, 4, 5])
    rows(tmp_path, "other", driver=[1, 1], event=[0, 2], score=[0.5, 0.75])
    rows(tmp_path, "world", event=[0], day=["monday"])
    world = view(tmp_path, {"day": ft.String}, [], name="world")
    other = view(tmp_path, {"score": ft.Float64}, name="other")
    strict.apply([DRIVER, view(tmp_path, {"trips": ft.Int64}), other, world])
    features = ["stats:trips", "other:score", "world:day"]
    found = strict.get_historical_features(None, features, start_date=at(1), end_date=at(4)).to_df()
    assert found.values.tolist() == [
        [1, pd.Timestamp(at(1)), 1, 0.5, "monday"],
        [1, pd.Timestamp(at(2)), 2, 0.75, "monday"],
        [2, pd.Timestamp(at(2)), 4, pytest.approx(float("nan"), nan_ok=True), "monday"],
        [1, pd.Timestamp(at(3)), 3, 0.75, "monday"],
        [1, pd.Timestamp(at(4)), 3, 0.75, "monday"],
    ]
    job = strict.get_historical_features(None, features, start_date=at(1), end_date=at(4))
    assert job.metadata is not None
    assert (job.metadata.min_event_timestamp, job.metadata.max_event_timestamp) == (at(1), at(4))
    assert job.metadata.keys == ["driver"]
    # Whoever asks has not read anything yet.
    (tmp_path / "stats_rows.parquet").unlink()
    job = strict.get_historical_features(None, features, start_date=at(1), end_date=at(4))
    with pytest.raises(DataError, match="source stats_rows: nothing at"):
        job.to_df()
    rows(tmp_path, driver=[1], event=[1], trips=[1])
    rows(tmp_path, "place", city=["x"], event=[0], sun=[1.5])
    strict.apply([CITY, view(tmp_path, {"sun": ft.Float64}, [CITY], name="place")])
    with pytest.raises(RequestError, match="only some views have the key"):
        strict.get_historical_features(None, ["stats:trips", "place:sun"], start_date=at(0), end_date=at(1))


def test_without_a_spine_a_snapshot_is_that_of_feasts_dask_store(tmp_path: Path) -> None:
    rows(tmp_path, driver=[1, 1, 1, 2, 3], event=[1, 2, 5, -30, 0], trips=[1, 2, 3, 4, 5])
    answers = []
    for offline in (OFFLINE.replace("}", ", without_entities: snapshot}"), "{type: dask}"):
        store = repository(tmp_path, ONLINE, offline=offline)
        store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64}, ttl=timedelta(hours=24))])
        found = store.get_historical_features(None, ["stats:trips"], start_date=at(1), end_date=at(4)).to_df()
        answers.append(found[["driver", "event_timestamp", "trips"]].sort_values("driver").values.tolist())
    assert answers[0] == answers[1] == [[1, pd.Timestamp(at(4)), 2], [3, pd.Timestamp(at(4)), 5]]


def test_versions_of_a_view_have_the_names_that_feast_gives_them(tmp_path: Path) -> None:
    rows(tmp_path, driver=[1], event=[1], trips=[1], code=["x"])
    registry = REGISTRY.format(folder=tmp_path).replace("}", ", enable_online_feature_view_versioning: true}")
    answers = []
    for offline in (OFFLINE, "{type: dask}"):
        store = repository(tmp_path, ONLINE, offline=offline, registry=registry)
        for schema in ({"trips": ft.Int64}, {"code": ft.String}):
            store.apply([DRIVER, view(tmp_path, schema)])
        features = ["stats@v0:trips", "stats@v1:code"]
        answers.append(answer(store, asked(2, driver=[1]), features, full_feature_names=True))
    assert answers[0] == answers[1] == {"stats@v0__trips": [1], "stats@v1__code": ["x"]}


def test_values_have_the_types_of_the_source_or_those_that_the_view_declares(tmp_path: Path) -> None:
    fields = {
        "f": ft.Float32,
        "i": ft.Int32,
        "t": ft.UnixTimestamp,
        "l": ft.Array(ft.Float32),
        "m": ft.Map,
        "c": ft.String,
    }
    pa_rows = pa.table(
        {
            "driver": pa.array([1, 1], pa.int32()),
            "event_timestamp": pa.array([0, 1], pa.timestamp("ms")),
            "created": pa.array([0, 1], pa.timestamp("ns", "Europe/Berlin")),
            "f": pa.array([0.1, None], pa.float64()),
            "i": pa.array([7.0, None], pa.float64()),
            "t": pa.array([1, None], pa.timestamp("s")),
            "l": pa.array([[0.1], []], pa.large_list(pa.float64())),
            "m": pa.array([{"k": 1}, None], pa.struct([("k", pa.int64())])),
            "c": pa.array(["x", "y"]).dictionary_encode(),
        }
    )
    pq.write_table(pa_rows, tmp_path / "stats_rows.parquet")
    store, declared = (repository(tmp_path, ONLINE, offline=offline) for offline in (OFFLINE, STRICT))
    store.apply([DRIVER, view(tmp_path, fields)])
    spine = pd.DataFrame({"driver": [1.0, np.nan], "event_timestamp": [pd.Timestamp("1970-01-01")] * 2})
    as_stored = store.get_historical_features(spine, [f"stats:{name}" for name in fields]).to_arrow()
    stored = pq.read_table(tmp_path / "stats_rows.parquet")
    assert {name: as_stored[name].type for name in fields} == {name: stored[name].type for name in fields}
    assert as_stored["f"].to_pylist() == [0.1, None]
    found = declared.get_historical_features(spine, [f"stats:{name}" for name in fields]).to_arrow()
    assert found["f"].to_pylist() == [float(np.float32(0.1)), None]
    assert found["i"].type == pa.int32()
    assert found["t"].to_pylist() == [datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), None]
    assert found["l"].to_pylist() == [[float(np.float32(0.1))], None]
    assert found["m"].to_pylist() == [{"k": 1}, None]
    assert found["c"].to_pylist() == ["x", None]


@pytest.mark.parametrize("name", ["set.parquet", "set", "set_delta"])
def test_saved_datasets(store: feast.FeatureStore, tmp_path: Path, name: str) -> None:
    _shop(tmp_path, store)
    spine = asked(1, 3, 1, driver=[1, 2, 1])
    spine["more"] = [1, 2, 1]
    job = store.get_historical_features(spine, ["stats:rate", "total:total"])
    form: Any = {"file_format": DeltaFormat()} if "delta" in name else {}
    storage = SavedDatasetFileStorage(path=str(tmp_path / name), **form)
    made = store.create_saved_dataset(job, "training", storage)
    assert len(made.to_df()) == 3
    again = store.get_saved_dataset("training").to_df()
    assert sorted(again["rate"].tolist()) == [0.25, 0.5, 0.5]
    assert sorted(again["total"].tolist()) == [11, 11, 22]
    with pytest.raises(SavedDatasetLocationAlreadyExists):
        store.create_saved_dataset(job, "training", storage)
    store.create_saved_dataset(job, "training", storage, allow_overwrite=True)
    assert len(store.get_saved_dataset("training").to_df()) == 3
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".set")]


def test_a_saved_dataset_overwrites_no_source(store: feast.FeatureStore, tmp_path: Path) -> None:
    views = _shop(tmp_path, store)
    before = (tmp_path / "stats_rows.parquet").read_bytes()
    job = store.get_historical_features(asked(1, driver=[1]), ["stats:rate"])
    with pytest.raises(SavedDatasetLocationAlreadyExists):
        store.create_saved_dataset(job, "set", SavedDatasetFileStorage.from_data_source(views["stats"].batch_source))
    assert (tmp_path / "stats_rows.parquet").read_bytes() == before


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fs.FileSystem:
    """What Feast finds at `s3://shop/`: a folder."""
    (tmp_path / "remote" / "shop").mkdir(parents=True)
    found = fs.SubTreeFileSystem(str(tmp_path / "remote"), fs.LocalFileSystem())
    feasts = feast.FileSource.create_filesystem_and_path

    def opened(path: str, *more: Any, **options: Any) -> tuple[Any, str]:
        return (found, path.removeprefix("s3://")) if path.startswith("s3://") else feasts(path, *more, **options)

    monkeypatch.setattr(feast.FileSource, "create_filesystem_and_path", opened)
    return found


def test_a_remote_folder_is_saved_to_unless_other_rows_would_stay(
    store: feast.FeatureStore, tmp_path: Path, bucket: fs.FileSystem
) -> None:
    _shop(tmp_path, store)
    bucket.create_dir("shop/set")
    job = store.get_historical_features(asked(1, 3, driver=[1, 1]), ["stats:rate"])
    assert filesystem_of(source(tmp_path), "s3://shop/set/") == (bucket, "shop/set")
    for path in ("s3://shop/set", "s3://shop/set/"):
        job.persist(SavedDatasetFileStorage(path=path), allow_overwrite=True)
        assert len(pq.read_table("shop/set", filesystem=bucket)) == 2
        with pytest.raises(SavedDatasetLocationAlreadyExists):
            job.persist(SavedDatasetFileStorage(path=path))
    # As Feast's own stores write it.
    pq.write_to_dataset(pa.table({"a": [1]}), "shop/other", filesystem=bucket)
    with pytest.raises(RequestError, match=r"s3://shop/other: holds other files, .*\.parquet, which would stay"):
        job.persist(SavedDatasetFileStorage(path="s3://shop/other"), allow_overwrite=True)
    assert pq.read_table("shop/other", filesystem=bucket).to_pydict() == {"a": [1]}


# --- writing


def _like(folder: Path, form: str) -> feast.FileSource:
    """An empty source of each form."""
    schema = pa.schema(
        [("driver", pa.int32()), ("event_timestamp", pa.timestamp("us")), ("rate", pa.float32()),
         ("created", pa.timestamp("us", "UTC"))]
    )  # fmt: skip
    path = folder / {"file": "some.parquet", "folder": "some", "delta": "delta"}[form]
    if form == "delta":
        write_deltalake(path, schema.empty_table().cast(pa.schema([
            field.with_type(pa.timestamp("us", "UTC")) if pa.types.is_timestamp(field.type) else field
            for field in schema])))  # fmt: skip
    else:
        path.mkdir() if form == "folder" else None
        pq.write_table(schema.empty_table(), path / "0.parquet" if form == "folder" else path)
    return feast.FileSource(
        name="some", path=str(path), timestamp_field="event_timestamp", created_timestamp_column="created",
        file_format=DeltaFormat() if form == "delta" else None,
    )  # fmt: skip


@pytest.mark.parametrize("form", ["file", "folder", "delta"])
def test_rows_that_are_written_are_found(store: feast.FeatureStore, tmp_path: Path, form: str) -> None:
    stats = view(tmp_path, {"rate": ft.Float32})
    stats.batch_source = _like(tmp_path, form)
    store.apply([DRIVER, stats])
    spine = asked(3, 4, 5, driver=[1, 1, 1])
    assert answer(store, spine, ["stats:rate"]) == {"rate": [None] * 3}
    for hour, rate in ((3, 0.5), (5, 0.25)):
        # Other order of columns, other types.
        frame = pd.DataFrame({"rate": [rate], "created": [at(0)], "event_timestamp": [at(hour)], "driver": [1]})
        store.write_to_offline_store("stats", frame.set_index(pd.Index([7])))
    assert answer(store, spine, ["stats:rate"]) == {"rate": [0.5, 0.5, 0.25]}
    with pytest.raises(ValueError, match="missing_expected_columns"):
        store.write_to_offline_store("stats", frame.rename(columns={"rate": "other"}))
    with pytest.raises(DataError, match="source some, column driver: a value does not fit"):
        store.write_to_offline_store("stats", frame.assign(driver=[1.5]))
    assert answer(store, spine, ["stats:rate"]) == {"rate": [0.5, 0.5, 0.25]}


@pytest.mark.parametrize("form", ["file", "folder"])
def test_rows_are_appended_to_a_remote_folder_only(
    store: feast.FeatureStore, tmp_path: Path, bucket: fs.FileSystem, form: str
) -> None:
    stats = view(tmp_path, {"rate": ft.Float32})
    path = Path(_like(tmp_path / "remote" / "shop", form).path)
    stats.batch_source = feast.FileSource(
        name="some", path=f"s3://shop/{path.name}", timestamp_field="event_timestamp",
        created_timestamp_column="created",
    )  # fmt: skip
    table = pa.table({"driver": [1], "event_timestamp": [at(3)], "rate": [0.5], "created": [at(0)]})
    provider: Any = store._get_provider()
    if form == "folder":
        for _ in range(2):
            provider.offline_write_batch(store.config, stats, table, None)
        assert len(pq.read_table(f"shop/{path.name}", filesystem=bucket)) == 2
    else:
        before = path.read_bytes()
        with pytest.raises(RequestError, match=r"source some: s3://shop/some.parquet is a single remote file"):
            provider.offline_write_batch(store.config, stats, table, None)
        assert path.read_bytes() == before


def test_pushes_side_by_side_lose_no_row(store: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, driver=[0], event=[0], trips=[0])
    stats = view(tmp_path, {"trips": ft.Int64})
    push = feast.PushSource(name="pushed", batch_source=stats.batch_source)
    schema = [feast.Field(name="driver", dtype=ft.Int64), feast.Field(name="trips", dtype=ft.Int64)]
    store.apply([DRIVER, feast.FeatureView(name="live", entities=[DRIVER], source=push, schema=schema)])

    def some(writer: int) -> None:
        for n in range(5):
            frame = pd.DataFrame(
                {"driver": [writer * 5 + n], "event_timestamp": [at(1)], "created": [at(1)], "trips": [n]}
            )
            store.push("pushed", frame, to=PushMode.OFFLINE)

    writers = [threading.Thread(target=some, args=(n,)) for n in range(1, 5)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = answer(store, asked(*[2] * 20, driver=list(range(5, 25))), ["live:trips"])
    assert found == {"trips": [0, 1, 2, 3, 4] * 4}


def test_logged_features(store: feast.FeatureStore, tmp_path: Path) -> None:
    views = _shop(tmp_path, store)
    logging = LoggingConfig(destination=FileLoggingDestination(path="logs", partition_by=["__log_date"]))
    service = feast.FeatureService(name="logged", features=[views["stats"]], logging_config=logging)
    store.apply([service])
    from feast.feature_logging import FeatureServiceLoggingSource

    schema = FeatureServiceLoggingSource(service, store.project).get_schema(store.registry)
    for hour in (1, 2):
        values: dict[str, Any] = {
            "driver": [1], "stats__rate": [0.5], "stats__trips": [hour], "__log_timestamp": [at(hour)],
            "__log_date": [at(hour).date()], "__request_id": [str(hour)],
        }  # fmt: skip
        columns = {field.name: values.get(field.name, [None]) for field in schema}
        logs = pa.table(columns, schema=schema)
        if hour == 2:
            (tmp_path / "batch").mkdir()
            pq.write_table(logs, tmp_path / "batch" / "0.parquet")
            store.write_logged_features(tmp_path / "batch", service)
        else:
            store.write_logged_features(logs, service)
    provider = store._get_provider()
    job = provider.retrieve_feature_service_logs(service, at(0), at(3), store.config, store.registry)
    assert sorted(job.to_df()["stats__trips"].tolist()) == [1, 2]
    job = provider.retrieve_feature_service_logs(service, at(2), at(3), store.config, store.registry)
    assert job.to_df()["__request_id"].tolist() == ["2"]


def test_the_newest_rows_of_a_source(store: feast.FeatureStore, tmp_path: Path) -> None:
    rows(
        tmp_path,
        driver=[1, 1, 2, 3, 3, 4],
        event=[0, 1, 5, 1, 2, 0],
        created=[0, 1, 5, 3, 2, 2.5],
        trips=list(range(6)),
    )
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    offline: Any = store._get_provider().offline_store

    def newest(start: float | None, end: float | None) -> list[tuple[int, int]]:
        job = offline.pull_latest_from_table_or_query(
            store.config, source(tmp_path, "stats_rows"), ["driver"], ["trips"], "event_timestamp", "created",
            None if start is None else at(start), None if end is None else at(end),
        )  # fmt: skip
        found = job.to_df()
        return list(zip(found["driver"], found["trips"], strict=True))

    assert newest(0, 9) == newest(None, None) == [(1, 1), (2, 2), (3, 4), (4, 5)]
    assert newest(1, 2) == [(1, 1), (3, 4)]
    # What was created between the two times comes, too, though it was true before: nothing else would bring it.
    assert newest(2.2, 2.6) == [(4, 5)]
    with pytest.raises(FeastJoinKeysDuringMaterialization):
        offline.pull_latest_from_table_or_query(
            store.config, source(tmp_path, "stats_rows"), ["nobody"], ["trips"], "event_timestamp", None, at(0), at(1)
        )


# --- bad input


def test_bad_spines(store: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, driver=[1], event=[0], trips=[10])
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    ask: Callable[..., Any] = lambda spine, *features: store.get_historical_features(  # noqa: E731
        spine, list(features) or ["stats:trips"]
    ).to_df()
    spine = asked(1, driver=[1])
    with pytest.raises(EntityTimestampInferenceException):
        ask(spine.drop(columns="event_timestamp"))
    with pytest.raises(EntityTimestampInferenceException):
        ask(spine.rename(columns={"event_timestamp": "a"}).assign(b=spine["event_timestamp"]))
    assert ask(spine.rename(columns={"event_timestamp": "ordered_at"}))["trips"].tolist() == [10]
    with pytest.raises(DataError, match="entity_df, event_timestamp: 1 nulls"):
        ask(spine.assign(event_timestamp=[pd.NaT]))
    with pytest.raises(DataError, match=r"entity_df, event_timestamp: has type .*; expected timestamps"):
        ask(spine.assign(event_timestamp=["2024-01-01"]))
    with pytest.raises(FeastEntityDFMissingColumnsError, match="driver"):
        ask(spine.rename(columns={"driver": "drivers"}))
    with pytest.raises(DataError, match=r"entity_df, join key driver: has type .*string; expected Int64"):
        ask(spine.assign(driver=["1"]))
    with pytest.raises(DataError, match="entity_df, join key driver: has a value that does not fit"):
        ask(spine.assign(driver=[1.5]))
    with pytest.raises(DataError, match="has a column trips, which is also a feature"):
        ask(spine.assign(trips=[1]))
    with pytest.raises(DataError, match="entity_df: cannot be converted to a table"):
        ask(pd.concat([spine, spine], axis=1))
    for wrong in ("stats:nope", "nope:trips"):
        with pytest.raises(Exception, match="nope"):
            ask(spine, wrong)
    provider, stats = store._get_provider(), store.get_feature_view("stats")
    with pytest.raises(RequestError, match=r"view stats: no feature 'nope'; expected trips"):
        provider.offline_store.get_historical_features(
            store.config, [stats], ["stats:nope"], spine, store.registry, store.project
        )
    assert len(ask(spine[:0])) == 0


def test_times_without_a_zone_are_utc(store: feast.FeatureStore, tmp_path: Path) -> None:
    naive = [moment and moment.replace(tzinfo=None) for moment in hours(0, 1)]
    pd.DataFrame({"driver": [1, 1], "event_timestamp": naive, "created": naive, "trips": [1, 2]}).to_parquet(
        tmp_path / "stats_rows.parquet"
    )
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    moments = [pd.Timestamp("2024-01-01T00:59:59"), pd.Timestamp("2024-01-01T01:00:00")]
    spine = pd.DataFrame({"driver": [1, 1], "event_timestamp": moments})
    assert answer(store, spine, ["stats:trips"]) == {"trips": [1, 2]}
    elsewhere = spine.assign(event_timestamp=spine["event_timestamp"].dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo"))
    assert answer(store, elsewhere, ["stats:trips"]) == {"trips": [1, 2]}


def test_a_microsecond_is_one_time(store: feast.FeatureStore, tmp_path: Path) -> None:
    """Nanoseconds of a source and of a spine are cut off alike, on both sides of 1970."""
    events = pa.array([1_500, 2_999, -1_500, 4_700], pa.timestamp("ns", "UTC"))
    columns = {"driver": [1, 2, 3, 4], "event_timestamp": events, "created": events, "trips": [1, 2, 3, 4]}
    pq.write_table(pa.table(columns), tmp_path / "stats_rows.parquet")
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64}, ttl=timedelta(microseconds=1))])
    spine = pd.DataFrame(
        {
            "driver": [1, 1, 2, 2, 3, 3, 4],
            "event_timestamp": pd.to_datetime([1_000, 999, 2_000, 4_000, -2_000, -1, 4_000], utc=True),
        }
    )
    assert answer(store, spine, ["stats:trips"]) == {"trips": [1, None, 2, None, 3, 3, 4]}


def test_bad_sources(strict: feast.FeatureStore, tmp_path: Path) -> None:
    good = rows(tmp_path, driver=[1], event=[0], trips=[10])
    strict.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    path, spine = tmp_path / "stats_rows.parquet", asked(1, driver=[1])
    ask: Callable[[], Any] = lambda: answer(strict, spine, ["stats:trips"])  # noqa: E731
    for changed, message in (
        (good.rename(columns={"trips": "n"}), "has no column trips; expected one of .*field_mapping"),
        (good.rename(columns={"driver": "n"}), "has no column driver"),
        (good.rename(columns={"created": "n"}), "has no column created"),
        (good.assign(trips=["10"]), "column trips: has type .*string; expected Int64, as declared.*source has changed"),
        (good.assign(trips=[1.5]), "column trips: has a value that does not fit"),
        (good.assign(driver=["1"]), "join key driver: has type .*string; expected Int64"),
        (good.assign(event_timestamp=["yesterday"]), "column event_timestamp: has type .*; expected timestamps"),
    ):
        changed.to_parquet(path)
        with pytest.raises(DataError, match=message):
            ask()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"source stats_rows: .* cannot be read"):
        ask()
    path.unlink()
    with pytest.raises(DataError, match="source stats_rows: nothing at"):
        ask()


def test_rows_without_a_time_or_a_key_answer_nothing(store: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, driver=[1, None, 1, 1], event=[0, 1, None, 2], created=[0, 1, 3, None], trips=[1, 2, 3, 4])
    store.apply([DRIVER, view(tmp_path, {"trips": ft.Int64})])
    spine = asked(1.5, 2, 9, driver=[1.0, 1.0, None])
    assert answer(store, spine, ["stats:trips"]) == {"trips": [1, 4, None]}


def test_a_source_of_another_kind_is_named(store: feast.FeatureStore, tmp_path: Path) -> None:
    rows(tmp_path, driver=[1], event=[0], trips=[10])
    stats = view(tmp_path, {"trips": ft.Int64})
    store.apply([DRIVER, stats])
    other = feast.KafkaSource(
        name="k", kafka_bootstrap_servers="a", topic="t", timestamp_field="event_timestamp",
        message_format=feast.data_format.JsonFormat("a int"),
    )  # fmt: skip
    stats.batch_source = other
    offline = store._get_provider().offline_store
    with pytest.raises(ConfigurationError, match="has a KafkaSource; expected a FileSource"):
        offline.get_historical_features(
            store.config, [stats], ["stats:trips"], asked(1, driver=[1]), store.registry, "prod"
        )


# --- our own tables


@pytest.fixture
def registered(tmp_path: Path) -> tuple[feast.FeatureStore, Contract, OfflineStore]:
    """A project as `isthmus apply` and `isthmus build` leave it."""
    raw = Source("raw", "raw.parquet", "event_timestamp")
    driver, pair = Entity("driver", {"driver": Int64}), Entity("pair", {"left": String, "right": String})
    stats = FeatureView(
        "stats", [driver], [Field("rate", Float32), Field("trips", Int64)], [raw], 2 * HOUR, function=_same
    )
    pairs = FeatureView("pairs", [pair], [Field("share", Float32)], [raw], ttl=None, function=_same)
    contract = compile_contract("my-shop", [stats, pairs])
    tables = OfflineStore(tmp_path / "offline")
    for name, keys in (
        ("stats", {"driver": [1, 1, 2]}),
        ("pairs", {"left": ["1", "1", "11"], "right": ["11", "11", "1"]}),
    ):
        values = {column.name: [1, None, 3] for column in contract.views[name].fields}
        when = {"event_timestamp": hours(0, 1, 0), "known_at": hours(0, 5, 1)}
        made = pa.table({**keys, **when, **values})
        utc = [made.schema.get_field_index(name) for name in when]
        for place in utc:
            made = made.set_column(place, made.column_names[place], made.column(place).cast(pa.timestamp("us", "UTC")))
        tables.write(tables.prepare(contract.views[name], made))
    folder = tmp_path / "feast"
    views = {"stats": stats, "pairs": pairs}
    registry.register(contract, views, {}, folder=folder, offline=tables, lookup_url="http://127.0.0.1:1")
    return feast.FeatureStore(repo_path=str(folder)), contract, tables


def _same(raw: Any) -> Any:
    return raw


def test_the_tables_of_registered_views_answer_as_they_do_to_us(
    registered: tuple[feast.FeatureStore, Contract, OfflineStore],
) -> None:
    store, contract, tables = registered
    spine = pa.table({
        "event_timestamp": times([int(at(hour).timestamp() * 1e6) for hour in (0, 1.5, 2.5, 5, 1)]),
        "driver": pa.array([1, 1, 1, 1, 2]),
        "left": pa.array(["1", "11", "11", "1", "2"]),
        "right": pa.array(["11", "1", "11", "11", "1"]),
    })  # fmt: skip
    features = [f"{name}:{field.name}" for name in ("stats", "pairs") for field in contract.views[name].fields]
    found = store.get_historical_features(spine.to_pandas(), features, full_feature_names=True).to_arrow()
    histories = [tables.history(contract.views[name]) for name in ("stats", "pairs")]
    expected = point_in_time(spine, histories).drop(["stats__status", "pairs__status"])
    assert same_bits(found.select(expected.column_names), expected)
    assert found["stats__trips"].to_pylist() == [1, 1, None, None, 3]


def test_a_registered_table_of_another_contract_is_refused(
    registered: tuple[feast.FeatureStore, Contract, OfflineStore],
) -> None:
    store, contract, tables = registered
    view = contract.views["stats"]
    other = make_view({"rate": Float32, "trips": Int64}, {"driver": Int64}, name="stats")
    tables.write(tables.prepare(other, tables.history(view).table().drop(["content_hash"])))
    with pytest.raises(ContractMismatch, match="offline table of stats: built under"):
        store.get_historical_features(asked(1, driver=[1]), ["stats:trips"]).to_df()


def test_a_registered_table_is_pushed_to_through_our_redis_alone(
    registered: tuple[feast.FeatureStore, Contract, OfflineStore],
) -> None:
    store, contract, tables = registered
    before = tables.history(contract.views["stats"]).table()
    rows = before.drop(["content_hash"]).to_pandas()
    # Nobody answers at the address of the server.
    with pytest.raises(DependencyError, match=r"http://127.0.0.1:1 does not answer .*`isthmus serve`"):
        store.write_to_offline_store("stats", rows)
    store.config.online_config = {"type": "sqlite"}
    store.config._online_store = None
    with pytest.raises(ConfigurationError, match=r"pushed rows need the Redis of Isthmus; expected isthmus"):
        store.write_to_offline_store("stats", rows)
    assert tables.history(contract.views["stats"]).table() == before


def test_a_view_may_have_the_name_of_anothers_table(tmp_path: Path) -> None:
    raw, driver = Source("raw", "raw.parquet", "event_timestamp"), Entity("driver", {"driver": Int64})
    views = {
        name: FeatureView(name, [driver], [Field("rate", Float32)], [raw], ttl=None, function=_same)
        for name in ("stats", "Stats_Table")
    }
    contract = compile_contract("shop", list(views.values()))
    tables = OfflineStore(tmp_path / "offline")
    registry.register(contract, views, {}, folder=tmp_path / "feast", offline=tables, lookup_url="http://127.0.0.1:1")
    found = feast.FeatureStore(repo_path=str(tmp_path / "feast")).list_feature_views()
    names = [source.name for view in found for source in (view.stream_source, view.batch_source) if source]
    assert sorted(names) == ["Stats_Table", "Stats_Table_table", "stats", "stats_table_"]
