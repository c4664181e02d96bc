"""The head of a student of tables: what makes the tensors of its core, in any language, to the bit of its graph."""

import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.distill.onnx.runtime import session
from isthmus.distill.tabular.graph import graph, head, head_graph
from isthmus.distill.tabular.preparation import Prepare, preparation_graph
from isthmus.distill.tabular.student import CoreNetwork, Student, core_tensors
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.features.contract.schema import Column, TransformContract, request_column
from isthmus.features.errors import GateFailed
from isthmus.features.types import Bool, DataType, Float32, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.columns import Values, from_python
from isthmus.orchestration.project import Project
from isthmus.package.featurizer.interpreter import CoreFeeds, Head
from isthmus.package.inputs import ModelInput, feeds
from isthmus.transforms.preparation.fit import FittedNumber, FittedText, Preparation
from isthmus.transforms.preparation.steps import (
    Clip,
    Embed,
    Encoding,
    Hashed,
    Impute,
    Log1p,
    OneHot,
    Ordinal,
    Standardize,
    Step,
    described,
)
from isthmus.transforms.rowwise.compiler import compile_columns
from isthmus.transforms.rowwise.core.expressions import traced
from isthmus.transforms.rowwise.core.types import DOUBLE
from tests.package.featurizer import cases

FLIGHTS = Path(__file__).parents[3] / "examples" / "flights"
SERVICE = "late_arrival_device"
CHAINS: list[list[Step]] = [
    [Standardize(), Impute(0.0)], [Clip(0.1, 0.9), Impute("median"), Standardize(2.0)],
    [Log1p(), Standardize(), Impute()], [], [Standardize()], [Impute(0.5)],
]  # fmt: skip
TEXTS: list[Encoding] = [Embed(3, width=1), OneHot(2), Ordinal(("small", "large")), Hashed(buckets=4), Embed()]
WORDS = ["small", "large", "AA", "é", "e\u0301", "😀 it's", ""]
REAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan")]
WHOLE = [0, 1, -1, 1440, 2**31 - 1, -(2**31)]
LONG = [*WHOLE, 2**53 + 1, 2**63 - 1, -(2**63), (1 << 62) + (1 << 38) + 1]
EDGES: dict[DataType, list[Any]] = {
    Bool: [True, False], Int32: WHOLE, Int64: LONG, UnixTimestamp: LONG, Float32: [float(np.float32(x)) for x in REAL],
    Float64: [*REAL, 5e-324, 3.4028235677973366e38, 1e300], String: WORDS,
}  # fmt: skip


def _parameters(step: Step) -> tuple[float, ...]:
    return {Standardize: (1.5, 0.25), Clip: (-2.0, 700.0), Impute: (0.125,)}.get(type(step), ())


def preparation(inputs: list[ModelInput]) -> Preparation:
    """Every chain of steps and every encoding, in turns."""
    numbers, texts = ([item for item in inputs if (item.dtype == String) == text] for text in (False, True))
    words = {word: place for place, word in enumerate(filter(None, WORDS), 1)}
    return Preparation(
        tuple(
            FittedNumber(
                item.name, tuple(map(described, chain)), tuple(map(_parameters, chain)), indicator=place % 2 == 0
            )
            for place, item in enumerate(numbers)
            for chain in [CHAINS[place % len(CHAINS)]]
        ),
        tuple(
            FittedText(
                item.name, described(text), {w: 1 + p % 3 for w, p in words.items()} if text == TEXTS[3] else words
            )
            for place, item in enumerate(texts)
            for text in [TEXTS[place % len(TEXTS)]]
        ),
    )


def student(inputs: list[ModelInput]) -> Student:
    fitted = preparation(inputs)
    return Student(Prepare(fitted, preparation_graph(fitted)), (8,), 0.0).eval()


class Flights:
    """A student with the inputs of the flights', and more of each type, that computes request features."""

    def __init__(self) -> None:
        contract = Project(FLIGHTS).definitions.contract
        self.request = RequestInputs.of(contract, SERVICE)
        more = [(f"more_{dtype}", dtype) for dtype in EDGES] + [(f"text_{n}", String) for n in range(3)]
        served = [ModelInput(column.name, column.dtype) for column in contract.inputs(SERVICE)]
        computed = {transform.full_name(field.name) for transform, field in self.request.computed}
        # The inputs that are computed come last.
        inputs = [*(item for item in served if item.name not in computed), *(ModelInput(*item) for item in more)]
        inputs += [item for item in served if item.name in computed]
        self.student = student(inputs)
        self.inputs = self.request.graph_inputs(inputs)
        self.head = head(self.student, self.request, self.inputs)

    def rows(self, count: int, seed: int) -> dict[str, Values]:
        chance = random.Random(seed)

        def value(dtype: DataType) -> Any:
            if chance.random() < 0.3:
                return chance.choice([None, *EDGES[dtype]])
            if dtype == String:
                return chance.choice([*WORDS, "".join(chr(chance.choice([97, 233, 0x1F600])) for _ in range(3))])
            if dtype in (Float32, Float64):
                number = chance.choice([chance.gauss(0, 3), chance.uniform(-1e6, 1e6), 10 ** chance.uniform(-44, 37)])
                return float(np.float32(number)) if dtype == Float32 else number
            return chance.random() < 0.5 if dtype == Bool else chance.randint(-3000, 3000)

        return {item.name: from_python([value(item.dtype) for _ in range(count)], item.dtype) for item in self.inputs}

    def answers(self, columns: dict[str, Values]) -> dict[str, Any]:
        """Those of the runtime."""
        opened = session(head_graph(self.student, self.request).SerializeToString(), 1)
        # Between the parts of a graph truth values are bool.
        inputs = [replace(item, truth="bool") for item in self.inputs]
        fed, names = feeds(inputs, columns), [output.name for output in opened.get_outputs()]
        return dict(
            zip(names, opened.run(names, {item.name: fed[item.name] for item in opened.get_inputs()}), strict=True)
        )


@pytest.fixture(scope="module")
def flights() -> Flights:
    return Flights()


def _require_same(flights: Flights, columns: dict[str, Values]) -> CoreFeeds:
    tensors, refused = made = Head.loads(flights.head).feeds(columns)
    expected = flights.answers(columns)
    for name, array in tensors.items():
        assert np.array_equal(array.view(np.int32), expected[name].view(np.int32)), name
    assert np.array_equal(refused, expected["refused"])
    return made


def test_a_head_makes_the_tensors_of_the_core_to_the_bit(flights: Flights) -> None:
    columns = flights.rows(500, 0)
    tensors, refused = _require_same(flights, columns)
    assert {name: (array.dtype.name, array.shape[1]) for name, array in tensors.items()} == {
        tensor.name: ({"float": "float32"}.get(tensor.element, tensor.element), tensor.shape[1])
        for tensor in core_tensors(flights.student)
    }
    assert 0 < refused.sum() < 500
    # Of what the head makes, the core makes what the graph says, which is NaN where a row is refused.
    opened = session(graph(flights.student, flights.request).SerializeToString(), 1)
    fed = feeds(flights.inputs, columns)
    (chances,) = opened.run(None, {item.name: fed[item.name] for item in opened.get_inputs()})
    with torch.inference_mode():
        core = CoreNetwork(flights.student)(*map(torch.from_numpy, tensors.values())).numpy()
    np.testing.assert_allclose(chances, np.where(refused, np.nan, core), atol=1e-6)
    assert np.isfinite(chances).sum() > 100


def test_javascript_makes_the_same(flights: Flights, tmp_path: Path) -> None:
    assert _by_node(flights, 500, tmp_path) == "500 passed, 0 failed"


@pytest.mark.accept
def test_it_does_so_in_ten_thousand_rows(flights: Flights, tmp_path: Path) -> None:
    _require_same(flights, flights.rows(10_000, 2))
    assert _by_node(flights, 10_000, tmp_path) == "10000 passed, 0 failed"


def _by_node(flights: Flights, count: int, folder: Path) -> str:
    file = folder / "rows.txt"
    file.write_text("".join(f"{line}\n" for line in lines(flights, count)), encoding="ascii")
    command = ["node", str(Path(cases.__file__).with_suffix(".mjs")), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [done.stderr])[-1]


def lines(flights: Flights, count: int) -> Iterator[str]:
    """The rows as cases."""
    columns = flights.rows(count, 1)
    answers = flights.answers(columns)
    dtypes = {item.name: item.dtype.name for item in flights.inputs}
    return cases.lines(flights.head, dtypes, columns, [answers["numbers"], answers["places"], answers["refused"]])


def test_the_same_student_has_the_same_head(flights: Flights) -> None:
    assert head(flights.student, flights.request, flights.inputs) == flights.head
    assert len(flights.head) < 40_000
    form = msgspec.json.decode(flights.head)
    # What no step reads is not asked for.
    assert {(name, role) for name, _, role in form["inputs"]} <= {
        (item.name, role)
        for item in flights.inputs
        for role in (("value", "valid") if item.row else ("number", "text"))
    }


@pytest.mark.parametrize("texts", [True, False])
def test_a_student_of_texts_or_of_numbers_alone_has_a_head(texts: bool) -> None:
    inputs = [ModelInput("s", String)] if texts else [ModelInput("x", Float64)]
    loaded = Head.loads(head(student(inputs), RequestInputs(), inputs))
    columns = {"s": from_python(["é", None, "AA"], String), "x": from_python([0.5, None, 1e300], Float64)}
    tensors, refused = loaded.feeds(columns)
    assert [*tensors] == (["places"] if texts else ["numbers"])
    assert refused.tolist() == [False] * 3
    if texts:
        assert tensors["places"].tolist() == [[4], [0], [3]]


def test_a_function_that_no_head_has_is_named() -> None:
    with traced():
        compiled_columns = compile_columns({"y": F.pow(F.col("x"), 0.3)}, {"x": DOUBLE})
    transform = TransformContract(
        "curve",
        (),
        (request_column("x", Float64),),
        (Column("y", Float64),),
        compiled_columns.model.SerializeToString(),
    )
    request = RequestInputs((transform,), transform.request, ((transform, transform.fields[0]),))
    inputs = [ModelInput("z", Float64), ModelInput("curve__y", Float64)]
    with pytest.raises(
        GateFailed, match=r"^head\.json: a request transform of the student has Pow, whose last bit no standard"
    ):
        head(student(inputs), request, request.graph_inputs(inputs))
