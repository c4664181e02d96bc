import json
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.errors import RequestError
from isthmus.serving.wire.body import require_distinct

NAMES = st.sampled_from(["a", "b", "c:d", 'e"f', "é"])
VALUES = st.sampled_from(["1", "1" * 5000, "null", '"x:y"', '"\\u003a"', "[1, 2]", '["a:b", ":"]', '"\\"a\\":"'])
COLUMNS = st.lists(st.tuples(NAMES, VALUES), max_size=3)
ITEMS = st.lists(st.lists(st.tuples(NAMES, VALUES | COLUMNS), max_size=3), min_size=1, max_size=2).map(tuple)
MEMBERS = st.lists(st.tuples(NAMES, VALUES | COLUMNS | ITEMS), max_size=4)
SEPARATORS = st.sampled_from([":", " : ", ": "])


def text(members: Any, colon: str) -> str:
    if isinstance(members, str):
        return members
    if isinstance(members, tuple):
        return "[ " + ", ".join(text(item, colon) for item in members) + "]"
    return "{" + ", ".join(json.dumps(name) + colon + text(value, colon) for name, value in members) + "}"


def repeated(members: Any) -> bool:
    """Whether a name is given twice, at any level."""
    if isinstance(members, str):
        return False
    if isinstance(members, tuple):
        return any(map(repeated, members))
    names = [name for name, _ in members]
    return len(names) != len(set(names)) or any(repeated(value) for _, value in members)


@given(members=MEMBERS, colon=SEPARATORS)
def test_exactly_the_names_that_are_given_twice_are_refused(members: Any, colon: str) -> None:
    with pytest.raises(RequestError, match="twice") if repeated(members) else nullcontext():
        require_distinct(text(members, colon).encode())
