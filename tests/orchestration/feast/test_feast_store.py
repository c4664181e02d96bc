"""A real project through Feast's SDK: the rows of `isthmus materialize` are the rows of Feast's online store."""

import json
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from isthmus.features import clock
from isthmus.features.contract.contract import Contract
from isthmus.features.errors import ContractMismatch, DataError
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.build.build import build
from isthmus.orchestration.build.materialize import materialize
from isthmus.orchestration.project import Project
from tests.features.feast_project import REGISTRY, answered, entity_key, isthmus, now, online_store, repository
from tests.orchestration import shop as shops
from tests.orchestration.shop import VIEWS, Shop
from tests.serving.support import serving

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    import feast
    from feast.protos.feast.types.Value_pb2 import Value

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

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


def over(project: Project, folder: Path, online: str) -> feast.FeatureStore:
    repository(folder, online, project="my_shop")
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
    with pytest.raises(ContractMismatch, match="belongs to project my-shop, these are the rows of my_shop"):
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
