"""A model package as its readers see it: the manifest, the sums and the tensors the model is fed.

Training, export, verification and serving all build their tensors with `feeds`, so a value is cast in one place only.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from isthmus.features.columns import Values
from isthmus.features.contract import Contract, one_of
from isthmus.features.errors import ContractMismatch, DataError, PackageError
from isthmus.features.rowgraph import ELEMENTS, Layout, given
from isthmus.features.types import TYPES, DataType, String, is_input

FORMAT_VERSION = 2
SUMS = "SHA256SUMS"
MANIFEST, CONTRACT, GOLDEN, README = "manifest.json", "contract.json", "golden.json", "README.md"
SIGNATURE = "model.sig"
"""The one file without a sum: a signature differs each time, and the sums of a package must not."""

LARGEST = 2**31
"""Bytes of a file: what a model in ONNX format can have. Whoever sends more wants a reader to choke on it."""

_LARGEST_OF = {SUMS: 2**20, MANIFEST: 2**24, CONTRACT: 2**24, GOLDEN: 2**28}
"""Bytes of what is read as a whole, which takes several times as much memory."""

_LONGEST = 255
_SHOWN = 60
"""Characters of a line that a message shows."""

_LEADS_OUT, _UNFIT = frozenset("/\\:"), frozenset('*?"<>|')
"""What leads out of a folder, and what no name has, on one of the systems that packages are copied to."""

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


def placed(inputs: Sequence[ModelInput]) -> tuple[Input, ...]:
    """Where `feeds` puts each input."""
    counts: dict[str, int] = {}
    result = []
    for item in inputs:
        tensor = given(ELEMENTS[item.dtype.name]) if item.row else "categories" if item.is_category else "numeric"
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

    No file is opened before it is certain that it is one of the folder: a link, a pipe or a file of any size may stand
    in its place.

    Raises:
        PackageError: the file that is missing, altered, not listed, outside the folder or not understood.
    """
    sizes = _sizes(path)
    if SUMS not in sizes:
        raise PackageError(str(path / SUMS), "cannot be read", expected="a package folder", remedy=REMEDY)
    sums = _read_sums(path / SUMS)
    for name in sizes:
        if name not in sums and name not in (SUMS, SIGNATURE):
            where = str(path / name)
            raise PackageError(where, f"not listed in {SUMS}", expected="no file but those listed", remedy=REMEDY)
    for name, expected in sums.items():
        file = path / name
        if name not in sizes:
            raise PackageError(str(file), "missing", expected=f"a file with SHA-256 {expected}", remedy=REMEDY)
        found = _sum(file)
        if found != expected:
            raise PackageError(str(file), f"SHA-256 {found}", expected=expected, remedy=REMEDY)
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
        raise PackageError(error.where, error.found[:_LONGEST], expected=error.expected, remedy=REMEDY) from error
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


def _sizes(path: Path) -> dict[str, int]:
    """Bytes of each file of a folder that holds nothing else."""
    try:
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
            for entry in found:
                if not entry.is_file(follow_symlinks=False):
                    raise PackageError(entry.path, "not a plain file", expected="files only", remedy=REMEDY)
            sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in found}
    except (OSError, ValueError) as error:  # a path with a NUL is no OSError
        raise PackageError(str(path / SUMS), "cannot be read", expected="a package folder", remedy=REMEDY) from error
    for name, size in sizes.items():
        if size > (most := _LARGEST_OF.get(name, LARGEST)):
            where, expected = str(path / name), f"at most {most:,}"
            raise PackageError(where, f"{size:,} bytes", expected=expected, remedy=REMEDY)
    return sizes


def _sum(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise PackageError(str(file), f"cannot be read ({error.strerror})", remedy=REMEDY) from error


def _read_sums(file: Path) -> dict[str, str]:
    try:
        text = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PackageError(str(file), "cannot be read", expected="a package folder", remedy=REMEDY) from error
    if not text.endswith("\n"):
        raise PackageError(str(file), "ends within a line", expected="whole lines", remedy=REMEDY)
    sums: dict[str, str] = {}
    for number, line in enumerate(text[:-1].split("\n"), 1):
        digest, _, name = line.partition("  ")
        where, shown = f"{file} line {number}", repr(line if len(line) <= _SHOWN else line[:_SHOWN] + "…")
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef") or not name:
            raise PackageError(where, shown, expected="a SHA-256 sum and a file name", remedy=REMEDY)
        if unfit := _unfit(name):
            raise PackageError(where, f"{_quoted(name)} {unfit}", expected="a file name", remedy=REMEDY)
        if name in sums:
            raise PackageError(where, f"{name} is listed twice", expected="one sum per file", remedy=REMEDY)
        # On a phone, a Mac or Windows one of the two would take the place of the other.
        if same := [other for other in sums if other.casefold() == name.casefold()]:
            found = f"{name} differs from {same[0]} in the case of its letters alone"
            raise PackageError(where, found, expected="names that differ on every system", remedy=REMEDY)
        sums[name] = digest
    return sums


def _unfit(name: str) -> str:
    """Why nothing in a package can have a name; empty if it can."""
    if name in (SUMS, SIGNATURE):
        return "cannot have a sum"
    if name in (".", "..") or not _LEADS_OUT.isdisjoint(name):
        return "leaves the package folder"
    fits = name.isprintable() and _UNFIT.isdisjoint(name) and len(name.encode()) <= 255
    return "" if fits else "is no file name"


def _quoted(name: str) -> str:
    shown = name if len(name) <= _SHOWN else name[:_SHOWN] + "…"
    return shown if shown.isprintable() else repr(shown)


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
        raise PackageError(str(file), str(error)[:_LONGEST], expected="a manifest", remedy=REMEDY) from error
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
        if item.dtype not in ELEMENTS:
            yield f"input {item.name} has type {item.dtype}", "|".join(ELEMENTS)
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
