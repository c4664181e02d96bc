import json
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.errors import RequestError
from isthmus.serving.wire.body import require_distinct

NAMES = st.sampled_from(["a", "b", "c:d", 'e"f', "é"])
VALUES = st.sampled_from(["1", "null", '"x:y"', '"\\u003a"', "[1, 2]", '["a:b", ":"]', '"\\"a\\":"'])
COLUMNS = st.lists(st.tuples(NAMES, VALUES), max_size=3)
MEMBERS = st.lists(st.tuples(NAMES, VALUES | COLUMNS), max_size=4)
SEPARATORS = st.sampled_from([":", " : ", ": "])


def text(members: Any, colon: str) -> str:
    if isinstance(members, str):
        return members
    return "{" + ", ".join(json.dumps(name) + colon + text(value, colon) for name, value in members) + "}"


def repeated(members: Any) -> bool:
    """Whether a name is given twice, at either level."""
    if isinstance(members, str):
        return False
    names = [name for name, _ in members]
    return len(names) != len(set(names)) or any(repeated(value) for _, value in members)


@given(members=MEMBERS, colon=SEPARATORS)
def test_exactly_the_names_that_are_given_twice_are_refused(members: Any, colon: str) -> None:
    with pytest.raises(RequestError, match="twice") if repeated(members) else nullcontext():
        require_distinct(text(members, colon).encode())
