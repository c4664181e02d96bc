"""Functions of one row as a portable head: to the bit what ONNX Runtime makes of the same graph, in every language."""

import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.features.request.layout import MASKS, NOTES, Layout, output_name
from isthmus.features.request.onnxbytes import UnreadableGraph
from isthmus.features.values.columns import Values
from isthmus.package.featurizer.interpreter import Head
from isthmus.package.featurizer.trace import build_head
from isthmus.transforms.rowwise.core.expressions import traced as without_spark
from tests.package.featurizer import cases
from tests.package.featurizer.cases import DTYPES, lines, session, sources
from tests.transforms.request.test_onerow import PLAIN, columns_of, graph_of
from tests.transforms.rowdraws import INPUTS, edges, every, whatever
from tests.transforms.rowproof import Expression, Rows

ROWS = 10_000
SCRIPT = Path(cases.__file__).with_suffix(".mjs")
INEXACT = {"sin", "cos", "tan", "cot", "sec", "csc", "pow", "**"}
"""What the runtime computes itself; of sines only those from 2**20 on."""


@pytest.fixture(scope="module", autouse=True)
def _without_spark() -> Iterator[None]:
    with without_spark():
        yield


def functions() -> list[Expression]:
    """Every function on all of its types but arrays, which no model reads."""
    return [one for one in every() if not any(word in f" {one.label}" for word in (" ints", "doubles", "floats"))]


class Portion:
    """Some functions as a graph and as a head."""

    def __init__(self, expressions: Sequence[Expression]) -> None:
        self.graph = graph_of({f"z{n}": one.column for n, one in enumerate(expressions)}, PLAIN)
        self._session = session(self.graph)
        self.layout = Layout.loads(self._session.get_modelmeta().custom_metadata_map[NOTES])
        self.outputs = {**{output_name(element): element for element in self.layout.outputs}, MASKS: "bool"}
        self.head = build_head(self.graph, sources(self.layout), self.outputs, None, session)

    def answers(self, columns: Mapping[str, Values]) -> list[Any]:
        """Those of the runtime, (n, fields) each."""
        answers = self._session.run([*self.outputs], self.layout.feeds(columns))
        return [answer.T for answer in answers]

    def lines(self, columns: Mapping[str, Values]) -> Iterator[str]:
        """As cases for a reader."""
        used = {name: columns[name] for name in self.layout.masks}
        count = len(next(iter(used.values())).data)
        elements = {name: element for element, names in self.layout.inputs.items() for name in names}
        dtypes = {name: DTYPES[elements[name]] for name in self.layout.masks}
        return lines(self.head, dtypes, used, [*self.answers(used), np.zeros(count, bool)])


def drawn(count: int, seed: int) -> dict[str, Values]:
    """Rows of edges and of whatever values."""
    chance = random.Random(seed)
    corners = edges(chance, count // 2)
    rows: Rows = {
        name: [*corners[name], *(whatever(chance, INPUTS[name]) for _ in range(count - count // 2))] for name in PLAIN
    }
    return columns_of(rows, PLAIN)


def differing(portion: Portion, columns: Mapping[str, Values]) -> list[str]:
    """Where Python answers otherwise than the runtime."""
    tensors, _ = Head.loads(portion.head).feeds(columns)
    wrong = []
    for (name, element), expected in zip(portion.outputs.items(), portion.answers(columns), strict=True):
        answer = tensors[name]
        same = answer == expected
        if element in ("float", "double"):
            same = (
                answer.view(f"i{answer.itemsize}") == np.ascontiguousarray(expected).view(f"i{answer.itemsize}")
            ) | (np.isnan(answer) & np.isnan(expected))
        wrong += [f"{name}[{column}] of row {row}: {answer[row, column]!r}, by the runtime {expected[row, column]!r}"
                  for row, column in np.argwhere(~same)]  # fmt: skip
    return wrong


def _name(expression: Expression) -> str:
    return expression.label.partition(" of ")[0]


def exact() -> list[Expression]:
    """The functions that a head has."""
    return [one for one in functions() if _name(one) not in INEXACT]


@pytest.fixture(scope="module")
def portable() -> Portion:
    return Portion(exact())


def test_a_head_has_all_functions_but_those_of_which_no_standard_says_the_last_bit(portable: Portion) -> None:
    assert len(portable.layout.fields) > 650
    for name in INEXACT:
        with pytest.raises(UnreadableGraph, match=r"(Sin|Cos|Pow), whose last bit no standard defines"):
            Portion([one for one in functions() if _name(one) == name])


def test_python_and_javascript_answer_as_the_runtime(portable: Portion, tmp_path: Path) -> None:
    assert differing(portable, drawn(100, 0)) == []
    assert answered_by_node(portable, 400, tmp_path) == "400 passed, 0 failed"


@pytest.mark.accept
@pytest.mark.slowest
def test_they_do_so_in_ten_thousand_rows(portable: Portion, tmp_path: Path) -> None:
    assert differing(portable, drawn(ROWS, 2)) == []
    assert answered_by_node(portable, ROWS, tmp_path) == f"{ROWS} passed, 0 failed"


def answered_by_node(portion: Portion, count: int, folder: Path) -> str:
    file = written(portion, count, folder)
    done = subprocess.run(["node", SCRIPT, file], capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [done.stderr])[-1]


def written(portion: Portion, count: int, folder: Path) -> Path:
    """The file of the cases of some functions."""
    file = folder / "rows.txt"
    with file.open("w", encoding="ascii") as content:
        content.writelines(f"{line}\n" for line in portion.lines(drawn(count, 1)))
    return file
