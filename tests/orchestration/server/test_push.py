"""`isthmus.push` does what `/push` of the API does, and refuses it in the same words."""

from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import isthmus
from isthmus import DependencyError, RequestError
from isthmus.features import clock
from isthmus.features.offline.store import OfflineStore
from isthmus.features.values.plain import plain
from isthmus.orchestration.cli.screens.writer import show
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.collect import collect
from isthmus.orchestration.server.lookup import lookup
from isthmus.orchestration.status import status
from tests.orchestration.server.served import served
from tests.orchestration.shop import Open, Shop

VIEW = "customer_facts"


def facts(customer: Any, moment: datetime) -> dict[str, list[Any]]:
    """A row of the view with a value for each feature, and one without any."""
    row = {"city": "Zürich", "member": True, "born": 1970, "last_call": moment, "token": b"\x00\xff",
           "trips": [0.5, float("inf")], "words": ["a", ""]}  # fmt: skip
    times = {"event_timestamp": [moment] * 2, "known_at": [moment] * 2}
    return {"customer": [customer, customer + 1], **times, **{name: [value, None] for name, value in row.items()}}


def waiting(project: Project) -> tuple[int | None, int | None]:
    view = status(project, measure=False).views[VIEW]
    return view.waiting, view.waiting_since


def test_rows_in_any_form_reach_both_stores(built: Shop, project: Open, capsys: pytest.CaptureFixture[str]) -> None:
    opened = project(built)
    moment = clock.moment(opened.now()) - timedelta(minutes=5, microseconds=1)
    assert isthmus.push(built.root, VIEW, facts(5000, moment)) == {"rows": 2, "written": 2}
    assert isthmus.push(opened, VIEW, pa.table(facts(5010, moment)), to="offline") == {"rows": 2, "written": 0}
    assert isthmus.push(opened, VIEW, pl.DataFrame(facts(5020, moment)), to="online") == {"rows": 2, "written": 2}
    # pandas has a float where a whole number is missing.
    frame = pd.DataFrame(facts(5030, moment))
    assert frame["born"].dtype == float
    assert isthmus.push(opened, VIEW, frame) == {"rows": 2, "written": 2}
    assert isthmus.push(opened, VIEW, facts(5030, moment - timedelta(days=1))) == {"rows": 2, "written": 0}
    assert waiting(opened) == (None, None), "the embedded Redis does not run"
    with opened.redis():
        rows_waiting, since = waiting(opened)
        assert rows_waiting == 8
        assert 0 <= clock.now() - (since or 0) < 60_000_000
        show(status(opened, measure=False).screen())
        assert f"8 pushed rows wait for the history of {VIEW} since 20" in capsys.readouterr().out
        assert collect(opened)[VIEW].added == 8
        assert waiting(opened) == (0, None)
        isthmus.push(opened, VIEW, facts(5030, moment), to="offline")
        assert waiting(opened)[0] == 2
    assert collect(opened)[VIEW].added == 0
    view = opened.applied().views[VIEW]
    rows = {row["customer"]: row for row in OfflineStore(opened.offline).history(view).table().to_pylist()
            if row["known_at"] == moment}  # fmt: skip
    assert {customer for customer in rows if customer >= 5000} == {5000, 5001, 5010, 5011, 5030, 5031}
    for customer in (5000, 5010, 5030):
        wanted = facts(customer, moment)
        assert [{name: row[name] for name in wanted} for row in (rows[customer], rows[customer + 1])] == pa.table(
            wanted
        ).to_pylist()
    found = lookup(opened, f"{VIEW}:born,{VIEW}:token", [f"customer={n}" for n in (5000, 5010, 5020, 5030)])
    assert [column["values"] for column in found["results"][-2:]] == [
        [1970, None, 1970, 1970],
        ["AP8=", None, "AP8=", "AP8="],
    ]


def test_what_is_refused_is_refused_as_by_the_api(built: Shop, project: Open) -> None:
    opened = project(built)
    good, later = facts(1, clock.moment(opened.now())), clock.moment(opened.now() + 1)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("nothing", good),
        (VIEW, {**good, "event_timestamp": [later, later], "born": ["x", None], "more": [1, 2]}),
        (VIEW, {**good, "customer": [1, None]}),
        (VIEW, {**good, "customer": [1]}),
        (VIEW, {**good, "born": [2**31, None]}),
        (VIEW, {name: values for name, values in good.items() if name not in ("city", "event_timestamp")}),
        (VIEW, {**good, "known_at": [datetime(2024, 1, 1), datetime(2024, 1, 1)]}),  # noqa: DTZ001 - that is the fault
        (VIEW, {**good, "event_timestamp": np.array(["2024-01-01T00:00:00.000000001"] * 2, "datetime64[ns]")}),
        (VIEW, {name: [] for name in good}),
    ]
    with served(opened) as http:
        for view, rows in wrong:
            df = {name: plain(pa.array(values)) for name, values in rows.items()}
            answer = http.post("/push", json={"push_source_name": view, "df": df})
            assert answer.status_code in (404, 422), answer.text
            with pytest.raises(RequestError) as refused:
                isthmus.push(opened, view, rows)
            said = answer.json()
            assert {name: said[name] for name in refused.value.as_dict()} == refused.value.as_dict()
    with pytest.raises(RequestError, match=r"to: is 'both'; expected one of offline, online, online_and_offline"):
        isthmus.push(opened, VIEW, good, to="both")
    with pytest.raises(RequestError, match="rows: is a list; expected column names with lists"):
        isthmus.push(opened, VIEW, [good])
    with pytest.raises(RequestError, match=r"df.born: .*a list of values of one type"):
        isthmus.push(opened, VIEW, {**good, "born": [1, "x"]})
    built.append("\n[server.limits]\nrows = 3\nwaiting_rows = 3\n", "isthmus.toml")
    with pytest.raises(RequestError, match="4 rows; expected 3 at most"):
        isthmus.push(project(built), VIEW, {name: values * 2 for name, values in good.items()})
    isthmus.push(project(built), VIEW, good)
    with pytest.raises(
        DependencyError, match=r"2 pushed rows wait for it; 2 more exceed the limit\. Run `isthmus push"
    ):
        isthmus.push(project(built), VIEW, good)
