"""Golden cases: what a model is fed and what each of its files answers, for a device to see that it answers so, too."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from isthmus.features.errors import PackageError
from isthmus.features.package.checksums import GOLDEN, REMEDY
from isthmus.features.package.manifest import Feeds, Manifest, ModelInput, Tensor
from isthmus.features.types import Bool, DataType, String
from isthmus.features.values.columns import Values, from_python

_LAID_OUT = {
    "bool": "?", "uint8": "u1", "int32": "<i4", "int64": "<i8", "float": "<f4", "double": "<f8",
}  # fmt: skip
"""How the elements of a tensor lie in its bytes."""

_EXACT = 2**53
"""Up to here every whole number is a double, too."""

_WORDS = ("NaN", "Infinity", "-Infinity")


class TensorBytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor as JSON holds it: to the bit.

    Attributes:
        element: "bool", "uint8", "int32", "int64", "float", "double" or "string".
        shape: its sizes.
        data: its elements one after the other, the last dimension first, little-endian; in JSON as base64.
        texts: its elements, if they are texts.
    """

    element: str
    shape: tuple[int, ...]
    data: bytes = b""
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, array: "np.ndarray[Any, Any]") -> "TensorBytes":
        """What holds an array."""
        if array.dtype == object:
            return cls("string", array.shape, texts=tuple(map(str, array.ravel().tolist())))
        kind = array.dtype.newbyteorder("<")
        element = next(name for name, laid in _LAID_OUT.items() if np.dtype(laid) == kind)
        return cls(element, array.shape, np.ascontiguousarray(array, kind).tobytes())

    @property
    def array(self) -> "np.ndarray[Any, Any]":
        """The array.

        Raises:
            ValueError: there are not as many elements as the shape says, or they are of no known kind.
        """
        if min(self.shape, default=0) < 0:
            raise ValueError(f"a tensor of shape {list(self.shape)}")
        if self.element == "string":
            flat = np.array(self.texts, object)
        elif self.element in _LAID_OUT:
            flat = np.frombuffer(self.data, _LAID_OUT[self.element])
            if self.element == "bool" and not set(self.data) <= {0, 1}:
                raise ValueError("a bool that is neither 0 nor 1")
        else:
            raise ValueError(f"elements of kind {self.element}")
        if len(flat) != math.prod(self.shape):
            raise ValueError(f"cannot reshape {len(flat):,} elements to {list(self.shape)}")
        return flat.reshape(self.shape)

    def misfit(self, tensor: Tensor) -> str:
        """How it differs from what a manifest says of the tensor; empty if it does not."""
        if self.element != tensor.element:
            return f"tensor {tensor.name} holds {self.element} and not {tensor.element}"
        known = len(self.shape) == len(tensor.shape)
        sizes = zip(self.shape, tensor.shape, strict=known)
        if not known or any(found != size for found, size in sizes if isinstance(size, int)):
            return f"tensor {tensor.name} has shape {list(self.shape)} and not {list(tensor.shape)}"
        return ""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a model is fed at once, and what it answers.

    Attributes:
        tensors: what it is fed, by name.
        outputs: of each file each output by name.
        rows: of a model of rows, what the tensors are made of: `rows[i][j]` is input j of row i. A number that JSON
            lacks is "NaN", "Infinity" or "-Infinity".
    """

    tensors: dict[str, TensorBytes]
    outputs: dict[str, dict[str, TensorBytes]]
    rows: tuple[tuple[bool | int | float | str | None, ...], ...] = ()

    @property
    def feeds(self) -> Feeds:
        """The tensors as a runtime takes them."""
        return {name: kept.array for name, kept in self.tensors.items()}


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `golden.json` holds.

    Attributes:
        inputs: of a model of rows, the names of the columns.
        cases: what is asked at once, each.
    """

    inputs: tuple[str, ...]
    cases: tuple[Case, ...]

    def columns(self, case: Case, inputs: Sequence[ModelInput]) -> dict[str, Values]:
        """The rows of a case as columns for `feeds`.

        Raises:
            ValueError: a value is of no kind in which JSON holds its type, or there is no such column.
        """
        columns = {}
        for item in inputs:
            position = self.inputs.index(item.name)
            values: list[Any] = [row[position] for row in case.rows]
            if item.dtype.name.startswith("Float"):
                values = [float(value) if value in _WORDS else value for value in values]
            for value in values:
                if value is not None and not _holds(item.dtype, value):
                    raise ValueError(f"input {item.name} is {value!r:.40}, which is no {item.dtype}")
            with np.errstate(over="ignore"):  # what a tensor holds of it is compared with what is recorded
                columns[item.name] = from_python(values, item.dtype)
        return columns


def _holds(dtype: DataType, value: bool | int | float | str) -> bool:
    """Whether a value of JSON is one of a type."""
    if dtype in (String, Bool):
        return type(value) is (str if dtype == String else bool)
    if dtype.name.startswith("Float"):
        return type(value) is float or (type(value) is int and abs(value) <= _EXACT)
    assert dtype.numpy is not None  # noqa: S101 - of the types that a model reads a text alone has none
    return type(value) is int and np.iinfo(dtype.numpy).min <= value <= np.iinfo(dtype.numpy).max


def read_golden(path: Path, manifest: Manifest) -> Golden:
    """The golden cases of a package whose sums hold.

    Raises:
        PackageError: they are damaged, or do not fit the manifest.
    """
    file = path / GOLDEN
    try:
        golden = msgspec.json.decode(file.read_bytes(), type=Golden)
        for case in golden.cases:
            for tensor in (*case.tensors.values(), *(one for of in case.outputs.values() for one in of.values())):
                tensor.array  # noqa: B018 - raises if it cannot be had
    except (OSError, ValueError, RecursionError) as error:  # msgspec's, too
        raise PackageError(str(file), str(error), expected="golden cases", remedy=REMEDY) from error
    if any(len(row) != len(golden.inputs) for case in golden.cases for row in case.rows):
        raise PackageError(str(file), "rows of unequal length", expected="a value per input", remedy=REMEDY)
    if other := {item.name for item in manifest.inputs}.symmetric_difference(golden.inputs):
        found = f"{'an' if min(other) in golden.inputs else 'no'} input {min(other)}"
        raise PackageError(str(file), found, expected="the inputs of the manifest", remedy=REMEDY)
    fed, given = ({tensor.name for tensor in kinds} for kinds in (manifest.tensors, manifest.outputs))
    files = {variant.file for variant in manifest.variants}
    for case in golden.cases:
        complete = case.tensors.keys() == fed and case.outputs.keys() == files
        complete &= bool(case.rows) == bool(golden.inputs) and all(of.keys() == given for of in case.outputs.values())
        if not complete:
            expected = "what every model file is fed and every output of it"
            raise PackageError(str(file), "an incomplete case", expected=expected, remedy=REMEDY)
        answers = [kept for of in case.outputs.values() for kept in of.values()]
        if case.rows and any(kept.shape[:1] != (len(case.rows),) for kept in answers):
            raise PackageError(str(file), "rows without an output", expected="an output per row", remedy=REMEDY)
        tensors = [(tensor, case.tensors[tensor.name]) for tensor in manifest.tensors]
        tensors += [(tensor, of[tensor.name]) for tensor in manifest.outputs for of in case.outputs.values()]
        if misfits := [misfit for tensor, kept in tensors if (misfit := kept.misfit(tensor))]:
            raise PackageError(str(file), misfits[0], expected="tensors as in the manifest", remedy=REMEDY)
        try:
            golden.columns(case, manifest.model_inputs)
        except ValueError as error:
            raise PackageError(str(file), str(error), expected="values of the inputs' types", remedy=REMEDY) from error
    if not golden.cases:
        raise PackageError(str(file), "no case", expected="at least one", remedy=REMEDY)
    for name, output in sorted((name, output) for name in files for output in given):
        # Answers of no rows are the same of every model.
        if not any(math.prod(case.outputs[name][output].shape) for case in golden.cases):
            found = f"no number of output {output} of {name}"
            raise PackageError(str(file), found, expected="at least one", remedy=REMEDY)
    return golden
