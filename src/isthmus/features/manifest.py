"""A model package as its readers see it: the manifest, the sums and the tensors the model is fed.

Training, export, verification and serving all build their tensors with `feeds`, so a value is cast in one place only.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from isthmus.features.columns import Values
from isthmus.features.contract import Contract, one_of
from isthmus.features.errors import ContractMismatch, DataError, PackageError
from isthmus.features.rowgraph import Layout, given
from isthmus.features.types import TYPES, DataType, String, is_input

FORMAT_VERSION = 2
SUMS = "SHA256SUMS"
REMEDY = "export the model again, or copy the package folder again from where it was made"

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
    if unusable := [item for item in inputs if not is_input(item.dtype)]:
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


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model file.

    Attributes:
        tolerance: largest absolute difference from the trained model that export let through.
        worst: the largest difference it measured on the golden cases and on test rows.
        quality: of the file's own answers on the test part, by measure; None where they do not say.
    """

    file: str
    precision: Literal["fp32", "int8"]
    format: Literal["onnx", "ort"]
    bytes: int
    sha256: str
    tolerance: float
    worst: float
    quality: dict[str, float | None]


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
            ModelInput(item.name, TYPES[item.dtype], item.tensor.startswith(given(""))) for item in self.inputs
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
    sums = _read_sums(path)
    for entry in sorted(path.rglob("*")):
        if entry.is_symlink() or not entry.is_file():
            raise PackageError(str(entry), "not a plain file", expected="files only", remedy=REMEDY)
        if entry.name not in {*sums, SUMS}:
            raise PackageError(str(entry), f"not listed in {SUMS}", expected="no file but those listed", remedy=REMEDY)
    for name, expected in sums.items():
        file = path / name
        if not file.is_file():
            raise PackageError(str(file), "missing", expected=f"a file with SHA-256 {expected}", remedy=REMEDY)
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != expected:
            raise PackageError(str(file), f"SHA-256 {found}", expected=expected, remedy=REMEDY)
    for name in ("manifest.json", "contract.json", "golden.json"):
        if name not in sums:
            raise PackageError(str(path / name), "missing", expected=f"listed in {SUMS}", remedy=REMEDY)
    try:
        msgspec.json.decode((path / "contract.json").read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise PackageError(str(path / "contract.json"), str(error), expected="a contract", remedy=REMEDY) from error
    return _read_manifest(path / "manifest.json", sums)


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


def _read_sums(path: Path) -> dict[str, str]:
    try:
        lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PackageError(str(path / SUMS), "cannot be read", expected="a package folder", remedy=REMEDY) from error
    sums: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        digest, _, name = line.partition("  ")
        where = f"{path / SUMS} line {number}"
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef") or not name:
            raise PackageError(where, repr(line), expected="a SHA-256 sum and a file name", remedy=REMEDY)
        if Path(name).name != name or name == "..":
            raise PackageError(where, f"{name} leaves the package folder", expected="a file name", remedy=REMEDY)
        if name in sums:
            raise PackageError(where, f"{name} is listed twice", expected="one sum per file", remedy=REMEDY)
        sums[name] = digest
    return sums


class _Version(msgspec.Struct):
    format_version: int


def _read_manifest(file: Path, sums: Mapping[str, str]) -> Manifest:
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
    except msgspec.MsgspecError as error:
        raise PackageError(str(file), str(error), expected="a manifest", remedy=REMEDY) from error
    for item in manifest.inputs:
        if item.dtype not in TYPES:
            raise PackageError(str(file), f"input {item.name} has type {item.dtype}", expected="|".join(TYPES))
    if missing := [name for name in manifest.files if name not in sums]:
        raise PackageError(str(file), f"{missing[0]} has no sum", expected=f"listed in {SUMS}", remedy=REMEDY)
    for variant in manifest.variants:
        if sums.get(variant.file) != variant.sha256:
            found = sums.get(variant.file, "no sum")
            raise PackageError(f"{file}: {variant.file}", found, expected=variant.sha256, remedy=REMEDY)
    return manifest
