"""Pushed rows in a project: in the history, the verdict and training sets, and beside builds."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

import isthmus
from isthmus import training_data
from isthmus.features import clock
from isthmus.features.days import Days
from isthmus.features.online.pushes import stream
from isthmus.features.publishing.collect import CollectedPushes
from isthmus.features.redis.connection import connect
from isthmus.orchestration.server.collect import collect
from isthmus.orchestration.tables.build import build, build_range, outdated_views
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.verification.verify import require_passed, verify
from tests.orchestration.server.served import served
from tests.orchestration.shop import Open, Shop

VIEW = "customer_orders"


def pushed(http: httpx.Client, customers: list[int], at: int, known: int, orders: int, **more: Any) -> Any:
    columns = {"orders_7d": [orders] * len(customers), "mean_amount_7d": [0.5] * len(customers),
               "late_rate_7d": [0.25] * len(customers)}  # fmt: skip
    times = {"event_timestamp": [at] * len(customers), "known_at": [known] * len(customers)}
    body = {"push_source_name": VIEW, "df": {"customer": customers, **times, **columns}, **more}
    answer = http.post("/push", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def orders_at(root: Path, customer: int, moments: list[int], *, as_served: bool = False) -> list[Any]:
    times = pa.array(moments, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    spine = pa.table({"customer": [customer] * len(moments), "event_timestamp": times})
    joined = training_data(root, [f"{VIEW}:orders_7d"], spine, as_served=as_served).table()
    return list(joined[f"{VIEW}__orders_7d"].to_pylist())


@pytest.mark.accept
def test_pushed_rows_are_in_the_history_the_verdict_and_training_sets(built: Shop, project: Open) -> None:
    opened = project(built)
    now, minute = opened.now(), 60_000_000
    unseen = 900_001
    before = orders_at(built.root, 0, [now])
    with served(opened) as http:
        assert pushed(http, [0, unseen], now - 5 * minute, now - 2 * minute, 77) == {"rows": 2, "written": 2}
        assert pushed(http, [1], now - 5 * minute, now - 2 * minute, 78, to="offline") == {"rows": 1, "written": 0}
        assert pushed(http, [2], now - 5 * minute, now - 2 * minute, 79, to="online") == {"rows": 1, "written": 1}
        assert pushed(http, [0], now - 9 * minute, now - minute, 1) == {"rows": 1, "written": 0}
        counts = collect(project(built))
        assert (counts[VIEW].rows, counts[VIEW].added) == (4, 4)
        assert collect(project(built))[VIEW] == CollectedPushes()
        # By event and known time: not before it was known, and what is older by event time never hides what is newer.
        assert orders_at(built.root, 0, [now, now - minute, now - 2 * minute, now - 2 * minute - 1]) == [
            77, 77, 77, *before,
        ]  # fmt: skip
        assert orders_at(built.root, unseen, [now, now - 3 * minute]) == [77, None]
        assert orders_at(built.root, 1, [now]) == [78]
        assert orders_at(built.root, 2, [now]) != [79], "only online"
        assert outdated_views(project(built)) == []
        materialize(project(built))
        verdict = require_passed(verify(project(built), all_keys=True))
        assert (verdict.differing, verdict.ahead[VIEW]) == (0, 0)
        # A build of all days, or of the last, takes nothing away from it.
        written = build(project(built), [VIEW])[VIEW]
        assert (written.pushed, written.replaced, written.changed) == (4, 0, False)
        last = datetime.fromtimestamp(now // 1_000_000, UTC).date() - timedelta(days=1)
        part = build_range(project(built), [VIEW], within=Days.parse(str(last), str(last + timedelta(days=1))))[VIEW]
        assert (part.added, part.changed) == (0, False)
        assert orders_at(built.root, unseen, [now]) == [77]
        assert outdated_views(project(built)) == []
        with opened.redis() as url, connect(url) as client:
            assert client.xlen(stream("shop", VIEW)) == 1, "the last row stays, as a sign that nothing is lost"


def test_a_build_of_one_view_keeps_no_other_waiting(built: Shop, project: Open) -> None:
    opened = project(built)
    event = [clock.moment(opened.now() - 300_000_000)]
    facts = {"customer": [900_001], "event_timestamp": event, "city": ["x"],
             **{name: [None] for name in ("member", "born", "last_call", "token", "trips", "words")}}  # fmt: skip
    orders = {"customer": [900_001], "event_timestamp": event, "orders_7d": [1], "mean_amount_7d": [0.5],
              "late_rate_7d": [None]}  # fmt: skip
    for view, rows in ((VIEW, orders), ("customer_facts", facts)):
        isthmus.push(opened, view, rows, to="offline")
    with ThreadPoolExecutor() as pool:
        with opened.building([VIEW]):
            assert set(collect(opened, wait=False)) == {"shelf_demand", "customer_facts"}
            materialize(opened, ["customer_facts"])
            waiting = pool.submit(collect, project(built))
            with pytest.raises(TimeoutError):
                waiting.result(0.5)
            # Builds do not wait for each other.
            build(opened, ["shelf_demand"])
        assert waiting.result(60)[VIEW].added == 1


def test_a_push_that_is_older_than_the_history_completes_it(built: Shop, project: Open) -> None:
    opened = project(built)
    moments = ["0001-01-01T00:00:00Z", "1969-12-31T23:59:59.999999Z", "2020-01-01T12:00:00Z"]
    for moment in moments:
        rows = {"customer": [900_001], "event_timestamp": [moment], "known_at": [moment], "orders_7d": [7],
                "mean_amount_7d": [0.5], "late_rate_7d": [None]}  # fmt: skip
        isthmus.push(opened, VIEW, rows, to="offline")
        assert collect(opened)[VIEW].added == 1
    old = Days.parse("2020-01-01", "2020-01-02")
    for written in (build(project(built), [VIEW])[VIEW], build_range(project(built), [VIEW], within=old)[VIEW]):
        assert (written.added, written.changed) == (0, False)
    noon = clock.micros(datetime(2020, 1, 1, 12, tzinfo=UTC))
    assert orders_at(built.root, 900_001, [noon - 1, noon, -1]) == [None, 7, 7]


def test_a_defect_in_one_table_keeps_no_other_waiting(
    built: Shop, project: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def broken(_client: Any, _project: str, _offline: Any, table: str, _definitions: Any) -> CollectedPushes:
        done.append(table)
        if len(done) == 1:
            raise OverflowError("a defect")
        return CollectedPushes()

    monkeypatch.setattr("isthmus.orchestration.server.collect.collect_table", broken)
    with pytest.raises(OverflowError, match="a defect"):
        collect(project(built))
    assert len(done) == 3
