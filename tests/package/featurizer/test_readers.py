"""The cases that all readers of heads are held to, and Python and JavaScript by them. Others: tests/end_to_end."""

import base64
import copy
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tree_sitter_kotlin
import tree_sitter_swift
from hypothesis import given
from hypothesis import strategies as st
from tree_sitter import Language, Parser

from isthmus.features.errors import PackageError
from isthmus.features.request.onnxbytes import UnreadableGraph
from isthmus.features.types import TYPES
from isthmus.features.values.columns import from_python
from isthmus.package.clients import FOLDER, READER, READERS
from isthmus.package.featurizer.form import OPERATORS, VERSION, text_of, value_of
from isthmus.package.featurizer.interpreter import Head, matcher
from isthmus.package.featurizer.trace import parts_of
from tests.features.request.test_kernels import VALUES, by_the_runtime, pattern_attribute
from tests.package.featurizer import cases
from tests.package.featurizer.cases import FILE, shown

LINES = FILE.read_text(encoding="ascii").splitlines()


def test_the_file_is_what_onnx_runtime_answers() -> None:
    assert [*cases.cases()] == LINES, "run python -m tests.package.featurizer.cases"


def _answers(lines: list[str]) -> Iterator[str]:
    """What Python answers to the rows."""
    head = Head.loads(base64.b64decode(lines[0].split(" ")[1]))
    dtypes = dict(word.split(":") for word in lines[1].split(" ")[1:])
    rows = [line.split(" = ")[0].split(" ")[1:] for line in lines[2:]]
    columns = {name: from_python([_value(text, dtype) for text in column], TYPES[dtype])
               for (name, dtype), column in zip(dtypes.items(), zip(*rows, strict=True), strict=True)}  # fmt: skip
    tensors, refused = head.feeds(columns)
    elements = [output.element for output in head.form.outputs for _ in output.slots]
    values = [column for tensor in tensors.values() for column in tensor.T.tolist()]
    for row, mask in zip(zip(*values, strict=True), refused.tolist(), strict=True):
        yield " ".join([*map(shown, row, elements), str(int(mask))])


def _value(text: str, dtype: str) -> object:
    if text in ("-", "nan"):
        return None if text == "-" else np.nan
    return bytes.fromhex(text[1:]).decode() if dtype == "String" else value_of(text, TYPES[dtype].tensor)


def test_python_answers_as_the_runtime() -> None:
    lines = [line for line in LINES if not line.startswith("torn")]
    assert [*_answers(lines)] == [line.split(" = ")[1] for line in lines[2:]]


def test_javascript_answers_as_the_runtime(tmp_path: Path) -> None:
    assert _node(FILE) == (0, f"{len(LINES) - 2} passed, 0 failed")
    wrong = tmp_path / "wrong.txt"
    wrong.write_text(FILE.read_text(encoding="ascii").replace(" 1\n", " 0\n").replace(" 0\n", " 1\n", 3))
    assert _node(wrong) == (1, f"{len(LINES) - 5} passed, 3 failed")


def _node(file: Path) -> tuple[int, str]:
    command = ["node", str(Path(cases.__file__).with_suffix(".mjs")), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout.splitlines() or [done.stderr])[-1]


_ROWS = """
const { Head } = await import(process.argv[1]);
const form = {
  version: 1, inputs: [["i", "Int32", "value"], ["l", "Int64", "value"]], constants: [], steps: [],
  outputs: [["y", "int32", [0]], ["z", "int64", [1]]], refused: null,
};
const head = new Head(new TextEncoder().encode(JSON.stringify(form)));
const answer = (values) => {
  try {
    const { y, z } = head.row(values).tensors;
    return `${y} ${z}`;
  } catch (error) {
    return `${error.constructor.name}: ${error.message}`;
  }
};
const wrong = [3e9, -(2 ** 31) - 1, 2n ** 40n, "", " ", [], true, 1.5, NaN];
const ints = [...wrong, -(2 ** 31), 7n, "-7", -0].map((i) => answer({ i }));
const longs = [2n ** 63n, 2 ** 53, 1e300, "", true, -(2n ** 63n), 2 ** 53 - 1].map((l) => answer({ l }));
console.log(JSON.stringify([ints, longs]));
"""


def test_javascript_takes_nothing_for_a_whole_number_that_is_none() -> None:
    client = str(FOLDER / READER)
    command = ["node", "--input-type=module", "-e", _ROWS, client]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ints, longs = json.loads(done.stdout)
    wrong = ["3000000000", "-2147483649", "1099511627776", "", " ", "", "true", "1.5", "NaN"]
    assert ints == [
        *(f"HeadError: input i is {text}; expected a Int32" for text in wrong), "-2147483648 0", "7 0", "-7 0", "0 0",
    ]  # fmt: skip
    more = {"9007199254740992": " as a BigInt", "1e+300": " as a BigInt"}
    assert longs == [
        *(f"HeadError: input l is {text}; expected a Int64{more.get(text, '')}"
          for text in ("9223372036854775808", "9007199254740992", "1e+300", "", "true")),
        "0 -9223372036854775808", "0 9007199254740991",
    ]  # fmt: skip


TORN = dict(cases.torn())


@pytest.mark.parametrize("name", TORN)
def test_what_is_no_head_is_refused(name: str) -> None:
    with pytest.raises(PackageError, match=r"^head\.json: ") as caught:
        Head.loads(TORN[name])
    assert caught.value.expected


SOUND = json.loads(base64.b64decode(LINES[0].split(" ")[1]))
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 300), st.lists(st.sampled_from([0, "1", "a"]), max_size=3),
    st.sampled_from([2**64, 0.5, "", "1", "float", "bool", "Cast", "ascii"]),
)  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of some JSON."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield (*path, key)
        yield from _places(part, (*path, key))


@given(path=st.sampled_from([*_places(SOUND)]), value=ANYTHING)
def test_whatever_stands_in_a_head_it_is_taken_or_refused(path: tuple[Any, ...], value: Any) -> None:
    form = copy.deepcopy(SOUND)
    reduce(getitem, path[:-1], form)[path[-1]] = value
    with suppress(PackageError):
        Head.loads(json.dumps(form).encode())


@pytest.mark.parametrize(("operator", "operands"), [("Div", [0, 1]), ("Mod", [0, 1]), ("Gather", [0])])
def test_a_step_that_cannot_be_computed_is_an_error(operator: str, operands: list[int]) -> None:
    table = ', ["1", "2"]' if operator == "Gather" else ""
    head = Head.loads(
        f'{{"version": 1, "inputs": [["n", "Int64", "value"]], "constants": [["int64", ["0"]]], "refused": null, '
        f'"steps": [["{operator}", "int64", {operands}{table}]], "outputs": [["y", "int64", [2]]]}}'.encode()
    )
    with pytest.raises(PackageError, match="a step cannot be computed"):
        head.feeds({"n": from_python([7], TYPES["Int64"])})


@pytest.mark.parametrize("element", sorted(VALUES))
@given(data=st.data())
def test_a_constant_reads_as_it_was_written(element: str, data: st.DataObject) -> None:
    value = data.draw(VALUES[element])
    text = text_of(value, element)
    assert text_of(value_of(text, element), element) == text
    assert shown(value_of(text, element), element) == shown(value, element)


WORDS = st.text("ab.\\(é\n\0$^😀", max_size=8)


@given(
    pattern=st.lists(st.sampled_from(["a", "b", "é", "😀", ".", ".*", r"\.", r"\\", r"\(", "\n"]), max_size=8),
    text=WORDS,
)
def test_a_pattern_matches_what_it_matches_in_the_runtime(pattern: list[str], text: str) -> None:
    whole = "(?s)" + "".join(pattern)
    expected = by_the_runtime("RegexFullMatch", "string", (text,), "bool", pattern_attribute(whole))
    assert matcher(parts_of(whole))(text, None) is expected


@pytest.mark.parametrize("pattern", ["a.*", "(?s)a|b", "(?s)[ab]", r"(?s)\d", "(?s)a+", "(?s)a\\"])
def test_another_pattern_is_not_guessed(pattern: str) -> None:
    with pytest.raises(UnreadableGraph, match="RegexFullMatch"):
        parts_of(pattern)


@pytest.mark.parametrize("name", READERS)
def test_a_reader_has_the_operators_of_the_format(name: str) -> None:
    """What `make test` does not compile is read as text."""
    source = (FOLDER / name).read_text(encoding="utf-8")
    assert {operator for operator in OPERATORS if re.search(rf"\b{operator}\b", source)} == OPERATORS.keys()
    assert re.search(rf"VERSION = {VERSION}L?\b|version == {VERSION}\b", source)
    assert len(source.splitlines()) < 400


@pytest.mark.parametrize(("name", "grammar"), [("Head.kt", tree_sitter_kotlin), ("Head.swift", tree_sitter_swift)])
def test_a_reader_for_phones_is_code(name: str, grammar: ModuleType) -> None:
    parser = Parser(Language(grammar.language()))
    source = (FOLDER / name).read_bytes()
    assert not parser.parse(source).root_node.has_error
    assert parser.parse(source.replace(b")", b"", 1)).root_node.has_error
