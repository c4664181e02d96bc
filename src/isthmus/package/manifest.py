"""The manifest of a package: inputs, model files (`Variant`), device data. Functions to open a package."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ContractMismatch, PackageError, one_of
from isthmus.features.profiles import ServingDevice
from isthmus.features.request.layout import VALID, input_name
from isthmus.features.types import INPUTS, TYPES, VECTOR, is_readable
from isthmus.package.checksums import (
    CONTRACT,
    GOLDEN,
    MANIFEST,
    README,
    SUMS,
    PackageFiles,
    damage_error,
    require_unique_keys,
    verify_checksums,
)
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS, Generation
from isthmus.package.inputs import ModelInput, Truth
from isthmus.package.texts import INPUT_IDS, TOKENIZER, TextTokenizer

FORMAT_VERSION = 2
ROUNDING = 1e-5
"""Largest difference between the outputs of a model file on two processors."""
MODEL, CORE = "model", "core"
"""First part of a model file's name: the whole graph, or only its numeric core."""
LONGEST = 255
_SHOWN = 60
"""Characters of a name in a message."""

Format = Literal["onnx", "ort", "pte", "tflite", "mlpackage"]
WHOLE: tuple[Format, ...] = ("onnx", "ort")
"""Formats of ONNX Runtime, which can run the whole graph."""

Precision = Literal["fp32", "fp16", "w8", "mixed", "int8", "int4"]
"""Precision of a model file; int4 is for models that generate text only.

The files of w8 (8 bits) and fp16 (16 bits) are compressed: they store smaller weights, and compute in float32. In a
mixed file, layers with outliers are like those of w8, and all others like those of int8.
"""

Element = Literal["bool", "uint8", "int32", "int64", "float", "double", "string"]
"""Element types of a model's inputs and outputs, by their names in ONNX."""


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input or output tensor of a graph; a dimension of variable size has a name."""

    name: str
    element: Element
    shape: tuple[int | str, ...]


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A column that a graph of rows reads: `position` is its column in the tensor "numeric" or "categories".

    A text becomes tokens in the tensor "input_ids". An array fills `size` columns of "numeric" from `position`.

    For an input of a request transform, `position` is its row in a tensor of `request.layout`. Such inputs have the
    order of their rows in "given_valid".
    """

    name: str
    dtype: str
    tensor: str
    position: int
    size: int | None = None


def tensor_positions(inputs: Sequence[ModelInput]) -> tuple[Input, ...]:
    positions: defaultdict[str, int] = defaultdict(int)
    result = []
    for item in inputs:
        kind = INPUT_IDS if item.text else "categories" if item.is_category else "numeric"
        tensor = input_name(item.dtype.tensor) if item.row else kind
        result.append(Input(item.name, item.dtype.name, tensor, positions[tensor], item.size))
        positions[tensor] += item.size or 1
    return tuple(result)


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model file.

    Attributes:
        tolerance: largest absolute difference from the trained model that export accepted.
        worst: largest difference that export measured on golden cases and test rows.
        quality: metrics of the file's own outputs on the test part; None if undefined.
        most: maximum of each named dimension that has one.
        core: True if it computes only the numeric core, and takes the manifest's `core`.
        padded: named dimensions that always have their maximum size; inputs are padded with zeros.
        rounding: largest difference between its outputs on two processors, if larger than the manifest's.
    """

    file: str
    precision: Precision
    format: Format
    bytes: int
    sha256: str
    tolerance: float
    worst: float
    quality: dict[str, float | None]
    most: dict[str, int] = {}
    core: bool = False
    padded: tuple[str, ...] = ()
    rounding: float | None = None


class KeptView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A view whose rows a device keeps, as in a snapshot. `keys` and `fields` are pairs of name and type.

    `fields` has the order of a packed row. `ttl` is in microseconds after the event time; None means no limit.
    """

    name: str
    keys: tuple[tuple[str, str], ...]
    fields: tuple[tuple[str, str], ...]
    ttl: int | None


class DeviceManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The data that a device keeps to feed a model: see docs/snapshots.md.

    Attributes:
        hash: hash of the service in the contract, as in a snapshot's header.
        age: maximum age of a snapshot, in microseconds.
        views: views in the order of a snapshot.
        stale: answer if no snapshot is recent enough; None to refuse.
        instead: name of the package that answers in that case; None to refuse.
        owner: join key of which each device has one value; None if all devices keep the same rows.
    """

    project: str
    service: str
    hash: str
    age: int
    views: tuple[KeptView, ...]
    stale: float | None = None
    instead: str | None = None
    owner: str | None = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of a package, and the contract of its inputs.

    Attributes:
        task: "tabular", or the class of the task.
        inputs: columns from which `feeds` builds the tensors; empty if only the task can build them.
        tensors: inputs of the graph.
        files: purpose of each file that is not a model.
        device: data that a device keeps; None if requests contain everything the model reads.
        core: inputs of model files with only the numeric core; empty without such files.
        classes: class names in the order of the only output's last axis; empty for a model without classes.
        several: True if any number of classes may be right, whose probabilities are independent of each other.
        rounding: largest difference between the outputs of a model file on two processors.
        generation: settings for generating text; None for other models.
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
    tensors: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    variants: tuple[Variant, ...]
    files: dict[str, str]
    device: DeviceManifest | None = None
    core: tuple[TensorInfo, ...] = ()
    classes: tuple[str, ...] = ()
    several: bool = False
    rounding: float = ROUNDING
    generation: Generation | None = None

    @property
    def model_inputs(self) -> tuple[ModelInput, ...]:
        bools = any(tensor.name == input_name(VALID) and tensor.element == "bool" for tensor in self.tensors)
        truth: Truth = "bool" if bools else "uint8"
        return tuple(
            ModelInput(
                item.name,
                TYPES[item.dtype],
                item.tensor.startswith(input_name("")),
                truth,
                item.size,
                text=item.tensor == INPUT_IDS,
            )
            for item in self.inputs
        )

    @property
    def reads_text(self) -> bool:
        return any(item.text for item in self.model_inputs)

    def fed(self, variant: Variant) -> tuple[TensorInfo, ...]:
        return self.core if variant.core else self.tensors

    def variant(self, precision: str, format: str = "ort") -> Variant:  # noqa: A002 - the manifest's own word
        for variant in self.variants:
            if (variant.precision, variant.format) == (precision, format):
                return variant
        raise damage_error(f"package {self.name}", f"no {precision} model in {format} format")

    def served(self, precision: str, device: ServingDevice) -> Variant:
        # ONNX Runtime does not insert copies between devices into ORT files.
        return self.variant(precision, "ort" if device == "cpu" else "onnx")


@dataclass(frozen=True)
class Package:
    """A package whose files matched their checksums when it was opened; `files.read` refuses a file replaced since."""

    files: PackageFiles
    manifest: Manifest

    @cached_property
    def model_inputs(self) -> tuple[ModelInput, ...]:
        """The inputs of a model of rows, with the tokenizer of its text; () for other models."""
        return tuple(
            replace(item, tokenizer=TextTokenizer.load(self.files.read(TOKENIZER), f"package {self.manifest.name}"))
            if item.text
            else item
            for item in self.manifest.model_inputs
        )


def open_package(path: Path) -> Package:
    """Open a package folder to read or run its model, and check the SHA-256 of each file. Does not check the signature.

    Raises PackageError if a file is damaged or missing, or if the manifest is invalid.
    """
    files = verify_checksums(path)
    for name in (MANIFEST, CONTRACT, GOLDEN):
        if name not in files.sums:
            raise damage_error(path / name, "missing", f"listed in {SUMS}")
    try:
        data = files.read(CONTRACT)
        msgspec.json.decode(data, type=dict[str, Any])
        require_unique_keys(path / CONTRACT, data)
    except (ValueError, RecursionError) as error:
        raise damage_error(path / CONTRACT, str(error), "a contract") from error
    return Package(files, _read_manifest(files))


def read_package(path: Path) -> Manifest:
    return open_package(path).manifest


def read_contract(package: Package) -> Contract:
    manifest, file = package.manifest, package.files.folder / CONTRACT
    try:
        contract = Contract.loads(package.files.read(CONTRACT), str(file))
    except ContractMismatch as error:
        raise damage_error(error.where, error.found, error.expected) from error
    if contract.hash != manifest.contract:
        raise damage_error(file, f"contract {contract.hash[:12]}", f"{manifest.contract[:12]}, as in the manifest")
    if manifest.service not in contract.services:
        raise damage_error(file, f"no service {manifest.service}", one_of(contract.services))
    return contract


def package_digest(path: Path) -> str:
    """Return the digest that identifies a package: the SHA-256 in hex of its checksum file. Checks no other file."""
    try:
        return hashlib.sha256((path / SUMS).read_bytes()).hexdigest()
    except OSError as error:
        raise damage_error(path / SUMS, "cannot be read", "a package folder") from error


class _Version(msgspec.Struct):
    format_version: int


def _read_manifest(files: PackageFiles) -> Manifest:
    file, data = files.folder / MANIFEST, files.read(MANIFEST)
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            remedy = "use the release of Isthmus that wrote the package, or export the model again"
            raise PackageError(str(file), f"format version {version}", expected=str(FORMAT_VERSION), remedy=remedy)
        manifest = msgspec.json.decode(data, type=Manifest)
        require_unique_keys(file, data)
    except (ValueError, RecursionError) as error:
        raise damage_error(file, str(error), "a manifest") from error
    for problem, expected in _misfits(manifest, files.sums, files.sizes):
        raise damage_error(file, problem, expected)
    return manifest


def _misfits(manifest: Manifest, sums: Mapping[str, str], sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    # Messages show these names, and control characters could manipulate a terminal.
    for name in chain(
        (manifest.name, manifest.contract, manifest.service, manifest.model, manifest.training_set),
        (manifest.task, manifest.metric),
        manifest.classes,
        *((item.name, item.dtype, item.tensor) for item in manifest.inputs),
        *((tensor.name, *map(str, tensor.shape)) for tensor in (*manifest.tensors, *manifest.core, *manifest.outputs)),
        *((variant.file, variant.sha256) for variant in manifest.variants),
    ):
        if not name.isprintable() or len(name) > LONGEST:
            yield f"a name is {name[:_SHOWN]!r}", f"at most {LONGEST} printable characters"
    for item in manifest.inputs:
        if not is_readable(TYPES.get(item.dtype), item.size) or (item.size and item.tensor != "numeric"):
            sized = "" if item.size is None else f" and size {item.size}, in {item.tensor}"
            yield f"input {item.name} has type {item.dtype}{sized}", "|".join(map(str, (*INPUTS, VECTOR)))
        if item.tensor == INPUT_IDS and (item.dtype != "String" or item.position or TOKENIZER not in manifest.files):
            yield f"input {item.name} is a text", f"a String, the only one, and a {TOKENIZER}"
    for item, place in zip(manifest.inputs, tensor_positions(manifest.model_inputs), strict=True):
        if item != place:
            yield f"input {item.name} is {item.tensor}[{item.position}]", f"{place.tensor}[{place.position}]"
    yield from (
        (f"two {what} {name}", "unique names")
        for what, names in (
            ("inputs", [f"{item.name} in {item.tensor}" for item in manifest.inputs]),
            ("tensors", [tensor.name for tensor in manifest.tensors]),
            ("tensors of the core", [tensor.name for tensor in manifest.core]),
            ("outputs", [tensor.name for tensor in manifest.outputs]),
            ("classes", list(manifest.classes)),
            ("models", [f"{variant.precision} in {variant.format} format" for variant in manifest.variants]),
            ("model files", [variant.file for variant in manifest.variants]),
        )
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    )
    if manifest.classes and [(len(manifest.classes),)] != [tensor.shape[-1:] for tensor in manifest.outputs]:
        yield f"names {len(manifest.classes)} classes", "one output, with a number for each of them"
    if manifest.generation is not None:
        yield from _generation_misfits(manifest, manifest.generation)
    if not 0 < manifest.rounding < math.inf:
        yield f"has a rounding of {manifest.rounding}", "a finite number above 0"
    if not manifest.variants:
        yield "names no model file", "at least one"
    if missing := [name for name in manifest.files if name not in sums]:
        yield f"{missing[0]} has no sum", f"listed in {SUMS}"
    if bool(manifest.core) != any(variant.core for variant in manifest.variants):
        yield f"has {'' if manifest.core else 'no '}inputs of a core", "inputs and model files of it, or neither"
    for variant in manifest.variants:
        if variant.rounding is not None and not 0 < variant.rounding < math.inf:
            yield f"{variant.file} has a rounding of {variant.rounding}", "a finite number above 0"
        if variant.core and variant.format in WHOLE:
            yield f"{variant.file} is a core in {variant.format} format", "a model of all that the graph does"
        named = {size for tensor in manifest.fed(variant) for size in tensor.shape if isinstance(size, str)}
        if wrong := [name for name, most in variant.most.items() if most < 1 or name not in named]:
            yield f"{variant.file} takes at most {variant.most[wrong[0]]} of {wrong[0]}", "a size of its tensors"
        if unlimited := [name for name in variant.padded if name not in variant.most]:
            yield f"{variant.file} is padded to {unlimited[0]}", "a size with a limit"
        if sums.get(variant.file) != variant.sha256:
            yield f"{variant.file} has {sums.get(variant.file, 'no sum')}", variant.sha256
        if sizes[variant.file] != variant.bytes:
            yield f"{variant.file} has {sizes[variant.file]:,} bytes", f"{variant.bytes:,}"
    known = {MANIFEST, CONTRACT, GOLDEN, README, *manifest.files, *(variant.file for variant in manifest.variants)}
    if unknown := sorted(sums.keys() - known):
        yield f"does not mention {unknown[0]}", "an entry for every file"


def _generation_misfits(manifest: Manifest, generation: Generation) -> Iterator[tuple[str, str]]:
    tensors, outputs = ({tensor.name: tensor for tensor in of} for of in (manifest.tensors, manifest.outputs))
    if set(tensors) != {TOKENS, PAST} or set(outputs) != {LOGITS, NEW}:
        yield f"generates text of {', '.join(tensors)}", f"{TOKENS} and {PAST} to {LOGITS} and {NEW}"
        return
    past, vocabulary = tensors[PAST].shape, outputs[LOGITS].shape[-1]
    if len(past) != 5 or outputs[NEW].shape[2:] != past[2:] or any(isinstance(size, str) for size in past[2:]):
        yield f"{PAST} is {list(past)} and {NEW} {list(outputs[NEW].shape)}", "the same for each token"
    known = range(vocabulary if isinstance(vocabulary, int) else 0)
    tokens = (*generation.begin, *generation.end, *(control.token for control in generation.control))
    if stray := [token for token in tokens if token not in known]:
        yield f"names token {stray[0]}", f"a token below {len(known)}"
    if not 0 < generation.most < generation.context:
        yield f"generates {generation.most} tokens in a context of {generation.context}", "fewer than the context"
    for file in (generation.tokenizer, generation.prompts):
        if file not in manifest.files:
            yield f"does not mention {file}, which generation uses", "an entry for every file"
