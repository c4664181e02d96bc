"""A model package as its readers see it: the manifest, and the tensors the model is fed.

Training, export, verification and serving all build their tensors with `feeds`, so a value is cast in one place only.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from isthmus.features.contract.contract import Contract, one_of
from isthmus.features.errors import ContractMismatch, DataError, PackageError
from isthmus.features.package.checksums import CONTRACT, GOLDEN, MANIFEST, README, REMEDY, SUMS, summed
from isthmus.features.request.layout import Layout, input_name
from isthmus.features.types import INPUTS, TYPES, DataType, String
from isthmus.features.values.columns import Values

FORMAT_VERSION = 2
_LONGEST = 255
_SHOWN = 60
"""Characters of a name that a message shows."""

Feeds = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One raw value a model is fed: the name of its column and its declared type.

    String inputs are categories. Bool, Int32, Int64, Float32, Float64 and UnixTimestamp inputs are numbers.

    Attributes:
        name: its column.
        dtype: the type.
        row: whether a request transform in the graph takes it: then it goes in as it is, in its own type.
    """

    name: str
    dtype: DataType
    row: bool = False

    @property
    def is_category(self) -> bool:
        """Whether the value goes into the tensor of categories."""
        return self.dtype == String and not self.row

    @property
    def is_number(self) -> bool:
        """Whether the value goes into the tensor of numbers."""
        return self.dtype != String and not self.row


def feeds(inputs: Sequence[ModelInput], columns: Mapping[str, Values]) -> Feeds:
    """The tensors of a model from raw columns.

    Args:
        inputs: the model's inputs in order; at least one.
        columns: a column of n values for every input; others are ignored.

    Returns:
        "numeric": float32 (n, numbers), NaN for null, microseconds for a UnixTimestamp; "categories": str (n,
        categories) with dtype object, "" for null. A tensor without columns is left out. Of an input that a request
        transform takes, a row of the tensors that `rowgraph` tells of.

    Raises:
        DataError: a column is missing, or an input is of a type that no model reads.
    """
    missing = [item.name for item in inputs if item.name not in columns]
    if missing:
        raise DataError("model inputs", f"no column {', '.join(missing)}", expected="a column for every input")
    if unusable := [item for item in inputs if item.dtype not in INPUTS]:
        where = f"model input {unusable[0].name}"
        raise DataError(where, f"its type is {unusable[0].dtype}", expected="a number or a String")
    numbers = [columns[item.name] for item in inputs if item.is_number]
    categories = [columns[item.name] for item in inputs if item.is_category]
    tensors: Feeds = {}
    if numbers:
        numeric = np.empty((len(numbers[0].data), len(numbers)), np.float32)
        with np.errstate(over="ignore"):  # beyond float32 becomes infinite, and the model clips it
            for position, values in enumerate(numbers):
                numeric[:, position] = values.data
                numeric[~values.valid, position] = np.nan
        tensors["numeric"] = numeric
    if categories:
        texts = np.empty((len(categories[0].data), len(categories)), object)
        for position, values in enumerate(categories):
            texts[:, position] = values.data
            texts[~values.valid, position] = ""
        tensors["categories"] = texts
    taken = {item.name: item.dtype for item in inputs if item.row}
    return tensors | Layout.of(taken).feeds(columns) if taken else tensors


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that a graph is fed or gives; a size that differs from call to call has a name."""

    name: str
    element: Literal["bool", "uint8", "int32", "int64", "float", "double", "string"]
    shape: tuple[int | str, ...]


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column that a graph of rows is fed: `position` is its column in the tensor "numeric" or "categories".

    Of an input that a request transform takes, it is its row in the tensor, which is one of those that `rowgraph` tells
    of. Such inputs stand in the order of their rows in "given_valid".
    """

    name: str
    dtype: str
    tensor: str
    position: int


def placed(inputs: Sequence[ModelInput]) -> tuple[Input, ...]:
    """Where `feeds` puts each input."""
    counts: dict[str, int] = {}
    result = []
    for item in inputs:
        tensor = input_name(item.dtype.tensor) if item.row else "categories" if item.is_category else "numeric"
        result.append(Input(item.name, item.dtype.name, tensor, counts.get(tensor, 0)))
        counts[tensor] = counts.get(tensor, 0) + 1
    return tuple(result)


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model file.

    Attributes:
        tolerance: largest absolute difference from the trained model that export let through.
        worst: the largest difference it measured on the golden cases and on test rows.
        quality: of the file's own answers on the test part, by measure; None where they do not say.
        most: the largest that a size with a name may be, by that name; of a size that is not there, any.
    """

    file: str
    precision: Literal["fp32", "int8"]
    format: Literal["onnx", "ort", "pte"]
    bytes: int
    sha256: str
    tolerance: float
    worst: float
    quality: dict[str, float | None]
    most: dict[str, int] = {}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a package holds and which contract its inputs come from.

    Attributes:
        task: "tabular", or the class that made it.
        metric: the measure of quality that counts.
        inputs: the columns of which the tensors are made; none if only the task can make them.
        tensors: what the graph is fed.
        outputs: what it gives.
        files: what else is there, each with what it is for.
    """

    format_version: int
    name: str
    contract: str
    service: str
    model: str
    training_set: str
    task: str
    metric: str
    inputs: tuple[Input, ...]
    tensors: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    variants: tuple[Variant, ...]
    files: dict[str, str]

    @property
    def model_inputs(self) -> tuple[ModelInput, ...]:
        """The inputs in order, for `feeds`."""
        return tuple(
            ModelInput(item.name, TYPES[item.dtype], item.tensor.startswith(input_name(""))) for item in self.inputs
        )

    def variant(self, precision: str, format: str = "ort") -> Variant:  # noqa: A002 - the manifest's own word
        """The model file of a precision and a format."""
        for variant in self.variants:
            if (variant.precision, variant.format) == (precision, format):
                return variant
        raise PackageError(f"package {self.name}", f"no {precision} model in {format} format", remedy=REMEDY)


def read_package(path: Path) -> Manifest:
    """The manifest of a package, after every file of the folder was compared with its SHA-256 sum.

    Raises:
        PackageError: the file that is missing, altered, not listed, outside the folder or not understood.
    """
    sums, sizes = summed(path)
    for name in (MANIFEST, CONTRACT, GOLDEN):
        if name not in sums:
            raise PackageError(str(path / name), "missing", expected=f"listed in {SUMS}", remedy=REMEDY)
    try:
        msgspec.json.decode((path / CONTRACT).read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PackageError(str(path / CONTRACT), str(error), expected="a contract", remedy=REMEDY) from error
    return _read_manifest(path / MANIFEST, sums, sizes)


def read_contract(path: Path, manifest: Manifest) -> Contract:
    """The contract that a package whose sums hold was made under.

    Raises:
        PackageError: it is none, it is another one than the manifest names, or it does not have the package's service.
    """
    file = path / "contract.json"
    try:
        contract = Contract.loads(file.read_bytes(), str(file))
    except OSError as error:
        raise PackageError(str(file), str(error), expected="a contract", remedy=REMEDY) from error
    except ContractMismatch as error:
        raise PackageError(error.where, error.found, expected=error.expected, remedy=REMEDY) from error
    if contract.hash != manifest.contract:
        found, expected = f"contract {contract.hash[:12]}", f"{manifest.contract[:12]}, as in the manifest"
        raise PackageError(str(file), found, expected=expected, remedy=REMEDY)
    if manifest.service not in contract.services:
        found = f"no service {manifest.service}"
        raise PackageError(str(file), found, expected=one_of(contract.services), remedy=REMEDY)
    return contract


def package_digest(path: Path) -> str:
    """What identifies a package: the SHA-256 of its sums."""
    try:
        return hashlib.sha256((path / SUMS).read_bytes()).hexdigest()
    except OSError as error:
        raise PackageError(str(path / SUMS), "cannot be read", expected="a package folder", remedy=REMEDY) from error


class _Version(msgspec.Struct):
    format_version: int


def _read_manifest(file: Path, sums: Mapping[str, str], sizes: Mapping[str, int]) -> Manifest:
    data = file.read_bytes()
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise PackageError(
                str(file),
                f"format version {version}",
                expected=str(FORMAT_VERSION),
                remedy="use the release of Isthmus that wrote the package, or export the model again",
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PackageError(str(file), str(error), expected="a manifest", remedy=REMEDY) from error
    for found, expected in _misfits(manifest, sums, sizes):
        raise PackageError(str(file), found, expected=expected, remedy=REMEDY)
    return manifest


def _misfits(manifest: Manifest, sums: Mapping[str, str], sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """What a manifest says that cannot be, and what was expected."""
    # Messages show them, and a terminal obeys what some characters say.
    for name in chain(
        (manifest.name, manifest.contract, manifest.service, manifest.model, manifest.training_set),
        (manifest.task, manifest.metric),
        *((one.name, one.dtype, one.tensor) for one in manifest.inputs),
        *((one.name, *map(str, one.shape)) for one in (*manifest.tensors, *manifest.outputs)),
        *((one.file, one.sha256) for one in manifest.variants),
    ):
        if not name.isprintable() or len(name) > _LONGEST:
            yield f"a name is {name[:_SHOWN]!r}", f"at most {_LONGEST} characters that can be shown"
    for item in manifest.inputs:
        if TYPES.get(item.dtype) not in INPUTS:
            yield f"input {item.name} has type {item.dtype}", "|".join(map(str, INPUTS))
    for item, place in zip(manifest.inputs, placed(manifest.model_inputs), strict=True):
        if item != place:
            yield f"input {item.name} is {item.tensor}[{item.position}]", f"{place.tensor}[{place.position}]"
    yield from (
        (f"two {what} {name}", "one of a name")
        for what, names in (
            ("inputs", [f"{item.name} in {item.tensor}" for item in manifest.inputs]),
            ("tensors", [tensor.name for tensor in manifest.tensors]),
            ("outputs", [tensor.name for tensor in manifest.outputs]),
            ("models", [f"{variant.precision} in {variant.format} format" for variant in manifest.variants]),
            ("model files", [variant.file for variant in manifest.variants]),
        )
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    )
    if not manifest.variants:
        yield "names no model file", "at least one"
    if missing := [name for name in manifest.files if name not in sums]:
        yield f"{missing[0]} has no sum", f"listed in {SUMS}"
    sizes_of = {size for tensor in manifest.tensors for size in tensor.shape if isinstance(size, str)}
    for variant in manifest.variants:
        if wrong := [name for name, most in variant.most.items() if most < 1 or name not in sizes_of]:
            yield f"{variant.file} takes at most {variant.most[wrong[0]]} of {wrong[0]}", "a size of its tensors"
        if sums.get(variant.file) != variant.sha256:
            yield f"{variant.file} has {sums.get(variant.file, 'no sum')}", variant.sha256
        if sizes[variant.file] != variant.bytes:
            yield f"{variant.file} has {sizes[variant.file]:,} bytes", f"{variant.bytes:,}"
    told = {MANIFEST, CONTRACT, GOLDEN, README, *manifest.files, *(variant.file for variant in manifest.variants)}
    if unknown := sorted(sums.keys() - told):
        yield f"says nothing of {unknown[0]}", "a word about every file"
