"""`isthmus features lookup` answers what the API answers, without a server."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from isthmus.orchestration.server.lookup import lookup
from isthmus.orchestration.server.serve import serving
from isthmus.orchestration.tables.materialize import materialize
from tests.commandline import run
from tests.orchestration.shop import Open, Shop
from tests.servers import free_port
from tests.serving.support import wait

KEYS: dict[str, list[Any]] = {"customer": [1_000_003, 5], "store": ["s1", "nowhere"], "product": [1, 2]}
FEATURES = ["customer_orders:late_rate_7d", "customer_facts:token", "customer_facts:trips", "shelf_demand:sold_1d"]


def test_the_answer_is_that_of_the_api(built: Shop, project: Open) -> None:
    opened = project(built)
    materialize(opened)
    port = free_port()

    def asked(wanted: dict[str, object], keys: Sequence[str]) -> object:
        body = {**wanted, "entities": {key: KEYS[key] for key in keys}, "full_feature_names": True}
        answer = httpx.post(f"http://127.0.0.1:{port}/get-online-features", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ready() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    arguments = [f"{key}={value}" for key, values in KEYS.items() for value in values]
    with serving(opened, port=port, private=True):
        wait(ready, "the API", 60)
        assert lookup(opened, "late_order_server", arguments) == asked(
            {"feature_service": "late_order_server"}, [*KEYS]
        )
        assert lookup(opened, ",".join(FEATURES), arguments) == asked({"features": FEATURES}, [*KEYS])
        device = lookup(opened, "late_order_device", arguments[2:])
        assert device == asked({"feature_service": "late_order_device"}, ["store", "product"])


def test_the_command(built: Shop, project: Open) -> None:
    materialize(project(built))
    command = ["features", "lookup", "customer_orders:orders_7d", "customer=1000003", "customer=5"]
    shown = run(*command, cwd=built.root)
    assert shown.returncode == 0, shown.stderr
    for text in ("customer_orders__orders_7d", "1000003", "NOT_FOUND"):
        assert text in shown.stdout
    assert "1970" not in shown.stdout
    (keys, _) = json.loads(run(*command, "--json", cwd=built.root).stdout)["results"]
    assert keys["values"] == [1_000_003, 5]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["late_order_servr"], "feature_service: no service 'late_order_servr'"),
        (["late_order_device", "store"], "'store' is not a key and a value; expected key=value"),
        (["late_order_device", "store=s1"], "entities.product: is missing"),
        (["late_order_device", "store=s1", "product=one"], "entities.product"),
        (["late_order_device", "store=s1", "product=1,2"], "entities.product"),
        (["late_order_device", "store=\udcff", "product=1"], "the value of store is not UTF-8"),
        (["late_order_device", "store=s1", "product=1", "shelf=1"], "entities.shelf: is not a join key"),
        (["late_order_device", "store=s1", "store=s2", "product=1"], "the columns differ in length"),
    ],
)
def test_what_cannot_be_looked_up(built: Shop, arguments: list[str], sentence: str) -> None:
    refused = run("features", "lookup", *arguments, cwd=built.root)
    assert refused.returncode == 2
    assert sentence in refused.stderr
    assert "Traceback" not in refused.stderr
