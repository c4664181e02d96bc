"""The cases that all readers of heads are held to: Python, JavaScript, Kotlin and Swift.

`python -m tests.package.featurizer.cases` writes those of the operators to tests/fixtures/heads.txt; their answers are
ONNX Runtime's. A line is one of these, its parts separated by spaces:

    head BASE64              the content of `head.json`, for the lines that follow
    torn BASE64              the content of one that is refused
    columns NAME:DTYPE …     of the rows that follow
    row VALUE … = ANSWER …   what the head makes of raw values: all outputs in their order, then whether it is refused

Values are as in a head, but texts are "s" and the hexadecimal digits of their UTF-8. "-" is null, "nan" any NaN.
"""

import base64
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from isthmus.distill.types import Array
from isthmus.features.request.layout import VALID, Layout, input_name
from isthmus.features.types import TYPES
from isthmus.features.values.columns import Values, from_python
from isthmus.package.featurizer.form import CASTS, NUMBERS, OPERATORS, REALS, WHOLES, RawInput, text_of
from isthmus.package.featurizer.trace import GraphInput, build_head
from isthmus.transforms.rowwise.core.graph import assembled

FILE = Path(__file__).parents[2] / "fixtures" / "heads.txt"
DTYPES = {
    "bool": "Bool", "int32": "Int32", "int64": "Int64", "float": "Float32", "double": "Float64", "string": "String",
}  # fmt: skip
"""Element type to a type that is held in it."""
_REAL = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    0.5,
    2.5,
    -2.5,
    3.7,
    1e-45,
    -1e-40,
    16777217.0,
    1e10,
    3.4e38,
    math.inf,
    -math.inf,
    math.nan,
]
EDGES: Mapping[str, Sequence[Any]] = {
    "bool": [True, False],
    "int32": [0, 1, -1, 7, -8, 46341, 2**31 - 1, -(2**31), 16777217],
    "int64": [0, 1, -1, 7, -8, 2**53 + 1, 3037000500, 2**63 - 1, -(2**63), (1 << 62) + (1 << 38) + 1, 16777217],
    "float": [float(np.float32(value)) for value in _REAL],
    "double": [*_REAL, 5e-324, 1.7976931348623157e308, 3.4028235677973366e38, 0.1, 4503599627370497.5],
    "string": ["", "a", "b", "Ab", "é", "e\u0301", "a.b", "a\nb", "aXbYc", "ab", "😀", "a😀b", "ÄZ", "\0"],
}  # fmt: skip
PATTERNS = [
    "(?s)a.*", "(?s).*b", "(?s).*b.*", "(?s)a.b", "(?s)a.*b", "(?s).", "(?s)..", "(?s)", "(?s).*", "(?s)a.*Y.*",
    "(?s).*.b.*", "(?s).*X.Y.*", r"(?s)a\.b", r"[\x00-\x7f]*", "(?s)😀", "(?s).*é", "(?s)ab.*b",
]  # fmt: skip


def shown(value: Any, element: str) -> str:
    """A value as a case has it."""
    if element == "string":
        return f"s{value.encode().hex()}"
    return text_of(value, element) if value == value else "nan"


def lines(
    head: bytes, dtypes: Mapping[str, str], columns: Mapping[str, Values], answers: Sequence[Any]
) -> Iterator[str]:
    """A head with its rows. `answers` are its outputs, each (n, …), and last the mask of refused rows, (n,)."""
    form = json.loads(head)
    yield f"head {base64.b64encode(head).decode()}"
    yield "columns " + " ".join(f"{name}:{dtype}" for name, dtype in dtypes.items())
    elements = [element for _, element, slots in form["outputs"] for _ in slots]
    inputs = [columns[name].tolist(TYPES[dtype]) for name, dtype in dtypes.items()]
    outputs = [column for array in answers[:-1] for column in array.T]
    answered = zip(*(_shown(*each) for each in zip(outputs, elements, strict=True)), strict=True)
    for values, answer, refused in zip(zip(*inputs, strict=True), answered, answers[-1], strict=True):
        fed = ["-" if value is None else shown(value, TYPES[dtype].tensor)
               for value, dtype in zip(values, dtypes.values(), strict=True)]  # fmt: skip
        yield f"row {' '.join(fed)} = {' '.join(answer)} {int(refused)}"


def _shown(column: Array, element: str) -> Sequence[str]:
    if element not in REALS:
        return [shown(value, element) for value in column.tolist()]
    text, width = column.astype(column.dtype.newbyteorder(">")).tobytes().hex(), 2 * column.itemsize
    nan = np.isnan(column).tolist()
    return ["nan" if nan[row] else text[row * width : (row + 1) * width] for row in range(len(column))]


def session(graph: bytes) -> ort.InferenceSession:
    """ONNX Runtime on a thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def sources(layout: Layout) -> list[GraphInput]:
    """The inputs of a graph with a layout."""
    dtypes = {name: DTYPES[element] for element, names in layout.inputs.items() for name in names}
    values = [GraphInput(input_name(element), element, [RawInput(name, dtypes[name], "value") for name in names])
              for element, names in layout.inputs.items()]  # fmt: skip
    return [
        *values,
        GraphInput(input_name(VALID), "bool", [RawInput(name, dtypes[name], "valid") for name in layout.masks]),
    ]


def operators() -> tuple[bytes, Layout, dict[str, str]]:
    """A graph of every operator on each of its types, the layout of its inputs, and its outputs with their types.

    Inputs `a` and `b` have any value, `z` are not 0 where the processor decides between zeros, `d` are divisors, `c`
    are numbers of less than 32 bits.
    """
    names = {element: [f"{letter}_{element}" for letter in "abzdc"] for element in DTYPES}
    nodes = [
        helper.make_node("Split", [input_name(element)], rows, axis=0, num_outputs=len(rows))
        for element, rows in names.items()
    ]
    results: dict[str, list[str]] = {element: [] for element in DTYPES}

    def add(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
        name = f"y{len(nodes)}"
        nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        results[output].append(name)

    for operator, (arity, elements) in OPERATORS.items():
        if operator in ("Cast", "Where", "Gather", "LabelEncoder", "StringNormalizer", "RegexFullMatch"):
            continue
        for element in elements:
            second = (
                "z" if operator in ("Max", "Min") else "d" if operator in ("Div", "Mod") and element in WHOLES else "b"
            )
            # ONNX Runtime 1.31 compares two int64 beside each other by their lower halves.
            first = "c" if second == "z" and element in WHOLES else "a"
            inputs = [f"{first}_{element}", f"{second}_{element}"][:arity]
            predicate = operator in ("Equal", "IsNaN", "IsInf") or operator.startswith(("Less", "Greater"))
            fmod = {"fmod": 1} if operator == "Mod" and element in REALS else {}
            add(operator, inputs, "bool" if predicate else element, **fmod)
    for element in DTYPES:
        if element in OPERATORS["Where"][1]:
            add("Where", ["a_bool", f"a_{element}", f"b_{element}"], element)
        for to in CASTS.get(element, ()):
            begin = "c" if element in REALS and to in WHOLES else "a"
            add("Cast", [f"{begin}_{element}"], to, to=TensorProto.DataType.Value(to.upper()))
    words = ["Ab", "é", "e\u0301", "", "😀"]
    add(
        "LabelEncoder",
        ["a_string"],
        "int64",
        domain="ai.onnx.ml",
        keys_strings=words,
        values_int64s=[5, 6, 7, 8, 2**63 - 1],
    )
    add(
        "LabelEncoder",
        ["a_int64"],
        "int64",
        domain="ai.onnx.ml",
        keys_int64s=[7, -(2**63)],
        values_int64s=[-2, 3],
        default_int64=9,
    )
    for case in ("LOWER", "UPPER"):
        # Of other letters it has no case in the locale C.
        add("StringNormalizer", ["a_string"], "string", case_change_action=case, locale="C", is_case_sensitive=1)
    for pattern in PATTERNS:
        add("RegexFullMatch", ["a_string"], "bool", pattern=pattern)
    constants = [
        numpy_helper.from_array(np.array([0.5, -0.0, 2.0]), "table_double"),
        numpy_helper.from_array(np.array([1, -2, 3], np.int32), "table_int32"),
        helper.make_tensor("table_string", TensorProto.STRING, [3], np.array(["x", "é", ""], object)),
    ]
    for constant, element in zip(constants, ("double", "int32", "string"), strict=True):
        add("Gather", [constant.name, "i_int64"], element)
    names["int64"].append("i_int64")
    nodes[list(names).index("int64")] = helper.make_node(
        "Split", [input_name("int64")], names["int64"], axis=0, num_outputs=len(names["int64"])
    )
    nodes += [helper.make_node("Concat", found, [f"found_{element}"], axis=0) for element, found in results.items()]
    layout = Layout(names, [name for rows in names.values() for name in rows], {}, [])
    types = {element: TensorProto.DataType.Value(element.upper()) for element in DTYPES}
    fed = [
        helper.make_tensor_value_info(input_name(element), types[element], [len(rows), "N"])
        for element, rows in names.items()
    ]
    outputs = [
        helper.make_tensor_value_info(f"found_{element}", types[element], [len(found), "N"])
        for element, found in results.items()
    ]
    model = assembled("operators", nodes, fed, outputs, constants)
    graph: bytes = model.SerializeToString(deterministic=True)
    return graph, layout, {f"found_{element}": element for element in results}


def _fitting(name: str, value: Any) -> bool:
    """Whether an input may have a value."""
    letter, element = name.split("_")
    match letter:
        case "z":
            return value != 0 if element in REALS else element != "int64" or abs(value) < 2**31
        case "d":
            return element not in WHOLES or value not in (0, -1)
        case "c":
            return element not in NUMBERS or abs(value) < 2**31
        case "i":
            return bool(-3 <= value < 3)
    return True


def rows(layout: Layout, count: int, seed: int) -> dict[str, Values]:
    """Rows of edges, each at least once, but no nulls: what is under them, graphs ignore."""
    draw = np.random.default_rng(seed)
    columns = {}
    for element, names in layout.inputs.items():
        for name in names:
            edges = [
                value for value in (range(-3, 3) if name == "i_int64" else EDGES[element]) if _fitting(name, value)
            ]
            places = np.concatenate([np.arange(len(edges)), draw.integers(0, len(edges), max(0, count - len(edges)))])[
                :count
            ]
            columns[name] = from_python(
                [edges[place] for place in draw.permutation(places).tolist()], TYPES[DTYPES[element]]
            )
    return columns


def torn() -> Iterator[tuple[str, bytes]]:
    """Heads that nobody takes, by what is wrong with them."""
    sound: dict[str, Any] = {
        "version": 1, "inputs": [["x", "Float32", "number"], ["s", "String", "text"]],
        "constants": [["float", ["3f800000"]]], "steps": [["Add", "float", [0, 2]]],
        "outputs": [["numbers", "float", [3]]], "refused": None,
    }  # fmt: skip

    def with_steps(*steps: Any) -> Callable[[dict[str, Any]], None]:
        return lambda form: form.update(steps=[*steps])

    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "another version": lambda form: form.update(version=2),
        "no version": lambda form: form.pop("version"),
        "no steps": lambda form: form.pop("steps"),
        "no mask": lambda form: form.pop("refused"),
        "a choice of truths": with_steps(
            ["Add", "float", [0, 2]], ["IsNaN", "float", [0]], ["Where", "bool", [4, 4, 4]],
        ),
        "an unknown operator": with_steps(["Pow", "float", [0, 2]]),
        "an operator of another type": with_steps(["And", "float", [0, 2]]),
        "an unknown type": with_steps(["Add", "half", [0, 2]]),
        "a slot that is not there": with_steps(["Add", "float", [0, 99]]),
        "its own slot": with_steps(["Add", "float", [0, 3]]),
        "a slot before the first": with_steps(["Add", "float", [0, -1]]),
        "no whole slot": with_steps(["Add", "float", [0, 1.5]]),
        "a slot of another type": with_steps(["Add", "float", [0, 1]]),
        "an operand too few": with_steps(["Add", "float", [0]]),
        "an operand too many": with_steps(["Add", "float", [0, 2, 2]]),
        "an attribute too many": with_steps(["Add", "float", [0, 2], "more"]),
        "no attribute": with_steps(["Cast", "float", [0]]),
        "no such cast": with_steps(["Cast", "float", [0], "string"]),
        "no such case": with_steps(["StringNormalizer", "string", [1], "TITLE"]),
        "no vocabulary": with_steps(["LabelEncoder", "string", [1], [["a"], ["1", "2"], "0"]]),
        "no parts": with_steps(["RegexFullMatch", "string", [1], []]),
        "no pieces": with_steps(["RegexFullMatch", "string", [1], [[]]]),
        "bits with a sign": lambda form: form.update(constants=[["float", ["+3f80000"]]]),
        "a number with a sign": lambda form: form.update(constants=[["float", ["3f800000"]], ["int64", ["+1"]]]),
        "a number as a constant": lambda form: form.update(constants=[["float", ["3f800000"]], ["int64", [1]]]),
        "no name": lambda form: form.update(inputs=[[7, "Float32", "number"], ["s", "String", "text"]]),
        "no bits": lambda form: form.update(constants=[["float", ["3f80"]]]),
        "no number": lambda form: form.update(constants=[["int32", ["2147483648"]], ["float", ["3f800000"]]]),
        "no truth": lambda form: form.update(constants=[["float", ["3f800000"]], ["bool", ["2"]]]),
        "no role": lambda form: form.update(inputs=[["x", "Float32", "any"], ["s", "String", "text"]]),
        "no such input": lambda form: form.update(inputs=[["x", "Bytes", "valid"], ["s", "String", "text"]]),
        "a text as a number": lambda form: form.update(inputs=[["x", "String", "number"], ["s", "String", "text"]]),
        "an output of another type": lambda form: form.update(outputs=[["numbers", "int32", [3]]]),
        "two outputs of a name": lambda form: form.update(outputs=[["numbers", "float", [3]]] * 2),
        "an output of nothing": lambda form: form.update(outputs=[["numbers", "float", [4]]]),
        "a mask of another type": lambda form: form.update(refused=3),
    }  # fmt: skip
    for name, change in changes.items():
        form = json.loads(json.dumps(sound))
        change(form)
        yield name, json.dumps(form).encode()
    yield "the half of one", json.dumps(sound).encode()[:80]
    yield "nothing", b""
    yield "no JSON", b"\xff"
    yield "another thing", b"[1]"
    yield "a deep one", b"[" * 100_000
    yield "too many steps", json.dumps({**sound, "steps": [["Add", "float", [0, 2] * (2**20)]]}).encode()
    yield "too large", json.dumps(sound).encode() + b" " * 2**24


def operator_cases(count: int, seed: int) -> Iterator[str]:
    """Of every operator on each of its types, by ONNX Runtime."""
    graph, layout, outputs = operators()
    head = build_head(graph, sources(layout), outputs, None, session)
    columns = rows(layout, count, seed)
    feeds = {name: tensor for name, tensor in layout.feeds(columns).items() if name != input_name(VALID)}
    answers = [tensor.T for tensor in session(graph).run([*outputs], feeds)]
    dtypes = {name: DTYPES[element] for element, names in layout.inputs.items() for name in names}
    yield from lines(head, dtypes, columns, [*answers, np.zeros(count, bool)])


def cases() -> Iterator[str]:
    """The lines of the file; a head that is too large is not one of them."""
    yield from operator_cases(40, 0)
    for _, data in torn():
        if len(data) < 2**20:
            yield f"torn {base64.b64encode(data).decode()}"


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in cases()), encoding="ascii")
