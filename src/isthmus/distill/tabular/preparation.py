"""Writes the preparation of a network's inputs as an ONNX graph; columns with the same steps form one matrix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, helper

from isthmus.distill.declaration import Plan
from isthmus.distill.onnx.builder import Building
from isthmus.distill.onnx.runtime import session
from isthmus.distill.tabular.tensors import TabularTensors
from isthmus.distill.types import Array
from isthmus.features.request.layout import VALID, input_name, output_name
from isthmus.transforms.preparation import fit
from isthmus.transforms.preparation.fit import FittedNumber, FittedText, Preparation
from isthmus.transforms.preparation.steps import Embed, Hashed, OneHot

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

FILE = "preparation.onnx"
NUMBERS = "numbers"


def fit_preparation(rows: Any, plan: Plan, before: int) -> Preparation:
    return fit.fit(fit.training_part(rows, before), plan.numbers, plan.texts)


@dataclass(frozen=True)
class Prepare:
    """A fitted preparation of a network's inputs and its ONNX graph; call it to prepare rows.

    The graph's inputs are `numeric`, float32 (N, numbers) with NaN for null, and `text_0`, …, each (N,) with "" for
    null. Its outputs are `numbers`, float32 (N, width), and for each embedded text `place_0`, …, int64 (N,): the row to
    look up in the embedding table.
    """

    preparation: Preparation
    graph: bytes

    def __call__(self, data: TabularTensors) -> tuple[Array, Array]:
        """Prepare n rows: return numbers, float32 (n, width), and rows of the embedding tables, int64 (n, texts)."""
        feeds = {f"text_{place}": data.categories[:, place] for place in range(data.categories.shape[1])}
        if data.numeric.shape[1]:
            feeds["numeric"] = data.numeric
        names = [f"place_{place}" for place in self.preparation.embedded]
        used = {item.name: feeds[item.name] for item in self._session.get_inputs()}
        numbers, *places = self._session.run([NUMBERS, *names], used)
        return numbers, np.stack(places, axis=1) if places else np.empty((len(data.numeric), 0), np.int64)

    @cached_property
    def _session(self) -> "InferenceSession":
        return session(self.graph, 1)


def preparation_graph(preparation: Preparation) -> bytes:
    build = Building()
    inputs, parts = [], []
    if preparation.numbers:
        count = len(preparation.numbers)
        inputs.append(helper.make_tensor_value_info("numeric", TensorProto.FLOAT, ["N", count]))
        rows = build.add("Transpose", ["numeric"], "rows", perm=[1, 0])
        missing = build.add("IsNaN", [rows], "missing")
        valid = build.add("Not", [missing], "there")
        computed = [*_groups(build, preparation.numbers, rows, valid)]
        indicators = [place for place, number in enumerate(preparation.numbers) if number.indicator]
        if indicators:
            picked = _picked(build, missing, indicators, count)
            computed.append(build.add("Cast", [picked], "absent", to=TensorProto.FLOAT))
        together = build.add("Concat", computed, "made", axis=0) if len(computed) > 1 else computed[0]
        parts.append(build.add("Transpose", [together], "columns", perm=[1, 0]))
    outputs = []
    for place, text in enumerate(preparation.texts):
        inputs.append(helper.make_tensor_value_info(f"text_{place}", TensorProto.STRING, ["N"]))
        index = _index(build, text, place)
        if isinstance(text.text, Embed | Hashed):
            build.add("Identity", [index], f"place_{place}")
            outputs.append(helper.make_tensor_value_info(f"place_{place}", TensorProto.INT64, ["N"]))
        else:
            parts.append(_encode(build, text, index, place))
    if not parts:  # a network of embeddings alone
        shape = build.add("Shape", ["place_0"], "rows_of_texts")
        width = build.add("Concat", [shape, build.constant("no_columns", np.array([0]))], "nothing", axis=0)
        parts.append(build.add("ConstantOfShape", [width], "no_numbers"))
    build.add("Concat", parts, NUMBERS, axis=1)
    outputs.insert(0, helper.make_tensor_value_info(NUMBERS, TensorProto.FLOAT, ["N", preparation.width]))
    model: bytes = build.model("preparation", inputs, outputs).SerializeToString(deterministic=True)
    return model


def _groups(build: Building, numbers: Sequence[FittedNumber], rows: str, valid: str) -> Iterator[str]:
    for turn, places in enumerate(grouped(numbers)):
        value, mask = (_picked(build, tensor, places, len(numbers)) for tensor in (rows, valid))
        group, name = [numbers[place] for place in places], f"group_{turn}"
        model = fit.chain_graph(group[0].chain, list(map(len, group[0].parameters)))
        columns = [*zip(*([p for part in number.parameters for p in part] for number in group), strict=True)]
        if columns:
            # The graph for one column also works on a matrix with a row per column and parameters per row.
            fed = {f"{input_name('float')}[0]": value, f"{input_name(VALID)}[0]": mask}
            for n, values in enumerate(columns, 1):
                params = np.array(values, np.float32)[:, None] + np.float32(0)  # makes 0.0 of -0.0
                fed[f"{input_name('float')}[{n}]"] = build.constant(f"{name}/p{n}", params)
                fed[f"{input_name(VALID)}[{n}]"] = mask
        else:
            fed = {input_name("float"): value, input_name(VALID): mask}
        yield build.include(model, name, fed)[output_name("float")]


def grouped(numbers: Sequence[FittedNumber]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for place, number in enumerate(numbers):
        groups.setdefault(repr(number.steps), []).append(place)
    return list(groups.values())


def _index(build: Building, text: FittedText, place: int) -> str:
    # The graph uses only the shape of the mask.
    fed = dict.fromkeys((input_name("string"), input_name(VALID)), f"text_{place}")
    return build.include(fit.place_graph(text.places), f"place_of_{place}", fed)[output_name("int64")]


def _encode(build: Building, text: FittedText, index: str, place: int) -> str:
    column = build.add("Unsqueeze", [index, build.constant("at_1", np.array([1]))], f"text_{place}/column")
    if isinstance(text.text, OneHot):
        every = build.constant(f"text_{place}/every", np.arange(text.count))
        matches = build.add("Equal", [column, every], f"text_{place}/is")
        return build.add("Cast", [matches], f"text_{place}/one_hot", to=TensorProto.FLOAT)
    number = build.add("Cast", [column], f"text_{place}/number", to=TensorProto.FLOAT)
    most = build.constant(f"text_{place}/most", np.float32(max(1, len(text.places))))
    return build.add("Div", [number, most], f"text_{place}/ordinal")


def _picked(build: Building, tensor: str, places: Sequence[int], count: int) -> str:
    if list(places) == list(range(count)):
        return tensor
    name = f"{tensor}/{'_'.join(map(str, places))}"
    return build.add("Gather", [tensor, build.constant(f"{name}/places", np.array(places))], name, axis=0)
