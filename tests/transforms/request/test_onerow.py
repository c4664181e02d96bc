"""One row without the runtime: to the bit what the runtime makes of the same graph.

TEST_ROWS says how many examples of every function and of drawn expressions are compared, TEST_EXPRESSIONS how many
expressions of expressions, TEST_SEED from where on.
"""

import os
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.features.contract.schema import Column, TransformContract, request_column
from isthmus.features.request.graph import OneRow, RowGraph
from isthmus.features.request.layout import MASKS, NOTES, Computed, Layout, output_name
from isthmus.features.request.onnxbytes import ELEMENTS, UnreadableGraph, read
from isthmus.features.types import Float64
from isthmus.features.values.columns import Values, objects
from isthmus.orchestration.project import Project
from isthmus.transforms.rowwise.compiler import compile_columns
from isthmus.transforms.rowwise.core.expressions import node_of, traced
from isthmus.transforms.rowwise.core.graph import assembled
from isthmus.transforms.rowwise.core.types import BOOLEAN, DOUBLE, FLOAT, INT, LONG, STRING, SqlType, array_of
from tests.transforms.rowdraws import INPUTS, SIMPLE, compound, edges, every, whatever
from tests.transforms.rowproof import EDGES, Rows

EXAMPLES = int(os.environ.get("TEST_ROWS", "5"))
EXPRESSIONS, SEED = int(os.environ.get("TEST_EXPRESSIONS", "100")), int(os.environ.get("TEST_SEED", "0"))
PORTION, DEPTH, COUNT = 50, 4, 40
FLIGHTS = Path(__file__).parents[3] / "examples" / "flights"
PLAIN = {name: kind for name, kind in INPUTS.items() if not kind.element}


@pytest.fixture(scope="module", autouse=True)
def _without_spark() -> Iterator[None]:
    with traced():
        yield


def session(graph: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


class Both:
    """A graph in the runtime and without it."""

    def __init__(self, graph: bytes) -> None:
        self._session = session(graph)
        self._layout = Layout.loads(self._session.get_modelmeta().custom_metadata_map[NOTES])
        self.one = OneRow(graph, self._layout, session)

    def differences(self, columns: Mapping[str, Values]) -> list[str]:
        """What differs, row by row."""
        count = len(next(iter(columns.values())).data)
        return [wrong for row in range(count) for wrong in self._differing(taken(columns, row))]

    def _differing(self, row: Mapping[str, Values]) -> Iterator[str]:
        computed = self.one.run(row)
        assert isinstance(computed, Computed)
        assert [*computed.values] == [*self._layout.fields]
        names, count = [*map(output_name, self._layout.outputs), MASKS], len(self._layout.fields)
        *tensors, masks = self._session.run(names, self._layout.feeds(row))
        places = {name: place for place, name in enumerate(self._layout.fields)}
        for tensor, fields in zip(tensors, self._layout.outputs.values(), strict=True):
            for name, data in zip(fields, tensor, strict=True):
                valid, raises = masks[places[name]].item(), masks[count + places[name]].item()
                mine = computed.values[name]
                there = [mine.valid.item(), name in computed.refused]
                if there != [valid and not raises, raises]:
                    yield f"{name}: {there}, by the runtime {valid=}, {raises=}: {shown(row)}"
                elif not there[0]:
                    assert mine.data.tolist() == [None if data.dtype == object else 0]
                elif bits(mine.data) != bits(data.view(np.uint8) if data.dtype == np.bool_ else data):
                    yield f"{name}: {mine.data.tolist()}, by the runtime {data.tolist()}: {shown(row)}"


def taken(columns: Mapping[str, Values], row: int) -> dict[str, Values]:
    return {name: Values(one.data[row : row + 1], one.valid[row : row + 1]) for name, one in columns.items()}


def shown(row: Mapping[str, Values]) -> dict[str, Any]:
    return {name: value.data.item() if value.valid.item() else None for name, value in row.items()}


def bits(data: "np.ndarray[Any, Any]") -> tuple[str, list[Any]]:
    """Type and bits; any NaN is as good as another."""
    if data.dtype.kind == "f":
        data = np.where(np.isnan(data), data.dtype.type(np.nan), data)
        return str(data.dtype), data.view(f"i{data.dtype.itemsize}").tolist()
    return str(data.dtype), data.tolist()


def columns_of(rows: Rows, kinds: Mapping[str, SqlType]) -> dict[str, Values]:
    columns = {}
    for name, kind in kinds.items():
        valid = np.array([value is not None for value in rows[name]])
        if kind == STRING:
            columns[name] = Values(np.array([*rows[name], None], object)[:-1], valid)
            continue
        if kind.element:
            arrays = (None if array is None else np.array(array, kind.numpy) for array in rows[name])
            columns[name] = Values(objects(arrays, len(valid)), valid)
            continue
        data = np.array(
            [0 if value is None else value for value in rows[name]], np.uint8 if kind == BOOLEAN else kind.numpy
        )
        columns[name] = Values(data, valid)
    return columns


def graph_of(columns: Mapping[str, SparkColumn], inputs: Mapping[str, SqlType]) -> bytes:
    graph: bytes = compile_columns(columns, inputs).model.SerializeToString(deterministic=True)
    return graph


@pytest.fixture(scope="module")
def functions() -> tuple[Both, dict[str, str]]:
    """Every function on all of its types but arrays, as one graph, and what each is called."""
    known = {f"z{n}": one for n, one in enumerate(every()) if " ints" not in (told := f" {one.label}")
             and "doubles" not in told and "floats" not in told}  # fmt: skip
    graph = graph_of({name: one.column for name, one in known.items()}, PLAIN)
    return Both(graph), {name: one.label for name, one in known.items()}


def test_every_function_at_the_edges(functions: tuple[Both, dict[str, str]]) -> None:
    both, labels = functions
    assert len(labels) > 700
    wrong = both.differences(columns_of(edges(random.Random(0), 100), PLAIN))
    assert wrong == [], labels[wrong[0].partition(":")[0]]


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=EXAMPLES)
def test_every_function_of_whatever_values(functions: tuple[Both, dict[str, str]], seed: int) -> None:
    both, labels = functions
    chance = random.Random(seed)
    rows = {name: [whatever(chance, kind) for _ in range(10)] for name, kind in PLAIN.items()}
    wrong = both.differences(columns_of(rows, PLAIN))
    assert wrong == [], labels[wrong[0].partition(":")[0]]


def _wrong(chance: random.Random, drawn: list[SparkColumn]) -> list[str]:
    both = Both(graph_of({f"z{n}": column for n, column in enumerate(drawn)}, SIMPLE))
    wrong = both.differences(columns_of(edges(chance, COUNT), SIMPLE))
    return [f"{node_of(drawn[int(one.partition(':')[0][1:])])} {one}" for one in wrong]


@pytest.mark.accept
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=EXAMPLES)
def test_expressions_of_expressions(seed: int) -> None:
    chance = random.Random(seed)
    assert _wrong(chance, [compound(chance, 3, exact=False) for _ in range(10)]) == []


@pytest.mark.timeout(60 + EXPRESSIONS)
@pytest.mark.thorough
def test_very_many_expressions_of_expressions() -> None:
    wrong = []
    for seed in range(SEED, SEED + EXPRESSIONS, PORTION):
        chance = random.Random(seed)
        wrong += _wrong(chance, [compound(chance, chance.randint(2, DEPTH), exact=False) for _ in range(PORTION)])
    assert not wrong, "\n".join(wrong)


def _sums_and_choices(chance: random.Random) -> bytes:
    """A graph as no function makes one: of three doubles, all that is computed used in many places."""
    rows, truths, fixed = [f"x{n}" for n in range(3)], [f"v{n}" for n in range(3)], ["two", "less", "odd"]
    nodes = [helper.make_node("Split", ["given_double"], [*rows], axis=0, num_outputs=3),
             helper.make_node("Split", ["given_valid"], [*truths], axis=0, num_outputs=3)]  # fmt: skip
    for n in range(chance.randint(5, 40)):
        one = chance.choice([rows[-1], rows[-1], *rows])
        match chance.choice(["Mul", "Add", "both", "both", "Where", "Less"]):
            case "Where":
                nodes.append(helper.make_node("Where", [chance.choice(truths), one, chance.choice(rows)], [f"y{n}"]))
                rows.append(f"y{n}")
            case "Less":
                nodes.append(helper.make_node("Less", [one, chance.choice(rows)], [f"y{n}"]))
                truths.append(f"y{n}")
            case "both":
                nodes.append(helper.make_node("Mul", [one, chance.choice(rows[:3])], [f"z{n}"]))
                nodes.append(helper.make_node("Add", [f"z{n}", chance.choice(fixed)], [f"y{n}"]))
                rows.append(f"y{n}")
            case name:
                nodes.append(helper.make_node(name, [one, chance.choice(rows[:3])], [f"y{n}"]))
                rows.append(f"y{n}")
    given = [f"x{n}" for n in range(3)]
    outputs = chance.sample(rows, 2) + rows[-1:]
    nodes.append(helper.make_node("Concat", outputs, ["found_double"], axis=0))
    nodes.append(
        helper.make_node("Concat", [*chance.choices(truths, k=3), *chance.choices(truths, k=3)], [MASKS], axis=0)
    )
    layout = Layout({"double": given}, given, {"double": ["a", "b", "c"]}, ["a", "b", "c"])
    tensors = {
        "given_double": (DOUBLE, 3),
        "given_valid": (BOOLEAN, 3),
        "found_double": (DOUBLE, 3),
        MASKS: (BOOLEAN, 6),
    }
    told = [helper.make_tensor_value_info(name, kind.tensor, [size, "N"]) for name, (kind, size) in tensors.items()]
    values = [numpy_helper.from_array(np.array(value), name)
              for name, value in zip(fixed, (2.0, -0.5, 1.1), strict=True)]  # fmt: skip
    model = assembled("drawn", nodes, told[:2], told[2:], values)
    helper.set_model_props(model, {NOTES: layout.dumps()})
    graph: bytes = model.SerializeToString()
    return graph


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=20 * EXAMPLES)
def test_sums_and_choices_that_no_function_makes(seed: int) -> None:
    chance = random.Random(seed)
    kinds: dict[str, SqlType] = {f"x{n}": DOUBLE for n in range(3)}
    some = [0.0, -0.0, 1.0, -1.5, 1e200, np.inf, np.nan, None]
    rows = {name: [chance.choice([*some, chance.gauss(0, 1)]) for _ in range(20)] for name in kinds}
    assert Both(_sums_and_choices(chance)).differences(columns_of(rows, kinds)) == []


def test_zeros_of_choices_between_one_and_many_keep_the_signs_that_the_runtime_leaves() -> None:
    given = ["x0", "x1", "x2"]
    nodes = [helper.make_node("Split", ["given_double"], given, axis=0, num_outputs=3),
             helper.make_node("Split", ["given_valid"], ["v0", "v1", "v2"], axis=0, num_outputs=3),
             helper.make_node("Concat", ["x0", "x1"], ["many"], axis=0),
             helper.make_node("Concat", ["v1", "v2"], ["truths"], axis=0)]  # fmt: skip
    sides = [("v0", "many", "x2"), ("v0", "x2", "many"), ("truths", "many", "x2"), ("truths", "x2", "x2"),
             ("truths", "x2", "many"), ("v0", "many", "many")]  # fmt: skip
    nodes += [helper.make_node("Where", [*side], [f"y{n}"]) for n, side in enumerate(sides)]
    nodes.append(helper.make_node("Concat", [f"y{n}" for n in range(6)], ["found_double"], axis=0))
    nodes += [helper.make_node("Equal", ["v0", "v0"], ["yes"]), helper.make_node("Equal", ["yes", "no"], ["never"])]
    nodes.append(helper.make_node("Concat", ["yes"] * 12 + ["never"] * 12, [MASKS], axis=0))
    fields = [f"z{n}" for n in range(12)]
    sizes = {"given_double": 3, "given_valid": 3, "found_double": 12, MASKS: 24}
    told = [helper.make_tensor_value_info(name, (DOUBLE if "double" in name else BOOLEAN).tensor, [size, "N"])
            for name, size in sizes.items()]  # fmt: skip
    no = numpy_helper.from_array(np.array(False), "no")
    model = assembled("zeros", nodes, told[:2], told[2:], [no])
    helper.set_model_props(model, {NOTES: Layout({"double": given}, given, {"double": fields}, fields).dumps()})
    zeros = np.array([0.0, -0.0])
    both = Both(model.SerializeToString())
    for choice in range(64):
        rows = {name: Values(zeros[[choice >> n & 1]], np.array([bool(choice >> 3 + n & 1)]))
                for n, name in enumerate(given)}  # fmt: skip
        assert both.differences(rows) == []


def test_sines_far_away_are_those_of_the_kernel_whatever_stands_beside_them() -> None:
    angles = {f"x{n}": DOUBLE for n in range(9)}
    graph = graph_of({name: (F.sin if n % 3 else F.cos)(F.col(name)) for n, name in enumerate(angles)}, angles)
    chance = random.Random(1)
    near = [0.0, -0.0, 1.0, 3e5, -7.25, np.nan, np.inf]
    rows = {name: [chance.choice([*near, chance.uniform(1e6, 1e18)]) for _ in range(300)] for name in angles}
    assert Both(graph).differences(columns_of(rows, angles)) == []


def test_the_request_features_of_the_flights() -> None:
    transform = Project(FLIGHTS).definitions.contract.transforms["moment"]
    both, chance = Both(transform.graph), random.Random(2)
    kinds: dict[str, SqlType] = dict.fromkeys(transform.inputs, FLOAT)
    kinds |= {column.name: LONG for column in transform.request}

    def value(kind: SqlType) -> Any:
        if kind == LONG and chance.random() < 0.7:
            return chance.randint(0, 1440)
        return chance.choice([*EDGES[kind], None])

    rows = {name: [value(kind) for _ in range(1000)] for name, kind in kinds.items()}
    assert both.differences(columns_of(rows, kinds)) == []


def test_threads_share_a_graph() -> None:
    x, s = F.col("x"), F.col("s")
    columns = {"log": F.log(x), "sine": F.sin(x), "word": F.concat(s, F.lit("!")), "share": 1 / x}
    kinds = {"x": DOUBLE, "s": STRING}
    chance = random.Random(3)
    rows: Rows = {name: [whatever(chance, kind) for _ in range(400)] for name, kind in kinds.items()}
    given, both = columns_of(rows, kinds), Both(graph_of(columns, kinds))
    alone = [_told(both.one.run(taken(given, row))) for row in range(400)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert [*pool.map(lambda row: _told(both.one.run(taken(given, row))), range(400))] == alone


def test_what_is_done_to_one_answer_is_not_in_the_next() -> None:
    x = F.col("x")
    both = Both(graph_of({"log": F.log(x), "share": 1 / x, "same": x, "none": F.nullif(x, x)}, DOUBLE_OF_X))
    given = {"x": Values(np.zeros(1), np.array([True]))}
    first = both.one.run(given)
    assert first is not None
    told = _told(first)
    masks = [*(values.valid for values in first.values.values()), *first.refused.values()]
    for mask in {id(mask): mask for mask in masks}.values():  # fields share theirs
        mask ^= True
    assert _told(both.one.run(given)) == told
    assert given["x"].valid.tolist() == [True]


def _told(computed: Computed | None) -> list[Any]:
    assert computed is not None
    return [(bits(values.data), values.valid.tolist(), name in computed.refused)
            for name, values in computed.values.items()]  # fmt: skip


# --- what is left to the runtime


def test_a_pattern_that_python_takes_long_for_is_left_to_the_runtime_alone() -> None:
    s = F.col("s")
    both = Both(graph_of({"y": F.when(s.like("%a_b%"), "one").when(s.like("a%b%c"), s), "z": s == "a"}, {"s": STRING}))
    rows: Rows = {"s": ["a.b", "", "a", "ab", "xa\nbc", "aébc", "abc", "a\0b", "abbd", None]}
    assert both.differences(columns_of(rows, {"s": STRING})) == []


DOUBLE_OF_X = {"x": DOUBLE}


def _changed(change: Callable[[onnx.ModelProto], None]) -> bytes:
    """The graph of -x, changed."""
    model = onnx.load_from_string(graph_of({"y": -F.col("x")}, DOUBLE_OF_X))
    change(model)
    graph: bytes = model.SerializeToString()
    return graph


def _hyperbolic(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.op_type = {"Neg": "Tanh"}.get(node.op_type, node.op_type)


def _newer(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 21


def _of_the_neighbour(model: onnx.ModelProto) -> None:
    """A tensor that is made by a node without inputs."""
    value = numpy_helper.from_array(np.zeros((1, 1)), "zero")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["zero"], value=value))


LEFT = {"an operator": (_hyperbolic, "Tanh of double"), "another version": (_newer, "version 21"),
        "a node of nothing": (_of_the_neighbour, "the inputs of Constant")}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_a_graph_with_what_is_not_known_goes_through_the_runtime(case: str) -> None:
    change, message = LEFT[case]
    graph = _changed(change)
    layout = Layout.loads(session(graph).get_modelmeta().custom_metadata_map[NOTES])
    with pytest.raises(UnreadableGraph, match=message):
        OneRow(graph, layout, session)
    transform = TransformContract("t", (), (request_column("x", Float64),), (Column("y", Float64),), graph)
    computed = RowGraph(transform).run({"x": Values(np.array([0.5]), np.array([True]))})
    wanted = np.tanh(0.5) if case == "an operator" else -0.5
    assert computed.values["y"].data.tolist() == pytest.approx([wanted], rel=1e-15)


def test_a_damaged_graph_goes_through_the_runtime() -> None:
    """It is read, or is unreadable: nothing else comes of any byte."""
    columns = {"x": DOUBLE, "s": STRING, "i": LONG}
    graph = graph_of(
        {"y": F.sin(-F.col("x") * 1.5), "t": F.concat(F.col("s"), F.lit("-é")), "z": F.col("i") + 1}, columns
    )
    draw, readable = np.random.default_rng(SEED), 0
    cut = [graph[:length] for length in range(len(graph))]
    changed = [graph[:place] + bytes([graph[place] ^ draw.integers(1, 256)]) + graph[place + 1 :]
               for place in draw.permutation(len(graph))]  # fmt: skip
    grown = [graph[:place] + draw.bytes(9) + graph[place + draw.integers(9) :] for place in range(0, len(graph), 3)]
    for damaged in (*cut, *changed, *grown):
        with suppress(UnreadableGraph):
            read(damaged)
            readable += damaged in cut
    # Fields of a model follow each other without an end: few of its beginnings are models.
    assert readable < 10
    for opset, message in ((b"", "version 0"), (b"\x10\x15", "version 21"), (b"\x10", "damaged")):
        with pytest.raises(UnreadableGraph, match=message):
            read(b"\x42" + bytes([len(opset)]) + opset)


def test_many_nodes_of_the_runtime_go_through_it_as_a_whole() -> None:
    def pays(count: int) -> bool:
        powers = {f"y{place}": F.pow(F.col("x"), place + 0.3) for place in range(count)}
        return Both(graph_of(powers, DOUBLE_OF_X)).one.pays

    assert [pays(count) for count in (1, 2, 20)] == [True, False, False]
    # Those that the compiler computes side by side are one call.
    sines = {f"y{place}": F.sin(F.col("x") + place) for place in range(20)}
    assert Both(graph_of(sines, DOUBLE_OF_X)).one.pays


def test_arrays_go_through_the_runtime() -> None:
    graph = graph_of({"y": F.col("a")[0]}, {"a": array_of(INT, 3)})
    layout = Layout.loads(session(graph).get_modelmeta().custom_metadata_map[NOTES])
    with pytest.raises(UnreadableGraph, match="arrays"):
        OneRow(graph, layout, session)


def test_other_rows_and_other_types_go_through_the_runtime() -> None:
    both, there = Both(graph_of({"y": -F.col("x")}, DOUBLE_OF_X)), np.array([True])
    assert both.one.run({"x": Values(np.array([0.5]), there)}) is not None
    assert both.one.run({"x": Values(np.array([0.5], np.float32), there)}) is None
    assert both.one.run({"x": Values(np.array([0.5, 1.0]), np.array([True, True]))}) is None
    assert both.one.run({"x": Values(np.array([]), np.array([], bool))}) is None


@pytest.mark.accept
def test_a_long_chain_of_choices_is_followed_to_its_end() -> None:
    chosen = F.when(F.col("n") == 0, F.log(F.col("x")))
    for number in range(1, 400):
        chosen = chosen.when(F.col("n") == number, F.log(F.col("x") + number) * number)
    both = Both(graph_of({"y": chosen}, {"n": INT, "x": DOUBLE}))
    rows: Rows = {"n": [0, 1, 7, 200, 399, 400, None], "x": [0.5, 2.0, None, 1e9, 3.0, 1.0, 1.0]}
    assert both.differences(columns_of(rows, {"n": INT, "x": DOUBLE})) == []


def test_a_large_vocabulary_is_not_copied_for_every_row() -> None:
    pairs = [F.lit(part) for number in range(2000) for part in (f"word {number}", number / 7)]
    both = Both(graph_of({"y": F.create_map(*pairs)[F.col("s")]}, {"s": STRING}))
    rows: Rows = {"s": ["word 0", "word 1999", "word", None]}
    assert both.differences(columns_of(rows, {"s": STRING})) == []
    assert len(both.one._slots) < 20


# --- what is in a file


def test_a_file_reads_as_the_library_reads_it() -> None:
    graph = graph_of({f"z{n}": one.column for n, one in enumerate(every())}, INPUTS)
    nodes, constants = read(graph)
    model = onnx.load_from_string(graph)
    assert len(nodes) == len(model.graph.node) > 3000
    for mine, theirs in zip(nodes, model.graph.node, strict=True):
        assert (mine.operator, [*mine.inputs], [*mine.outputs]) == (theirs.op_type, [*theirs.input], [*theirs.output])
        wanted = {part.name: helper.get_attribute_value(part) for part in theirs.attribute}
        assert {**mine.attributes} == wanted
    for tensor in model.graph.initializer:
        mine_too, array = constants.pop(tensor.name), numpy_helper.to_array(tensor)
        if mine_too.element == "string":
            array = np.array([text.decode() for text in tensor.string_data], object).reshape(array.shape)
        assert mine_too.element == ELEMENTS[tensor.data_type]
        assert mine_too.data.shape == array.shape
        assert bits(mine_too.data) == bits(array)
    assert constants == {}
