"""Golden cases: inputs of a model, and the outputs of each of its files, so that a device can check its own results."""

import math
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from isthmus.features.types import Bool, String
from isthmus.features.values.columns import Values, from_python
from isthmus.package.checksums import GOLDEN, damage_error, require_unique_keys
from isthmus.package.inputs import Feeds, ModelInput
from isthmus.package.manifest import Manifest, Package, TensorInfo, Variant

_NUMPY = {
    "bool": "?", "uint8": "u1", "int32": "<i4", "int64": "<i8", "float": "<f4", "double": "<f8",
}  # fmt: skip
"""NumPy code of each element type in a tensor's bytes."""

_EXACT = 2**53
"""Every integer up to here is exactly representable as a double."""

_WORDS = ("NaN", "Infinity", "-Infinity")


class TensorBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor in JSON, exact to the bit. `element` is a key of `_NUMPY`, or "string".

    `data` has the elements in row-major order, little-endian; Base64 in JSON. A string tensor has `texts` instead.
    """

    element: str
    shape: tuple[int, ...]
    data: bytes = b""
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, array: "np.ndarray[Any, Any]") -> "TensorBytes":
        if array.dtype == object:
            return cls("string", array.shape, texts=tuple(map(str, array.ravel().tolist())))
        dtype = array.dtype.newbyteorder("<")
        element = next(name for name, code in _NUMPY.items() if np.dtype(code) == dtype)
        return cls(element, array.shape, np.ascontiguousarray(array, dtype).tobytes())

    @property
    def array(self) -> "np.ndarray[Any, Any]":
        if min(self.shape, default=0) < 0:
            raise ValueError(f"a tensor of shape {list(self.shape)}")
        if self.element == "string":
            flat = np.array(self.texts, object)
        elif self.element in _NUMPY:
            flat = np.frombuffer(self.data, _NUMPY[self.element])
            if self.element == "bool" and not set(self.data) <= {0, 1}:
                raise ValueError("a bool that is neither 0 nor 1")
        else:
            raise ValueError(f"elements of kind {self.element}")
        if len(flat) != math.prod(self.shape):
            raise ValueError(f"cannot reshape {len(flat):,} elements to {list(self.shape)}")
        return flat.reshape(self.shape)

    def misfit(self, tensor: TensorInfo) -> str:
        if self.element != tensor.element:
            return f"tensor {tensor.name} holds {self.element} and not {tensor.element}"
        sizes = zip(self.shape, tensor.shape, strict=False)
        if len(self.shape) != len(tensor.shape) or any(isinstance(size, int) and size != own for own, size in sizes):
            return f"tensor {tensor.name} has shape {list(self.shape)} and not {list(tensor.shape)}"
        return ""


class Inputs(Protocol):
    """A batch of inputs for the files of a package."""

    def fed(self, variant: Variant) -> Feeds:
        """Return the input tensors to run the model file `variant` on, by name.

        A file with the whole model reads features. A file with only the model's numeric core reads numbers that a
        featurizer has computed from them outside the graph.
        """


class GoldenCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A batch of recorded inputs, and the outputs of each model file for them.

    Attributes:
        outputs: output tensors, by model file and then by name.
        rows: source of the tensors, for a model of rows: `rows[i][j]` is input j of row i. Non-finite numbers are
            "NaN", "Infinity" and "-Infinity".
        core: inputs of the numeric core by name; empty if no model file is only the core.
    """

    tensors: dict[str, TensorBytes]
    outputs: dict[str, dict[str, TensorBytes]]
    rows: tuple[tuple[bool | int | float | str | tuple[float | str, ...] | None, ...], ...] = ()
    core: dict[str, TensorBytes] = {}

    @property
    def feeds(self) -> Feeds:
        return {name: tensor.array for name, tensor in self.tensors.items()}

    def fed(self, variant: Variant) -> Feeds:
        return {name: tensor.array for name, tensor in self.core.items()} if variant.core else self.feeds


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `golden.json`. `inputs` names the columns of `GoldenCase.rows`."""

    inputs: tuple[str, ...]
    cases: tuple[GoldenCase, ...]

    def columns(self, case: GoldenCase, inputs: Sequence[ModelInput]) -> dict[str, Values]:
        columns = {}
        for item in inputs:
            position = self.inputs.index(item.name)
            values: list[Any] = [row[position] for row in case.rows]
            if item.dtype.name.startswith("Float"):
                values = [float(value) if value in _WORDS else value for value in values]
            for value in values:
                if value is not None and not _holds(item, value):
                    raise ValueError(f"input {item.name} is {value!r:.40}, which is not a valid {item.dtype}")
            with np.errstate(over="ignore"):  # the tensor is compared with the recorded tensor
                columns[item.name] = from_python(values, item.dtype)
        return columns


def _holds(item: ModelInput, value: Any) -> bool:
    dtype = item.dtype
    if item.size is not None:
        return isinstance(value, tuple) and len(value) == item.size and {*map(type, value)} <= {float}
    if dtype in (String, Bool):
        return type(value) is (str if dtype == String else bool)
    if dtype.name.startswith("Float"):
        return type(value) is float or (type(value) is int and abs(value) <= _EXACT)
    assert dtype.numpy is not None  # noqa: S101 - String is the only model input without a NumPy type
    return type(value) is int and np.iinfo(dtype.numpy).min <= value <= np.iinfo(dtype.numpy).max


def read_golden(package: Package) -> Golden:
    manifest, file, data = package.manifest, package.files.folder / GOLDEN, package.files.read(GOLDEN)
    try:
        golden = msgspec.json.decode(data, type=Golden)
        require_unique_keys(file, data)
        for case in golden.cases:
            for tensor in chain(
                case.tensors.values(), case.core.values(), *(outputs.values() for outputs in case.outputs.values())
            ):
                tensor.array  # noqa: B018 - raises if its elements do not fit
    except (ValueError, RecursionError) as error:  # ValueError includes msgspec's errors
        raise damage_error(file, str(error), "golden cases") from error
    if any(len(row) != len(golden.inputs) for case in golden.cases for row in case.rows):
        raise damage_error(file, "rows of unequal length", "a value per input")
    if unlike := {item.name for item in manifest.inputs}.symmetric_difference(golden.inputs):
        problem = f"{'an' if min(unlike) in golden.inputs else 'no'} input {min(unlike)}"
        raise damage_error(file, problem, "the inputs of the manifest")
    for case in golden.cases:
        _check_case(file, golden, case, manifest)
    if not golden.cases:
        raise damage_error(file, "no case", "at least one")
    for name, output in sorted(product((v.file for v in manifest.variants), (t.name for t in manifest.outputs))):
        # Empty outputs would match any model.
        if not any(math.prod(case.outputs[name][output].shape) for case in golden.cases):
            raise damage_error(file, f"no values of output {output} of {name}", "at least one")
    return golden


def _check_case(file: Path, golden: Golden, case: GoldenCase, manifest: Manifest) -> None:
    names = {tensor.name for tensor in manifest.outputs}
    complete = case.tensors.keys() == {tensor.name for tensor in manifest.tensors}
    complete &= case.core.keys() == {tensor.name for tensor in manifest.core}
    complete &= case.outputs.keys() == {variant.file for variant in manifest.variants}
    complete &= bool(case.rows) == bool(golden.inputs)
    if not complete or any(outputs.keys() != names for outputs in case.outputs.values()):
        raise damage_error(file, "an incomplete case", "the inputs and outputs of every model file")
    outputs = [(tensor, of[tensor.name]) for tensor in manifest.outputs for of in case.outputs.values()]
    if case.rows and any(output.shape[:1] != (len(case.rows),) for _, output in outputs):
        raise damage_error(file, "rows without an output", "an output per row")
    inputs = [(tensor, case.tensors[tensor.name]) for tensor in manifest.tensors]
    inputs += [(tensor, case.core[tensor.name]) for tensor in manifest.core]
    if misfits := [misfit for tensor, recorded in inputs + outputs if (misfit := recorded.misfit(tensor))]:
        raise damage_error(file, misfits[0], "tensors as in the manifest")
    try:
        golden.columns(case, manifest.model_inputs)
    except ValueError as error:
        raise damage_error(file, str(error), "values of the inputs' types") from error
