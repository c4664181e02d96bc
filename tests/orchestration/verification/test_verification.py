"""The verdict over a real project: every way in which the two sides can differ is found and named."""

import base64
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from markdown_it import MarkdownIt
from playwright.sync_api import Page, sync_playwright

from isthmus import ContractMismatch, DataError, DependencyError, GateFailed
from isthmus.features import clock
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.types import Float64, Int64, String
from isthmus.features.values.columns import Values, from_python
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.server.keys import create
from isthmus.orchestration.steps.step import plots
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.verification import client as api_client
from isthmus.orchestration.verification.client import private_api
from isthmus.orchestration.verification.page import IMAGES, images
from isthmus.orchestration.verification.page import page as verdict_page
from isthmus.orchestration.verification.verify import require_passed, verify
from isthmus.package.verdict import Verdict, compare
from isthmus.serving.http.protocol import WAIT_SECONDS
from tests.chromium import launch
from tests.commandline import run
from tests.orchestration.shop import HOUR, NOW, Open, Shop


def test_verify_passes_on_every_key(built: Shop, project: Open) -> None:
    verdict = verify(project(built), all_keys=True)
    assert (verdict.passed, verdict.differing) == (True, 0)
    singly = sum(part.compared for part in verdict.singly.values())
    assert singly == 60 * 5 + 60 * 4 + 50 * 9  # without known times and content hashes, which no lookup shows
    assert verdict.compared == 60 * 7 + 60 * 6 + 50 * 11 + singly
    assert (built.state / "verdicts" / "late_order.json").exists()
    require_passed(verdict)


_TICKETS = """
ticket = Entity("ticket", join_keys={"opened": UnixTimestamp, "token": Bytes, "late_one": Bool})


@transform(entities=[ticket], sources=[orders], schema=[Field("sums", Array(Int64))], ttl=None)
def tickets(orders: DataFrame) -> DataFrame:
    token = F.col("store").cast("binary").alias("token")
    late = (F.col("late") > 0).alias("late_one")
    times = ["ordered_at", "delivered_at"]
    sums = F.array("cents", "late").alias("sums")
    return orders.select(F.col("ordered_at").alias("opened"), token, late, *times, sums)
"""


@pytest.mark.accept
def test_times_bytes_and_truth_values_are_keys_from_raw_data_to_verdict(shop: Shop, project: Open) -> None:
    shop.append(_TICKETS)
    apply(project(shop))
    build(project(shop))
    materialize(project(shop))
    assert materialize(project(shop))["tickets"].written == 0
    verdict = verify(project(shop), all_keys=True)
    assert verdict.passed
    rows = len(pq.read_table(shop.orders))
    assert verdict.views["tickets"]["sums"].compared == rows
    with EmbeddedRedis(shop.state / "redis") as server, connect(server.url) as client:
        client.hdel(sorted(client.keys("shop:late_one,opened,token:*"))[0], "tickets")
    names = ("sums", "status", "event_timestamp", "known_at", "content_hash")
    assert failed(shop, project) == {f"tickets.{name}": 1 for name in names}


def failed(shop: Shop, project: Open, *, all_keys: bool = True) -> dict[str, int]:
    """What `verify` finds to differ; it must refuse."""
    verdict = verify(project(shop), all_keys=all_keys)
    with pytest.raises(
        GateFailed, match=rf"verdict: {verdict.differing} of {verdict.compared} values differ: "
    ) as caught:
        require_passed(verdict)
    assert caught.value.exit_code == 1
    found = {
        f"{view}.{feature}": result.differing
        for view, features in verdict.views.items()
        for feature, result in features.items()
        if result.differing
    }
    assert all(name in str(caught.value) for name in list(found)[:5])
    return found


def test_verify_names_every_online_row_that_was_altered(built: Shop, project: Open) -> None:
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        customer, another, *_ = sorted(client.keys("shop:customer:*"))
        # A value, and what no lookup shows: the known time and the content hash.
        known, hashed, gone, *_ = sorted(client.keys("shop:product,store:*"))
        altered = [(customer, "customer_orders", -1), (known, "shelf_demand", 17), (hashed, "shelf_demand", 25)]
        for key, view, place in altered:
            row = bytearray(client.hget(key, view) or b"")
            row[place] ^= 1
            client.hset(key, view, bytes(row))
        client.hdel(gone, "shelf_demand")
        # A row under a key that the tables do not have.
        client.hset(another[:-8] + b"\x07" * 8, "customer_facts", client.hget(another, "customer_facts"))
    found = failed(built, project)
    shelf = {name.partition(".")[2]: found.pop(name) for name in [*found] if name.startswith("shelf_demand.")}
    assert {name: shelf[name] for name in ("status", "known_at", "content_hash")} == {
        "status": 1, "known_at": 2, "content_hash": 2,
    }  # fmt: skip
    assert {*shelf} <= {"status", "event_timestamp", "known_at", "content_hash", "sold_1d", "distance"}
    assert found.pop("customer_orders.late_rate_7d") == 1
    assert found.pop("customer_facts.status") == 1
    assert all(name.startswith("customer_facts.") for name in found)


def alter_born(shop: Shop) -> tuple[str, str, int]:
    """Changes one value of the table of customers and leaves its hashes and its commit as they were.

    Returns:
        The key and the time of its row, and what it was.
    """
    path = shop.state / "offline" / "customer_facts"
    table = DeltaTable(path)
    commit = {key: value for key, value in table.history(1)[0].items() if key.startswith("isthmus.")}
    rows = pa.table(table.to_pyarrow_table())
    born = rows["born"].to_pylist()
    place = next(n for n, year in enumerate(born) if year is not None)
    key = str({"customer": rows["customer"][place].as_py()})
    time, before = rows["event_timestamp"][place].as_py(), born[place]
    born[place] += 1
    rows = rows.set_column(
        rows.column_names.index("born"), rows.schema.field("born"), pa.chunked_array([born], pa.int32())
    )
    write_deltalake(path, rows, mode="overwrite", commit_properties=CommitProperties(custom_metadata=commit))
    return key, f"{time:%Y-%m-%dT%H:%M:%S}Z", before


def test_verify_names_an_offline_row_that_was_altered(built: Shop, project: Open) -> None:
    alter_born(built)
    assert failed(built, project, all_keys=False) == {"customer_facts.born": 1}


def test_verify_finds_an_offline_row_whose_content_is_not_what_was_written(built: Shop, project: Open) -> None:
    alter_born(built)
    with pytest.raises(DataError, match=r"customer_facts: .*\(1 of 50 rows differ from what was written\)"):
        verify(project(built), all_keys=True)


def test_a_pushed_row_is_left_out_until_the_table_has_caught_up(built: Shop, project: Open) -> None:
    contract, now = project(built).applied(), project(built).now()
    view = contract.view("customer_orders")
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        values = {"orders_7d": 99, "mean_amount_7d": 0.5, "late_rate_7d": 0.5}
        pushed = {c.name: from_python([values.get(c.name)], c.dtype) for c in view.fields}
        at = np.array([now])
        counts = OnlineStore(client, contract).write(view, {"customer": [0]}, at, at, pushed)
        assert counts.written == 1
        verdict = verify(project(built), all_keys=True)
        assert verdict.ahead == {"customer_orders": 1, "shelf_demand": 0, "customer_facts": 0}
        assert require_passed(verdict).views["customer_orders"]["orders_7d"].compared == 59
        assert "left out: 1 keys of customer_orders, pushed after everything in the table" in verdict.limits
        key = sorted(client.keys("shop:customer:*"))[5]
        client.hdel(key, "customer_orders")
    assert failed(built, project)["customer_orders.status"] == 1


def test_a_row_from_the_future_hides_nothing(built: Shop, project: Open) -> None:
    contract, later = project(built).applied(), np.array([project(built).now() + HOUR])
    view = contract.view("customer_orders")
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        nothing = {c.name: from_python([None], c.dtype) for c in view.fields}
        OnlineStore(client, contract).write(view, {"customer": [0]}, later, later, nothing)
    assert failed(built, project)["customer_orders.status"] == 1


def test_materialize_decides_until_what_the_whole_history_knows(built: Shop, project: Open) -> None:
    """The row that became known last may have been superseded before: the table knows of its time all the same."""
    orders, now = pq.read_table(built.orders), project(built).now()
    landed = pa.array([now - 1_000_000], pa.int64()).cast(orders.schema.field("delivered_at").type)
    late = orders.slice(0, 1).set_column(4, "delivered_at", landed)
    pq.write_table(pa.concat_tables([late, orders.slice(1)]), built.orders)
    build(project(built))
    contract, known = project(built).applied(), np.array([now - 2_000_000])
    view = contract.view("customer_orders")
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        nothing = {c.name: from_python([None], c.dtype) for c in view.fields}
        OnlineStore(client, contract).write(view, {"customer": [1_000_003]}, known, known, nothing)
        materialize(project(built))
    verdict = require_passed(verify(project(built), all_keys=True))
    assert set(verdict.ahead.values()) == {0}


@pytest.mark.accept
def test_verify_sees_that_redis_is_behind_the_tables(built: Shop, project: Open) -> None:
    orders = pq.read_table(built.orders)
    last = orders.slice(len(orders) - 1)
    later = pa.array(
        [clock.moment(clock.micros(last["ordered_at"][0].as_py()) + HOUR)], orders.schema.field("ordered_at").type
    )
    more = last.set_column(3, "ordered_at", later).set_column(4, "delivered_at", later)
    pq.write_table(pa.concat_tables([orders, more]), built.orders)
    build(project(built))
    found = failed(built, project)
    assert found["customer_orders.orders_7d"] == 1
    materialize(project(built))
    require_passed(verify(project(built), all_keys=True))


def test_a_verdict_is_of_the_contract(built: Shop, project: Open) -> None:
    verdict = verify(project(built))
    assert verdict.contract == project(built).definitions.contract.hash
    assert verdict.at == project(built).now()


LIMITS = """
[server]
workers = 2

[server.limits]
rows = 7
values = 5
body_bytes = 250
"""


@pytest.mark.accept
def test_the_limits_of_the_project_do_not_limit_what_is_compared(built: Shop, project: Open) -> None:
    whole = verify(project(built), all_keys=True)
    built.append(LIMITS, "isthmus.toml")
    create(project(built), "somebody", ["read:*"])
    split = require_passed(verify(project(built), all_keys=True))
    assert split.as_dict() == whole.as_dict()
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        held = [key for key in sorted(client.keys("shop:customer:*")) if client.hexists(key, "customer_facts")]
        client.hdel(held[-1], "customer_facts")
    assert failed(built, project)["customer_facts.status"] == 1


def test_a_request_that_is_too_long_is_split(built: Shop, project: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = project(built)
    question = [("customer_orders", "orders_7d")], {"customer": list(range(1_000_000, 1_000_200))}, 200
    answers = []
    for limit in (api_client.LIMITS, replace(api_client.LIMITS, body_bytes=400)):
        monkeypatch.setattr(api_client, "LIMITS", limit)
        with opened.redis() as url, private_api(opened, opened.applied(), url, opened.now()) as api:
            answers.append(api.lookup(*question))
    assert answers[0].num_rows == 200
    assert answers[1].equals(answers[0])


@pytest.mark.accept
def test_between_two_questions_there_may_be_any_time(built: Shop, project: Open) -> None:
    opened = project(built)
    with opened.redis() as url, private_api(opened, opened.applied(), url, opened.now()) as api:
        first = api.lookup([("customer_orders", "orders_7d")], {"customer": [1_000_003]}, 1)
        time.sleep(WAIT_SECONDS + 1)  # the server has closed the connection
        assert api.lookup([("customer_orders", "orders_7d")], {"customer": [1_000_003]}, 1).equals(first)


@pytest.mark.accept
def test_values_that_have_expired_are_compared_too(built: Shop, project: Open) -> None:
    built.replace(f"now = {NOW}\n", "", "isthmus.toml")
    verdict = require_passed(verify(project(built), all_keys=True))
    assert verdict.at > clock.now() - HOUR
    assert verdict.views["customer_orders"]["orders_7d"].compared == 60


def test_a_server_that_does_not_start_is_said_to_be_that(
    built: Shop, project: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "uvicorn.py").write_text("raise RuntimeError('no server today')")
    monkeypatch.setenv("PYTHONPATH", f"{broken}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(DependencyError, match=r"the API: ended with exit code 1 .*no server today.*verify-") as caught:
        verify(project(built))
    assert caught.value.exit_code == 3
    assert not (built.state / "verdicts").exists()


def test_rows_of_another_contract_are_refused_by_name(built: Shop, project: Open) -> None:
    with EmbeddedRedis(built.state / "redis") as server, connect(server.url) as client:
        key = sorted(client.keys("shop:customer:*"))[0]
        row = bytearray(client.hget(key, "customer_orders"))
        row[1:9] = bytes(8)
        client.hset(key, "customer_orders", bytes(row))
    with pytest.raises(ContractMismatch, match="customer_orders"):
        verify(project(built), all_keys=True)


def test_an_example_has_key_and_time(built: Shop, project: Open) -> None:
    key, time, born = alter_born(built)
    document = json.loads(verify(project(built)).dumps())
    (example,) = document["views"]["customer_facts"]["born"]["examples"]
    assert example == {
        "key": key, "offline": born + 1, "online": born, "event_timestamp": time,
    }  # fmt: skip
    assert document["views"]["customer_facts"]["born"].items() >= {
        "compared": 50, "differing": 1, "worst": 1.0, "tolerance": 0.0,
    }.items()  # fmt: skip


def test_verify_shows_a_line_per_view_and_what_differs_below(built: Shop, tmp_path: Path) -> None:
    key, time, born = alter_born(built)
    done = run("verify", "--html", str(tmp_path / "page.html"), cwd=built.root)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    starts = [line.split()[0] for line in lines if line.strip()]
    for view in ("customer_facts", "customer_orders", "shelf_demand"):
        assert starts.count(view) == 1
    assert starts.count("customer_facts.born") == 2
    assert any(f"{time}  {key}  offline {born + 1}  online {born}" in line for line in lines)
    assert any(line.startswith("Not compared: the package, because no exported package") for line in lines)
    text = (tmp_path / "page.html").read_text()
    assert text == (built.state / "verdicts" / "late_order.html").read_text()
    assert "customer_facts.born" in text


HOSTILE = "<script>document.title='taken'</script>&\"'"


def hostile() -> Verdict:
    """Differences of every kind, under names that are markup."""
    values = from_python([1.0, 2.0, float("nan"), float("inf"), None, 3.0], Float64)
    others = from_python([1.5, None, 1.0, float("-inf"), 7.0, 3.0], Float64)
    texts = from_python([HOSTILE, None, "é", "x", "y", "z"], String)
    keys = [f"{HOSTILE} {n}" for n in range(6)]
    huge = from_python([1.7e308, -1.7e308], Float64)
    times = [0, None, -(1 << 62), 1, 2, 3]
    bad = {
        "number": compare(keys, values, others, Float64, times=times),
        "huge": compare(keys[:2], huge, Values(-huge.data, huge.valid), Float64),
        "whole": compare(keys[:1], from_python([1 << 62], Int64), from_python([(1 << 62) + 1], Int64), Int64),
        HOSTILE: compare(keys, texts, from_python(["a"] * 6, String), String),
    }  # fmt: skip
    many = {f"f{n}": bad["number"] for n in range(60)}
    return Verdict("c" * 64, 0, {HOSTILE: bad, "many": many}, {}, {HOSTILE: 3}, "p" * 64, bad["number"],
                   {"model.onnx": bad["number"]}, {HOSTILE: bad["huge"]}, {HOSTILE: HOSTILE})  # fmt: skip


def _listen(view: Page, asked: list[str], said: list[str]) -> None:
    view.on("request", lambda request: asked.append(request.url))
    view.on("console", lambda message: said.append(message.text))


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.accept)])
def test_the_page_needs_nothing_and_fits_a_phone(tmp_path: Path, scheme: Literal["light", "dark"]) -> None:
    file = tmp_path / "page.html"
    file.write_text(verdict_page(hostile(), HOSTILE))
    with sync_playwright() as playwright:
        browser = launch(playwright)
        paper = set()
        for width in (390, 1200):
            view = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme).new_page()
            asked: list[str] = []
            said: list[str] = []
            _listen(view, asked, said)
            view.goto(file.as_uri())
            assert asked == [file.as_uri()]
            assert said == []
            assert view.title() == f"Verdict of {HOSTILE}"
            assert view.evaluate("document.documentElement.scrollWidth") <= width
            card = view.locator("section.card", has_text=f"{HOSTILE}.number").first
            card.locator("svg circle").first.wait_for()
            assert card.locator("svg circle").count() == 1
            for side in ("1.5", "1970-01-01T00:00:00Z"):
                place = card.get_by_text(side, exact=True).first.bounding_box()
                assert place is not None
                assert place["x"] + place["width"] <= width
            assert view.locator("script").count() == 0
            paper.add(view.evaluate("getComputedStyle(document.body).backgroundColor"))
        browser.close()
    assert paper == {"rgb(255, 255, 255)" if scheme == "light" else "rgb(18, 22, 28)"}


def test_images_of_a_verdict_are_drawings_whatever_names_hold() -> None:
    found = images(hostile())
    assert len(found) == 1 + IMAGES
    for name, address in found.items():
        drawing = ET.fromstring(base64.b64decode(address.partition(",")[2]))  # noqa: S314 - made here
        kinds = {element.tag.rpartition("}")[2] for element in drawing.iter()}
        assert kinds <= {"svg", "style", "g", "text", "rect", "line", "circle"}, name
    markdown = MarkdownIt("commonmark")
    markdown.validateLink = lambda url: True  # type: ignore[method-assign]  # noqa: ARG005 - it knows no SVG; Dagster does
    told = markdown.render(plots(found)["raw_value"])
    assert told.count("<img") == len(found)
    assert "<script" not in told
    assert "is on the page" in plots(dict.fromkeys("abc", "x" * 20_000))["raw_value"]


def test_a_page_of_a_verdict_that_passed_is_small(built: Shop, project: Open) -> None:
    require_passed(verify(project(built), all_keys=True))
    text = (built.state / "verdicts" / "late_order.html").read_text()
    assert len(text) < 20_000
    assert "<figure" not in text
    assert "Differences" not in text
    assert "customer_facts.born" in text


def test_the_file_of_a_verdict_keeps_every_part() -> None:
    verdict = hostile()
    read = Verdict.loads(verdict.dumps())
    assert read.dumps() == verdict.dumps()
    assert (read.named().keys(), read.skipped) == (verdict.named().keys(), verdict.skipped)
