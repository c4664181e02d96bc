"""Definitions change and change back while clients ask: no request is refused, none is answered of two contracts."""

import http.client
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import DataError, DependencyError
from isthmus.features.files import write_atomically
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.pointintime.join import point_in_time
from isthmus.features.publishing.publish import publish
from isthmus.features.redis.connection import connect
from isthmus.features.types import Int64
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.apply.switch import missing_views, switch
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.verification.sides import questions_at
from isthmus.package.manifest import open_package
from isthmus.serving.deployment.record import unverified_deployment
from tests.orchestration.server.served import served
from tests.orchestration.shop import Open, Shop
from tests.serving.support import make_package, wait

REQUESTS = int(os.environ.get("TEST_LOOKUPS", "1500"))
"""Lookups and predictions in all while definitions change."""
CLIENTS = 2
KILLS = int(os.environ.get("TEST_KILLS", "3"))
KEYS: dict[str, list[Any]] = {
    "customer": [0, 1_000_003, 2_000_006], "store": ["s1", "s2", "s3"], "product": [1, 2, 3]
}  # fmt: skip
LOOKUP = {"features": ["customer_orders:orders_7d", "shelf_demand:sold_1d"], "entities": KEYS}
PREDICT = {"entities": {name: KEYS[name] for name in ("store", "product")}}


def changed(text: str) -> list[str]:
    """The definitions: as they are, with a feature more, with another window as well, and with a view less as well."""

    def edited(text: str, old: str, new: str) -> str:
        assert text.count(old) == 1, old
        return text.replace(old, new)

    field = 'Field("mean_amount_7d", Float64)'
    added = edited(text, field, f'{field}, Field("most_7d", Float64)')
    mean = 'F.avg("cents").over(week).alias("mean_amount_7d"),'
    added = edited(added, mean, f'{mean} F.max("cents").over(week).cast("double").alias("most_7d"),')
    wider = edited(added, "rangeBetween(1 - 86400, 0)", "rangeBetween(1 - 20 * 86400, 0)")
    start = wider.index("@transform(\n    entities=[customer],\n    sources=[customers],")
    less = wider[:start] + wider[wider.index("basket = RequestSource") :]
    return [text, added, wider, edited(less, 'customer_facts[["member", "born"]], ', "")]


def trained(project: Project, contract: Contract) -> dict[str, list[Any]]:
    """What training sees of the keys: the offline join, from which lookups of this contract must not differ."""
    store = OfflineStore(project.offline)
    views = [contract.views[name] for name in ("customer_orders", "shelf_demand")]
    keys = pa.table({"customer": KEYS["customer"], "store": KEYS["store"],
                     "product": pa.array(KEYS["product"], pa.int32())})  # fmt: skip
    joined = point_in_time(questions_at(keys, project.now()), [store.history(view) for view in views])
    return {name: joined[name].to_pylist() for name in ("customer_orders__orders_7d", "shelf_demand__sold_1d")}


def model(values: dict[str, list[Any]]) -> list[float]:
    """What the package of these tests predicts."""
    return [1 / (1 + math.exp(-0.1 * (sold or 0))) for sold in values["shelf_demand__sold_1d"]]


@dataclass
class Load:
    """Clients that ask without a pause, and how many answers there were by kind and contract."""

    port: int
    expected: dict[str, dict[str, list[Any]]]
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    ended: threading.Event = field(default_factory=threading.Event)
    clients: list[Future[None]] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.answered.values())

    def answers(self, count: int) -> None:
        """Waits for so many answers in all."""
        wait(lambda: self._goes_on() and self.count >= count, f"{count} answers", 600)

    def switch(self, http: httpx.Client, contract: str) -> None:
        """Waits until the server answers under a contract."""
        wait(lambda: self._goes_on() and contract_of(http) == contract, "the switch", 60)

    def _goes_on(self) -> bool:
        """Raises what a client met."""
        for client in self.clients:
            if client.done():
                client.result()
        return True

    def ask(self) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            while not self.ended.is_set():
                contract, answer = self._answer(connection, "/get-online-features", LOOKUP)
                values = [result["values"] for result in answer["results"]]
                assert answer["metadata"]["contract"] == contract
                assert dict(zip(answer["metadata"]["feature_names"][3:], values[3:], strict=True)) == {
                    name.partition("__")[2]: column for name, column in self.expected[contract].items()
                }, contract
                contract, answer = self._answer(connection, "/predict", PREDICT)
                assert answer["predictions"] == pytest.approx(model(self.expected[contract]), abs=1e-6), contract

    def _answer(self, connection: http.client.HTTPConnection, path: str, body: object) -> tuple[str, dict[str, Any]]:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        assert response.status == 200, (path, response.status, text)
        contract = response.headers["isthmus-contract"]
        self.answered[path, contract] += 1
        return contract, json.loads(text)


@contextmanager
def under_load(project: Project, port: int, expected: dict[str, dict[str, list[Any]]]) -> Iterator[Load]:
    load = Load(port, expected)
    with ThreadPoolExecutor(CLIENTS) as threads:
        load.clients += [threads.submit(load.ask) for _ in range(CLIENTS)]
        try:
            yield load
        finally:
            load.ended.set()
        for client in load.clients:
            client.result()


def deployed(project: Project, folder: Path, contract: Contract) -> None:
    """Puts a model behind the API that reads a view whose window will change."""
    package = make_package(
        folder, contract, inputs=[("shelf_demand__sold_1d", Int64)], weight=0.1, service="late_order_device"
    )
    deployment = unverified_deployment(open_package(package), project.settings.profiles.serving, project.now(), None)
    write_atomically(project.deployment_file, deployment.dumps(project.deployment_file))


def contract_of(http: httpx.Client) -> str:
    return str(http.get("/readyz").json()["contract"])


@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.thorough
def test_definitions_change_and_change_back_and_nobody_is_refused(built: Shop, project: Open, tmp_path: Path) -> None:
    texts = changed(built.definitions.read_text())
    opened = project(built)
    first = opened.applied()
    deployed(opened, tmp_path / "package", first)
    expected = {first.hash: trained(opened, first)}
    hashes = [first.hash]
    with served(opened, model=True) as http, under_load(opened, http.base_url.port or 0, expected) as load:
        for turn, text in enumerate([*texts[1:], *texts[2::-1]], start=1):
            built.definitions.write_text(text)
            before, at_once = contract_of(http), turn == 3
            if at_once:
                # A view less changes no row of the others.
                expected[project(built).definitions.contract.hash] = expected[before]
            applied = apply(project(built))
            assert at_once == (applied.current == applied.contract)
            if not at_once:
                assert (applied.current, contract_of(http)) == (before, before)
            build(project(built))
            now = project(built)
            expected[applied.contract] = trained(now, now.applied())
            load.answers(load.count + 4 * CLIENTS)
            assert at_once or contract_of(http) == before
            materialize(now)
            load.switch(http, applied.contract)
            load.answers(turn * REQUESTS // 6)
            hashes.append(applied.contract)
    assert hashes[:3] == hashes[:3:-1], "the way back leads through the same contracts"
    lookups = {contract for path, contract in load.answered if path == "/get-online-features"}
    assert lookups == set(hashes)
    predicted = {contract for path, contract in load.answered if path == "/predict"}
    assert predicted == set(hashes[:2]), "the model stays with the window that it was trained for"
    windows = [expected[contract]["shelf_demand__sold_1d"] for contract in hashes[1:3]]
    assert windows[0] != windows[1]


CHANGED = "rangeBetween(1 - 86400, 0)", "rangeBetween(1 - 20 * 86400, 0)"


def test_what_is_changed_and_changed_back_was_never_current(built: Shop, project: Open) -> None:
    first = project(built).applied()
    built.replace(*CHANGED)
    prepared = apply(project(built))
    assert prepared.current == first.hash != prepared.contract
    assert prepared.registered == [], "Feast's registry is that of the current contract"
    built.replace(*reversed(CHANGED))
    back = apply(project(built))
    assert (back.contract, back.current, bool(back.registered)) == (first.hash, first.hash, True)
    contracts = project(built).generations()
    assert (contracts.current, contracts.next) == (first, None)
    assert [item.contract.hash for item in contracts.retired] == [prepared.contract], "it may have rows"
    counts = materialize(project(built))
    assert {name: count.written for name, count in counts.items()} == dict.fromkeys(counts, 0)


def test_a_model_answers_on_the_way_back_to_its_contract(built: Shop, project: Open, tmp_path: Path) -> None:
    first = project(built).applied()
    deployed(project(built), tmp_path / "package", first)
    built.replace(*CHANGED)
    apply(project(built))
    build(project(built))
    materialize(project(built))
    built.replace(*reversed(CHANGED))

    def answered(http: httpx.Client) -> None:
        answer = http.post("/predict", json=PREDICT)
        assert (answer.status_code, answer.headers.get("isthmus-contract")) == (200, first.hash), answer.text

    with served(project(built), model=True) as http:
        answered(http)
        assert apply(project(built)).current != first.hash
        before = project(built).generations()
        assert before.current is not None
        assert before.next == first
        # A server looks forty times a second.
        for _ in range(20):
            answered(http)
            time.sleep(0.025)
        build(project(built))
        materialize(project(built))
        wait(lambda: contract_of(http) == first.hash, "the way back")
        answered(http)
    assert [item.contract.hash for item in project(built).generations().retired] == [before.current.hash]
    # As if the switch had been killed, or read, after the first of its files.
    partly = Generations(before.current, before.next, before.switch(first, 5).retired)
    assert partly.compatible_contract(first, "late_order_device") == first


def test_of_two_changes_at_once_one_is_next(built: Shop, project: Open, tmp_path: Path) -> None:
    first = project(built).applied()
    roots = [Shop(Path(shutil.copytree(built.root, tmp_path / f"{n}"))) for n in range(2)]
    for n, shop in enumerate(roots):
        shop.replace(CHANGED[0], CHANGED[1].replace("20", f"{n + 2}"))
        shutil.rmtree(shop.state)
        shop.state.symlink_to(built.state)
    with ThreadPoolExecutor(2) as threads:
        applied = list(threads.map(lambda shop: apply(project(shop)), roots))
    contracts = project(built).generations()
    assert contracts.current == first
    assert contracts.next is not None
    later, earlier = sorted((one.contract for one in applied), key=contracts.next.hash.__ne__)
    assert (contracts.next.hash, [item.contract.hash for item in contracts.retired]) == (later, [earlier])


def test_rows_that_are_lost_before_the_switch_prevent_it(built: Shop, project: Open) -> None:
    first = project(built).applied()
    built.replace(*CHANGED)
    apply(project(built))
    build(project(built))
    opened = project(built)
    following = opened.applied()
    view = following.views["shelf_demand"]
    with opened.redis() as url, connect(url) as client:
        store = OnlineStore(client, following)
        assert missing_views(opened.generations(), store) == ["shelf_demand"]
        materialize(project(built), ["customer_orders"])
        assert project(built).generations().current == first, "another view"
        # As if the last run had been killed right before it would have switched.
        publish(store, url, OfflineStore(opened.offline), OfflineStore(opened.offline).history(view), opened.now)
        name = next(iter(client.scan_iter("shop:*product*store*", _type="HASH")))
        row = client.hget(name, view.online_name)
        assert row is not None
        for damaged in (row[:-1] + bytes([row[-1] ^ 1]), row[:10] + bytes([row[10] ^ 1]) + row[11:], None):
            if damaged is None:
                client.hdel(name, view.online_name)
            else:
                client.hset(name, view.online_name, damaged)
            with pytest.raises(DataError, match=r"online rows of view shelf_demand: 1 of \d+ differ from the table"):
                switch(opened, store)
            assert project(built).generations().current == first
    materialize(project(built), full=True)
    assert project(built).generations().current == following


@pytest.mark.accept
def test_what_is_pushed_in_between_is_there_before_and_after(built: Shop, project: Open, tmp_path: Path) -> None:
    texts = changed(built.definitions.read_text())
    opened = project(built)
    first = opened.applied()
    deployed(opened, tmp_path / "package", first)
    second = 1_000_000

    def row(customer: int, seconds_ago: int, **more: list[Any]) -> dict[str, Any]:
        at = opened.now() - seconds_ago * second
        columns = {"orders_7d": [customer + 100], "mean_amount_7d": [0.5], "late_rate_7d": [0.25], **more}
        return {"push_source_name": "customer_orders", "df": {
            "customer": [customer], "event_timestamp": [at], "known_at": [at], **columns}}  # fmt: skip

    def orders(http: httpx.Client, customer: int, *features: str) -> list[Any]:
        asked = {"features": [f"customer_orders:{name}" for name in ("orders_7d", *features)],
                 "entities": {"customer": [customer]}}  # fmt: skip
        answer = http.post("/get-online-features", json=asked)
        assert answer.status_code == 200, answer.text
        return [result["values"][0] for result in answer.json()["results"][1:]]

    with served(opened, model=True) as http:

        def push(body: dict[str, Any]) -> None:
            answer = http.post("/push", json=body)
            assert (answer.status_code, answer.json().get("written")) == (200, 1), answer.text

        push(row(0, 50))
        built.definitions.write_text(texts[1])
        applied = apply(project(built))
        refused = http.post("/get-online-features", json={"features": ["customer_orders:most_7d"],
                                                          "entities": {"customer": [0]}})  # fmt: skip
        assert refused.status_code == 404
        wait(lambda: http.post("/push", json=row(7, 60, most_7d=[9.5])).status_code == 200, "what is next")
        assert (
            "finish `isthmus materialize` to make it current"
            in http.post(
                "/get-online-features", json={"features": ["customer_orders:most_7d"], "entities": {"customer": [0]}}
            ).json()["remedy"]
        )
        push(row(1_000_003, 40))
        push(row(2_000_006, 30, most_7d=[8.5]))
        wrong = http.post("/push", json=row(3, 20, least_7d=[1.0]))
        assert wrong.status_code == 422
        assert "most_7d" not in wrong.text, "what is current says what is expected"
        assert [orders(http, key) for key in KEYS["customer"]] == [[100], [1_000_103], [2_000_106]]
        build(project(built))
        materialize(project(built))
        wait(lambda: contract_of(http) == applied.contract, "the switch")
        assert [orders(http, key, "most_7d") for key in (*KEYS["customer"], 7)] == [
            [100, None], [1_000_103, None], [2_000_106, 8.5], [107, 9.5],
        ]  # fmt: skip
        assert http.post("/push", json=row(0, 10)).status_code == 422, "now the columns are those of the new contract"
        push(row(0, 10, most_7d=[7.5]))
        built.definitions.write_text(texts[0])
        apply(project(built))
        build(project(built))
        materialize(project(built))
        wait(lambda: contract_of(http) == first.hash, "the way back")
        assert [orders(http, key) for key in (*KEYS["customer"], 7)] == [[100], [1_000_103], [2_000_106], [107]]


def test_a_redis_without_room_for_both_keeps_what_is_current(built: Shop, project: Open) -> None:
    opened = project(built)
    first = opened.applied()
    built.replace(*CHANGED)
    applied = apply(project(built))
    build(project(built))
    with opened.redis() as url, connect(url) as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(DependencyError, match="out of memory"):
            materialize(project(built))
        assert project(built).generations().current == first
        answer = OnlineStore(client, first).read(
            first.views["shelf_demand"], {"store": ["s1"], "product": [1]}, opened.now()
        )
        assert answer.status.tolist() == [0]
        client.config_set("maxmemory", 0)
        materialize(project(built))
    assert project(built).applied().hash == applied.contract
    assert project(built).generations().next is None


WRITING = """
import sys
from pathlib import Path
from isthmus.features.contract.generations import Generations
file = Path(sys.argv[1])
before = Generations.read(file)
after = before.switch(before.next, 5)
while True:
    print("goes on", flush=True)
    after.write(file)
    before.write(file)
"""


@pytest.mark.thorough
def test_a_switch_that_is_killed_leaves_every_contract_that_has_rows(built: Shop, project: Open) -> None:
    built.replace(*CHANGED)
    apply(project(built))
    before = project(built).generations()
    assert before.current is not None
    assert before.next is not None
    known, chance = {before.current.hash, before.next.hash}, random.Random(0)
    for _ in range(KILLS):
        command = [sys.executable, "-c", WRITING, str(project(built).contract_file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            for _ in range(chance.randint(1, 20)):
                child.stdout.readline()
            child.kill()
        left = project(built).generations()
        assert left.current is not None
        assert {contract.hash for contract in left.contracts()} == known
        if left.next is None:
            # What follows from here on: the same two contracts again.
            left = Generations(left.retired[0].contract, left.current)
            left.write(project(built).contract_file)
