"""The compact forms of an answer hold what the JSON answer holds."""

from base64 import b64encode
from datetime import datetime
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.clock import Status, micros
from isthmus.features.online.plan import ViewAnswer
from isthmus.features.request.graph import RowGraph
from isthmus.features.types import TYPES, Int64
from isthmus.features.values.arrow import ARROW, from_arrow
from isthmus.features.values.rows import RowCodec
from isthmus.serving.lookup import arrow
from isthmus.serving.lookup.lookup import Lookup
from isthmus.serving.wire.encode import LABELS
from isthmus.serving.wire.errors import NotAcceptableError
from isthmus.serving.wire.formats import Format, negotiate
from tests.features.support import bits_of, columns_of, make_contract, make_view, values_of
from tests.serving.support import CONTRACT, EVERYTHING, FLIGHT, NOW, Server

ARROW_STREAM, VALUES = Format.ARROW.value, Format.VALUES.value
ASKED: list[dict[str, Any]] = [
    {"features": [f"everything:{name}" for name in "abcdefgh"], "entities": {"flight": [1, 2, 2**62 + 1, 4, 1]}},
    {
        "features": ["punctuality:late_rate", "punctuality:flights"],
        "entities": {"carrier": ["UA", "AA", "B6", "OO", "ZZ", "é", ""]},
    },
    {
        "features": ["route:flights", "everything:h", "punctuality:flights"], "full_feature_names": True,
        "entities": {"flight": [1, 1, 2], "carrier": ["UA", "AA", "UA"]},
    },
    {"feature_service": "late", "entities": {"carrier": ["UA"], "flight": [9]}},
]  # fmt: skip


def ask(server: Server, asked: dict[str, Any], accept: str) -> httpx.Response:
    return server.http.post("/get-online-features", json=asked, headers={"accept": accept})


def read(answer: httpx.Response) -> pa.RecordBatch:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == ARROW_STREAM
    with pa.ipc.open_stream(answer.content) as stream:
        (batch,) = list(stream)
    batch.validate(full=True)
    return batch


def plain(column: pa.Array) -> list[Any]:
    """Arrow values in the notation of the JSON answer."""
    if pa.types.is_timestamp(column.type):
        seconds = [None if value is None else value / 1e6 for value in column.cast(pa.int64()).to_pylist()]
        return [value if value is None or value % 1 else int(value) for value in seconds]
    words = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    return [
        b64encode(value).decode() if isinstance(value, bytes) else
        words.get(str(value), value) if isinstance(value, float) else value
        for value in column.to_pylist()
    ]  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
def test_arrow_holds_the_values_of_the_json_answer(server: Server, asked: dict[str, Any]) -> None:
    full = ask(server, asked, "*/*").json()
    answer = ask(server, asked, ARROW_STREAM)
    batch = read(answer)
    names = full["metadata"]["feature_names"]
    assert batch.schema.names[: len(names)] == names
    assert batch.schema.metadata == {b"isthmus-contract": CONTRACT.hash.encode()}
    assert answer.headers["isthmus-contract"] == CONTRACT.hash
    for name, result in zip(names, full["results"], strict=True):
        assert plain(batch[name]) == result["values"]
    references = asked.get("features", ["punctuality:late_rate", "punctuality:flights"])
    views = list(dict.fromkeys(reference.partition(":")[0] for reference in references))
    assert batch.schema.names[len(names) :] == [
        f"{view}__{part}" for view in views for part in ("status", "event_timestamp")
    ]
    for reference, result in zip(references, full["results"][-len(references) :], strict=True):
        view = reference.partition(":")[0]
        statuses = batch[f"{view}__status"].to_pylist()
        times = batch[f"{view}__event_timestamp"].cast(pa.int64()).to_pylist()
        for status, time, one, at, value in zip(
            statuses, times, result["statuses"], result["event_timestamps"], result["values"], strict=True
        ):
            assert one == ("NULL_VALUE" if status == "PRESENT" and value is None else status)
            assert (0 if time is None else time) == micros(datetime.fromisoformat(at))
            assert (time is None) == (status == "NOT_FOUND")


def test_arrow_columns_have_the_types_of_the_contract(server: Server) -> None:
    batch = read(ask(server, ASKED[0], ARROW_STREAM))
    for column in (FLIGHT, *EVERYTHING.fields):
        assert batch.schema.field(column.name).type == ARROW[column.dtype.name]
    assert batch.schema.field("everything__status").type == pa.dictionary(pa.int8(), pa.string())
    assert batch.schema.field("everything__event_timestamp").type == pa.timestamp("us", tz="UTC")
    # A NaN is a value; there is no flight 4.
    assert batch["d"].null_count == 1
    assert batch["e"].null_count == 2


@pytest.mark.parametrize("asked", ASKED)
def test_values_hold_what_the_json_answer_holds(server: Server, asked: dict[str, Any]) -> None:
    full = ask(server, asked, "application/json").json()
    answer = ask(server, asked, VALUES)
    assert answer.headers["content-type"] == VALUES
    body = answer.json()
    assert body.keys() == {"metadata", "values", "statuses"}
    assert body["metadata"] == full["metadata"]
    assert body["values"] == [result["values"] for result in full["results"]]
    batch = read(ask(server, asked, ARROW_STREAM))
    assert body["statuses"] == {
        name.removesuffix("__status"): batch[name].to_pylist() for name in batch.schema.names if "__status" in name
    }


FIELDS = {f"f{n}": dtype for n, dtype in enumerate(TYPES.values())}
EVERY_TYPE = make_view(FIELDS, {"flight": Int64}, name="every_type")
ROWS = st.lists(st.tuples(st.sampled_from(Status), st.integers(0, NOW), values_of(FIELDS)), min_size=1, max_size=20)


def _none(name: str) -> RowGraph:
    raise KeyError(name)


@given(rows=ROWS)
def test_arrow_is_what_the_view_answered(rows: list[tuple[Status, int, dict[str, Any]]]) -> None:
    lookup = Lookup(
        make_contract(EVERY_TYPE), [("every_type", name) for name in FIELDS], full_names=False, graphs=_none
    )
    columns = columns_of(EVERY_TYPE, [row for *_, row in rows])
    status = np.array([status for status, *_ in rows], np.uint8)
    event = np.array([event for _, event, _ in rows], np.int64)
    codec = RowCodec(EVERY_TYPE)
    answer = ViewAnswer(codec.decode(codec.encode(event, event, columns)).columns, status, event, event)
    keys = {"flight": list(range(len(rows)))}
    body = arrow.stream(lookup, {"flight": FLIGHT}, keys, {"every_type": answer}, {})
    with pa.ipc.open_stream(body) as stream:
        batch = stream.read_next_batch()
    batch.validate(full=True)
    assert batch["flight"].to_pylist() == keys["flight"]
    for name, dtype in FIELDS.items():
        assert batch[name].type == ARROW[dtype.name]
        assert bits_of(from_arrow(batch[name], dtype), dtype) == bits_of(columns[name], dtype)
    assert batch["every_type__status"].to_pylist() == [LABELS[code] for code in status]
    times = batch["every_type__event_timestamp"].cast(pa.int64()).to_pylist()
    assert times == [None if status >= Status.NOT_FOUND else at for status, at, _ in rows]


def test_ten_thousand_rows(server: Server) -> None:
    asked = {"features": ["everything:b", "everything:g"], "entities": {"flight": list(range(10_000))}}
    batch = read(ask(server, asked, ARROW_STREAM))
    assert batch.num_rows == 10_000
    assert batch["b"][:4].to_pylist() == [None, -(2**31), 5, None]


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", Format.JSON),
        ("*/*", Format.JSON),
        ("text/html", Format.JSON),
        ("text/html;q=0", Format.JSON),
        ("application/*", Format.JSON),
        (ARROW_STREAM, Format.ARROW),
        (ARROW_STREAM.upper(), Format.ARROW),
        (f"{ARROW_STREAM}, */*", Format.ARROW),
        (f"application/json, {ARROW_STREAM}", Format.JSON),
        (f"application/json;q=0.5, {ARROW_STREAM};q=0.6", Format.ARROW),
        (f"application/json; q=0.5, {VALUES};q=0.6,{ARROW_STREAM};q=0.1", Format.VALUES),
        (f"{ARROW_STREAM};q=0, {VALUES};q=0", Format.JSON),
        ("application/json;q=0, */*", Format.VALUES),
        (f"*/*;q=0, {ARROW_STREAM}", Format.ARROW),
        (f"{ARROW_STREAM};q=high", Format.ARROW),
        (",;,=", Format.JSON),
    ],
)
def test_the_form_that_is_accepted(accept: str, form: Format) -> None:
    assert negotiate(accept) is form


@pytest.mark.parametrize("accept", ["application/json;q=0", "*/*;q=0", "application/*;q=0.0, text/html"])
def test_who_accepts_no_form_gets_none(server: Server, accept: str) -> None:
    with pytest.raises(NotAcceptableError):
        negotiate(accept)
    answer = ask(server, ASKED[0], accept)
    assert answer.status_code == 406
    assert "arrow" in answer.json()["expected"]
