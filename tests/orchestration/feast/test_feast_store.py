"""A real project through Feast's SDK: the rows of `isthmus materialize` are the rows of Feast's online store."""

import json
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from isthmus.features import clock
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ContractMismatch, DataError, DependencyError
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.collect import collect
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from tests.features.feast_project import OFFLINE, REGISTRY, answered, entity_key, isthmus, now, online_store, repository
from tests.orchestration import shop as shops
from tests.orchestration.shop import VIEWS, Shop
from tests.serving.support import serving

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    import feast
    from feast.data_source import PushMode
    from feast.protos.feast.types.Value_pb2 import Value

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

HOUR = timedelta(hours=1)
LABELS = {"present": "PRESENT", "null": "NULL_VALUE", "expired": "OUTSIDE_MAX_AGE", "not_found": "NOT_FOUND"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, str]]:
    """The shop, with a name that Feast registers otherwise and one ttl that is not over; and its Redis."""
    shop: Shop = shops.write(tmp_path_factory.mktemp("feast") / "shop")
    shop.replace('name = "shop"', 'name = "my-shop"', "isthmus.toml")
    shop.replace("ttl=timedelta(days=7)", "ttl=timedelta(days=30_000)")
    shop.replace('Field("trips", Array(Float64))', 'Field("trips", Array(Float64), size=2)')
    found = Project(shop.root)
    apply(found)
    build(found)
    with found.redis() as url:
        materialize(found)
        yield found, url


@pytest.fixture
def store(project: tuple[Project, str], tmp_path: Path) -> feast.FeatureStore:
    """Feast's SDK over the registry that `isthmus apply` wrote."""
    return over(project[0], tmp_path, isthmus(project[1], project="my-shop"))


def over(project: Project, folder: Path, online: str, offline: str = "{type: dask}") -> feast.FeatureStore:
    repository(folder, online, project="my_shop", offline=offline)
    before, registry = REGISTRY.format(folder=folder), project.state / "feast" / "registry.pb"
    file = folder / "feature_store.yaml"
    file.write_text(file.read_text().replace(before, f"{{registry_type: file, path: {registry}}}"))
    return feast.FeatureStore(repo_path=str(folder))


def rows_of(contract: Contract, client: Any) -> dict[str, dict[str, list[Any]]]:
    """View name to its keys in Redis, and one that nobody has."""
    nobody: dict[str, Any] = {"customer": -1, "store": "s?", "product": -1}
    keys = {name: OnlineStore(client, contract).keys(contract.views[name]) for name in VIEWS}
    return {
        name: {key: [*values, nobody[key], values[0]] for key, values in columns.items()}
        for name, columns in keys.items()
    }


def test_what_isthmus_wrote_feast_reads(project: tuple[Project, str], store: feast.FeatureStore) -> None:
    contract = project[0].applied()
    seen: set[tuple[str, str]] = set()
    with connect(project[1]) as client:
        for name, keys in rows_of(contract, client).items():
            view = contract.views[name]
            found = answered(store.get_online_features([f"{name}:{field.name}" for field in view.fields], keys))
            wanted = OnlineStore(client, contract).read(view, keys, clock.now())
            for field in view.fields:
                values = wanted.columns[field.name]
                plain: list[Any] = values.tolist(field.dtype)
                if field.dtype.name == "UnixTimestamp":
                    plain = [None if value is None else clock.moment(value // 10**6 * 10**6) for value in plain]
                codes = np.where(~values.valid & (wanted.status == clock.Status.PRESENT), 1, wanted.status)
                statuses = [LABELS[clock.Status(code).label] for code in codes]
                assert found[field.name] == list(zip(plain, statuses, strict=True)), f"{name}.{field.name}"
                seen.update((field.dtype.name, status) for status in statuses)
    assert {status for _, status in seen} == set(LABELS.values())
    assert {kind for kind, status in seen if status == "PRESENT"} >= {"Int64", "Float64", "Float32", "String", "Bytes"}


def test_what_feast_wrote_isthmus_serves(
    project: tuple[Project, str], store: feast.FeatureStore, tmp_path: Path
) -> None:
    contract = project[0].applied()
    moment = now() - timedelta(minutes=90)
    rows = {"store": ["s0", "s77"], "product": [1, 7], "event_timestamp": [moment] * 2, "sold_1d": [70, 71],
            "distance": [1.5, None], "known_at": [moment + timedelta(minutes=30)] * 2}  # fmt: skip
    with connect(project[1]) as client:
        named = "my-shop:product,store:*"
        before = set(client.keys(named))
        store.write_to_online_store("shelf_demand", pd.DataFrame(rows))
        # s0 and 1 had a row, under the same name: one key is new.
        assert len(set(client.keys(named)) - before) == 1
        answer = OnlineStore(client, contract).read(
            contract.views["shelf_demand"], {"store": ["s0"], "product": [1]}, clock.now()
        )
        assert answer.known.tolist() == [clock.micros(moment + timedelta(minutes=30))]
    (tmp_path / "contract.json").write_bytes(contract.dumps())
    with serving(tmp_path, project[1], now=None) as server:
        answer = server.lookup(
            features=["shelf_demand:sold_1d", "shelf_demand:distance"],
            entities={"store": ["s0", "s77"], "product": [1, 7]},
        ).json()
    results = dict(zip(answer["metadata"]["feature_names"], answer["results"], strict=True))
    assert results["sold_1d"]["values"] == [70, 71]
    assert results["distance"]["values"] == [1.5, None]
    assert results["distance"]["statuses"] == ["PRESENT", "NULL_VALUE"]


def test_without_a_created_timestamp_the_delay_of_the_view_counts(
    project: tuple[Project, str], store: feast.FeatureStore
) -> None:
    moment = now() - timedelta(minutes=10)
    table = store.get_feature_view("shelf_demand")
    key = entity_key(store="s88", product=1)
    online_store(store).online_write_batch(
        store.config, table, [(key, {"sold_1d": Value(int64_val=1)}, moment, None)], None
    )
    # The view's rows are known an hour after they are true.
    assert online_store(store).online_read(store.config, table, [key]) == [(None, None)]


def test_feast_materializes_what_isthmus_materializes(project: tuple[Project, str], store: feast.FeatureStore) -> None:
    with connect(project[1]) as client:
        name = "my-shop:customer:"
        before = {key: client.hget(key, "customer_facts") for key in client.scan_iter(f"{name}*")}
        held = {key for key, row in before.items() if row is not None}
        for key in held:
            client.hdel(key, "customer_facts")
        store.materialize(now() - timedelta(days=4000), now(), feature_views=["customer_facts"])
        after = {key: client.hget(key, "customer_facts") for key in held}
    assert len(held) == 50
    assert all(after[key] is not None and after[key][:25] == before[key][:25] for key in held)
    # Feast's timestamps are whole seconds, and `last_call` has a fraction for the 42 customers who ever called.
    assert sum(after[key] != before[key] for key in held) == 42


def test_another_project_is_refused(project: tuple[Project, str], tmp_path: Path) -> None:
    store = over(project[0], tmp_path, isthmus(project[1]))
    with pytest.raises(
        ContractMismatch, match="belongs to project my-shop, but the online store reads project my_shop"
    ):
        store.get_online_features(["customer_facts:city"], {"customer": [0]})


@pytest.mark.parametrize("spoil", ["hash", "field", "text"])
def test_a_view_that_was_changed_in_feast_is_refused(
    project: tuple[Project, str], store: feast.FeatureStore, spoil: str
) -> None:
    view = store.get_feature_view("customer_facts")
    if spoil == "hash":
        view.tags["isthmus.contract"] = "0" * 64
    elif spoil == "field":
        view.features = [field for field in view.features if field.name != "born"]
    else:
        view.tags["isthmus.view"] = json.dumps({"entities": []})
    with pytest.raises(ContractMismatch, match="Run `isthmus apply`"):
        online_store(store).online_read(store.config, view, [])


def test_feast_writes_no_array_of_another_size_than_declared(
    project: tuple[Project, str], store: feast.FeatureStore
) -> None:
    row = {"customer": [77], "event_timestamp": [now()], "known_at": [now()], "words": [["a"]], "city": ["x"]}
    row |= {name: [None] for name in ("member", "born", "last_call", "token")}
    store.write_to_online_store("customer_facts", pd.DataFrame({**row, "trips": [[1.0, 2.0]]}))
    with pytest.raises(DataError, match="feature trips of view customer_facts: an array of 3 elements in row 0; "
                       "expected 2, as declared"):  # fmt: skip
        store.write_to_online_store("customer_facts", pd.DataFrame({**row, "trips": [[1.0, 2.0, 3.0]]}))
    found = answered(store.get_online_features(["customer_facts:trips"], {"customer": [77]}))
    assert found["trips"] == [([1.0, 2.0], "PRESENT")]


def facts(customer: int, moment: datetime) -> pd.DataFrame:
    """A row of `customer_facts` with a value for each feature, and one without any, as of the same moment."""
    row = {"city": "Zürich", "member": True, "born": 1970, "last_call": moment.replace(microsecond=0),
           "token": b"\x00\xff", "trips": [0.5, float("inf")], "words": ["a", ""]}  # fmt: skip
    times = {"event_timestamp": [moment] * 2, "known_at": [moment + timedelta(minutes=1)] * 2}
    return pd.DataFrame(
        {"customer": [customer, customer + 1], **times, **{name: [value, None] for name, value in row.items()}}
    )


@pytest.mark.accept
@pytest.mark.parametrize("through", ["our store", "a server"])
def test_what_feast_pushes_is_in_the_history_once(project: tuple[Project, str], tmp_path: Path, through: str) -> None:
    opened, url = project
    contract = opened.applied()
    view, offline = contract.views["customer_facts"], OfflineStore(opened.offline)
    moment, first = now() - timedelta(minutes=9), 5000 if through == "our store" else 6000
    with ExitStack() as stack:
        online = isthmus(url, project="my-shop")
        if through == "a server":
            (tmp_path / "server").mkdir()
            (tmp_path / "server" / "contract.json").write_bytes(contract.dumps())
            server = stack.enter_context(serving(tmp_path / "server", url, now=None))
            online = f'{{type: remote, path: "{str(server.http.base_url).rstrip("/")}"}}'
        store = over(opened, tmp_path, online, OFFLINE)
        # Feast's client of a server writes online neither bytes nor infinities, for which JSON has no form.
        plain = {"token": [None, None], "trips": [[0.5, 1.0], None]} if through == "a server" else {}
        # Feast's own default is the online store alone.
        store.push("customer_facts", facts(first, moment).assign(**plain))
        store.push("customer_facts", facts(first + 10, moment), to=PushMode.OFFLINE)
        for _ in range(2):  # Whoever heard of no success pushes again.
            both = facts(first + 20, moment).assign(**plain)
            store.push("customer_facts", both, to=PushMode.ONLINE_AND_OFFLINE)
        for name, found in (("event_timestamp", "is in the future"), ("known_at", "1 nulls")):
            later = facts(first + 30, moment).assign(**{name: [moment, None if "null" in found else now() + HOUR]})
            with pytest.raises(DataError, match=f"{name}: .*{found}"):
                store.push("customer_facts", later, to=PushMode.OFFLINE)
        with pytest.raises(ValueError, match=r"missing_expected_columns: \[.born"):
            store.write_to_offline_store("customer_facts", facts(first, moment).drop(columns="born"))
        assert collect(opened)["customer_facts"].added == 4
        rows = offline.history(view).table()
        wanted = {first + 10, first + 11, first + 20, first + 21}
        places = [n for n, key in enumerate(rows["customer"].to_pylist()) if first <= key < first + 100]
        assert {rows["customer"][n].as_py() for n in places} == wanted
        assert len(places) == 4
        with connect(url) as client:
            keys = {"customer": [first, first + 10, first + 20]}
            answer = OnlineStore(client, contract).read(view, keys, clock.now())
            assert answer.status.tolist() == [clock.Status.PRESENT, clock.Status.NOT_FOUND, clock.Status.PRESENT]
            alone = rows.slice(rows["customer"].to_pylist().index(first + 10), 1).to_pylist()[0]
            assert (alone["token"], alone["trips"], alone["words"]) == (b"\x00\xff", [0.5, float("inf")], ["a", ""])
            # To the bit what the history has.
            place = rows["customer"].to_pylist().index(first + 20)
            assert answer.known[2] == clock.micros(rows["known_at"][place].as_py())
            for column in view.fields:
                assert answer.columns[column.name].take(np.array([2])).tolist(column.dtype) == [
                    rows[column.name].take([place]).cast(pa.int64()).to_pylist()[0]
                    if column.dtype.name == "UnixTimestamp" else rows[column.name][place].as_py()
                ]  # fmt: skip
    if through == "a server":
        with pytest.raises(DependencyError, match="does not answer"):
            store.push("customer_facts", facts(first, moment), to=PushMode.OFFLINE)
