"""What is said of bytes that are no JSON in UTF-8: in words that are true of them, wherever they stand."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.serving.wire.body import FAILURES, unreadable
from tests.serving.support import Server

COLUMNS = msgspec.json.Decoder(dict[str, dict[str, msgspec.Raw]])
ALL = msgspec.json.Decoder()


def refused(body: bytes, decoder: msgspec.json.Decoder[Any] = COLUMNS) -> tuple[str, str]:
    """Where and what."""
    with pytest.raises(FAILURES) as caught:
        decoder.decode(body)
    error = unreadable("body", body, caught.value)
    return error.where, error.found


def body_of(column: bytes, name: bytes = b"a") -> bytes:
    return b'{"entities": {"b": ["x"], "' + name + b'": [' + column + b"]}}"


@pytest.mark.parametrize("decoder", [COLUMNS, ALL], ids=["columns", "all"])
@given(
    word=st.sampled_from(["NaN", "Infinity", "-Infinity"]),
    before=st.lists(st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)),
    spaces=st.sampled_from([b"", b" ", b"\n\t"]),
)
def test_a_number_that_is_no_json_is_named_with_its_column(
    decoder: msgspec.json.Decoder[Any], word: str, before: list[Any], spaces: bytes
) -> None:
    start = b'{"entities": {"b": ["x"], "late_rate"' + spaces + b":[" + b"".join(b"%s, " % _json(x) for x in before)
    where, found = refused(start + word.encode() + b", 1]}}", decoder)
    assert (where, found) == ("body, 'late_rate'", f"{word} is not valid JSON (byte {len(start)})")


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (body_of(b"NaN", name=b'a\\"b'), "body"),
        (body_of(b'"NaN", NaN'), "body"),
        (body_of(b'"a:", NaN'), "body"),
        (b"NaN", "body"),
        (b'{"entities": Infinity}', "body, 'entities'"),
        (body_of(b'"' + b"y" * 100_000 + b'"], "c": [1, NaN'), "body, 'c'"),
    ],
)
def test_no_other_column_is_named(body: bytes, where: str) -> None:
    assert refused(body)[0] == where


UNITS = st.lists(st.sampled_from(["\\ud83d", "\\uDE00", "\\ud83d\\ude00", "\\\\", "\\n", "\\u0041", "ud800", "é"]))


@given(units=UNITS, after=st.sampled_from([b"", b" " * 50]))
def test_half_of_a_pair_is_called_so_and_its_place_is_in_the_body(units: list[str], after: bytes) -> None:
    text = "".join(units)
    body = body_of(f'"{text}"'.encode()) + after
    lone = _lone(json.loads(f'"{text}"'))
    if not lone:
        COLUMNS.decode(body)
        return
    _, found = refused(body)
    half, _, place = found.partition(" is half of a surrogate pair (byte ")
    at = int(place.removesuffix(")"))
    assert body[at : at + 6].decode() == half
    # Before it is what can be read.
    before = body[body.index(b'["x"], "a": ["') + 14 : at].decode()
    assert not _lone(json.loads(f'"{before}"'))
    assert _lone(json.loads(f'"{before}{half}"'))


def _lone(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


@pytest.mark.parametrize(
    "text", [b"", b'{"a', b'{"entities": {"a": ["\\ud83d', b'{"entities": {"a": ["\\ud83d\\ude', b'{"a": ["\\\\ud83d"']
)
def test_what_is_cut_off_is_called_truncated(text: bytes) -> None:
    assert refused(text, ALL) == ("body", "Input data was truncated")


@given(before=st.text(max_size=5), wrong=st.sampled_from([b"\xff", b"\x80", b"\xed\xa0\x80", b"\xc3"]))
def test_a_byte_that_is_not_utf8_has_its_place_in_the_body(before: str, wrong: bytes) -> None:
    start = b'{"entities": {"b": ["x"], "a": [' + json.dumps(before, ensure_ascii=False).encode()[:-1]
    _, found = refused(start + wrong + b'"]}}', ALL)
    assert found == f"byte {len(start)} of its text, 0x{wrong[0]:02x}, is not UTF-8"


@pytest.mark.parametrize(
    ("path", "body", "where", "found", "expected"),
    [
        ("/predict", b'{"entities": {"carrier": ["UA"]}, "request": {"distance": [1, NaN]}}', "body, 'distance'",
         "NaN is not valid JSON (byte 62)", "a number"),
        ("/push", b'{"push_source_name": "punctuality", "df": {"late_rate": [-Infinity]}}', "body, 'late_rate'",
         "-Infinity is not valid JSON (byte 57)", '"-Infinity", in quotes, where a Float'),
        ("/get-online-features", b'{"features": ["punctuality:flights"], "entities": {"carrier": ["\\ud800"]}}', "body",
         "\\ud800 is half of a surrogate pair (byte 64)", "JSON"),
        ("/get-online-features", b'{"features": ["punctuality:flights"], "entities": {"carrier": ["UA", "U\xff"]}}',
         "entities.carrier", "byte 9 of its text, 0xff, is not UTF-8", "JSON in UTF-8"),
        ("/get-online-features", b'{"features": ["\xff"], "entities": {"carrier": ["UA"]}}', "body",
         "byte 15 of its text, 0xff, is not UTF-8", "JSON in UTF-8"),
        ("/push", b'{"push_source_name": "punctuality", "df": {"carrier": ["\xff"], "event_timestamp": ["\xff"]}}',
         "df.carrier", "byte 2 of its text, 0xff, is not UTF-8", "JSON in UTF-8"),
        ("/push", b'{"push_source_name": "punctuality", "df": {"carrier": ["UA"], "event_timestamp": ["\\n\xff"]}}',
         "df.event_timestamp", "byte 4 of its text, 0xff, is not UTF-8", "JSON in UTF-8"),
    ],
)  # fmt: skip
def test_answers(server: Server, path: str, body: bytes, where: str, found: str, expected: str) -> None:
    answer = server.http.post(path, content=body)
    assert answer.status_code == 400
    error = answer.json()
    assert (error["error"], error["where"], error["found"]) == ("UnreadableError", where, found)
    assert expected in error["expected"]
