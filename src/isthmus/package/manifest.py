"""A model package as its readers see it."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

import msgspec

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ContractMismatch, PackageError, one_of
from isthmus.features.request.layout import VALID, input_name
from isthmus.features.types import INPUTS, TYPES
from isthmus.package.checksums import (
    CONTRACT,
    GOLDEN,
    MANIFEST,
    README,
    SUMS,
    Files,
    damaged,
    require_unique_keys,
    summed,
)
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS, Generation
from isthmus.package.inputs import ModelInput, Truth

FORMAT_VERSION = 2
ROUNDING = 1e-5
"""By how much the outputs of a model file may differ between two processors."""
MODEL, CORE = "model", "core"
"""What the name of a model file begins with: all that the graph does, or its numeric core."""
LONGEST = 255
_SHOWN = 60
"""Characters of a name in a message."""

Format = Literal["onnx", "ort", "pte", "tflite", "mlpackage"]
WHOLE: tuple[Format, ...] = ("onnx", "ort")
"""The formats of ONNX Runtime, which have operators for all that a graph does."""

Precision = Literal["fp32", "int8", "int4"]
"""Of weights; those of four bits are in models that generate text alone."""

Element = Literal["bool", "uint8", "int32", "int64", "float", "double", "string"]
"""The element types of a model's inputs and outputs, by ONNX's names."""


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input or output tensor of a graph; a size that differs from call to call has a name."""

    name: str
    element: Element
    shape: tuple[int | str, ...]


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column that a graph of rows reads: `position` is its column in the tensor "numeric" or "categories".

    For an input of a request transform it is its row in a tensor of `request.layout`. Such inputs are in the order of
    their rows in "given_valid".
    """

    name: str
    dtype: str
    tensor: str
    position: int


def placed(inputs: Sequence[ModelInput]) -> tuple[Input, ...]:
    """The place of each input in the tensors of `feeds`."""
    positions: defaultdict[str, count[int]] = defaultdict(count)
    result = []
    for item in inputs:
        tensor = input_name(item.dtype.tensor) if item.row else "categories" if item.is_category else "numeric"
        result.append(Input(item.name, item.dtype.name, tensor, next(positions[tensor])))
    return tuple(result)


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model file.

    Attributes:
        tolerance: largest absolute difference from the trained model that export accepted.
        worst: the largest difference that it measured on the golden cases and on test rows.
        quality: of the file's own outputs on the test part, by measure; None where undefined.
        most: the limit of each named size; sizes without a limit are left out.
        core: whether it computes the numeric core alone, and takes the manifest's `core`.
        padded: the named sizes that are their limit in every call: zeros behind the values fill a tensor up.
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


class KeptView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A view whose rows a device keeps, as a snapshot has them.

    Attributes:
        keys: the join keys by name, each with its type.
        fields: the features in the snapshot, each with its type, in the order of a packed row.
        ttl: microseconds after its event time for which a row holds; None for no limit.
    """

    name: str
    keys: tuple[tuple[str, str], ...]
    fields: tuple[tuple[str, str], ...]
    ttl: int | None


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a device keeps to feed a model: see docs/snapshots.md.

    Attributes:
        project: whose snapshots these are.
        service: likewise.
        hash: of the service in the contract, as in the header of a snapshot.
        age: microseconds that may have passed since a snapshot was made.
        views: in the order of a snapshot.
        stale: what to answer where no snapshot is young enough; None to refuse.
        instead: the name of the package that answers then; None to refuse.
        owner: the join key of which a device has one value; None where all devices keep the same rows.
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
        metric: the measure of quality that counts.
        inputs: the columns from which `feeds` builds the tensors; empty if only the task can build them.
        tensors: the graph's inputs.
        outputs: the graph's outputs.
        files: the purpose of each further file.
        device: what a device keeps; None if whoever asks the model brings all that it reads.
        core: the inputs of the model files that are the graph's numeric core; empty if there are none.
        classes: names of the classes, in the order of the only output's last axis; empty of a model without classes.
        rounding: by how much the outputs of a model file may differ between two processors.
        generation: of a causal language model, how text is made with it; None for any other model.
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
    device: Device | None = None
    core: tuple[Tensor, ...] = ()
    classes: tuple[str, ...] = ()
    rounding: float = ROUNDING
    generation: Generation | None = None

    @property
    def model_inputs(self) -> tuple[ModelInput, ...]:
        """The inputs in order, for `feeds`."""
        bools = any(tensor.name == input_name(VALID) and tensor.element == "bool" for tensor in self.tensors)
        truth: Truth = "bool" if bools else "uint8"
        return tuple(
            ModelInput(item.name, TYPES[item.dtype], item.tensor.startswith(input_name("")), truth)
            for item in self.inputs
        )

    def fed(self, variant: Variant) -> tuple[Tensor, ...]:
        """The inputs of a model file."""
        return self.core if variant.core else self.tensors

    def variant(self, precision: str, format: str = "ort") -> Variant:  # noqa: A002 - the manifest's own word
        """The model file of a precision and a format."""
        for variant in self.variants:
            if (variant.precision, variant.format) == (precision, format):
                return variant
        raise damaged(f"package {self.name}", f"no {precision} model in {format} format")


@dataclass(frozen=True)
class Package:
    """A package whose files matched their sums when it was opened.

    Who opens it reads them from `files`: a file that somebody replaces afterwards is refused.
    """

    files: Files
    manifest: Manifest


def open_package(path: Path) -> Package:
    """The package in a folder, after every file was compared with its SHA-256 sum.

    Raises:
        PackageError: the file that is missing, altered, not listed, outside the folder or not understood.
    """
    files = summed(path)
    for name in (MANIFEST, CONTRACT, GOLDEN):
        if name not in files.sums:
            raise damaged(path / name, "missing", f"listed in {SUMS}")
    try:
        data = files.read(CONTRACT)
        msgspec.json.decode(data, type=dict[str, Any])
        require_unique_keys(path / CONTRACT, data)
    except (ValueError, RecursionError) as error:
        raise damaged(path / CONTRACT, str(error), "a contract") from error
    return Package(files, _read_manifest(files))


def read_package(path: Path) -> Manifest:
    """The manifest of the package in a folder; errors: see `open_package`."""
    return open_package(path).manifest


def read_contract(package: Package) -> Contract:
    """The contract of a package.

    Raises:
        PackageError: it cannot be read, differs from the manifest's, or lacks the package's service.
    """
    manifest, file = package.manifest, package.files.folder / CONTRACT
    try:
        contract = Contract.loads(package.files.read(CONTRACT), str(file))
    except ContractMismatch as error:
        raise damaged(error.where, error.found, error.expected) from error
    if contract.hash != manifest.contract:
        raise damaged(file, f"contract {contract.hash[:12]}", f"{manifest.contract[:12]}, as in the manifest")
    if manifest.service not in contract.services:
        raise damaged(file, f"no service {manifest.service}", one_of(contract.services))
    return contract


def package_digest(path: Path) -> str:
    """The identity of a package: the SHA-256 of its sums."""
    try:
        return hashlib.sha256((path / SUMS).read_bytes()).hexdigest()
    except OSError as error:
        raise damaged(path / SUMS, "cannot be read", "a package folder") from error


class _Version(msgspec.Struct):
    format_version: int


def _read_manifest(files: Files) -> Manifest:
    file, data = files.folder / MANIFEST, files.read(MANIFEST)
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version != FORMAT_VERSION:
            remedy = "use the release of Isthmus that wrote the package, or export the model again"
            raise PackageError(str(file), f"format version {version}", expected=str(FORMAT_VERSION), remedy=remedy)
        manifest = msgspec.json.decode(data, type=Manifest)
        require_unique_keys(file, data)
    except (ValueError, RecursionError) as error:
        raise damaged(file, str(error), "a manifest") from error
    for problem, expected in _misfits(manifest, files.sums, files.sizes):
        raise damaged(file, problem, expected)
    return manifest


def _misfits(manifest: Manifest, sums: Mapping[str, str], sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The impossible statements of a manifest, each with what was expected."""
    # Messages show these, and certain characters control a terminal.
    for name in chain(
        (manifest.name, manifest.contract, manifest.service, manifest.model, manifest.training_set),
        (manifest.task, manifest.metric),
        manifest.classes,
        *((item.name, item.dtype, item.tensor) for item in manifest.inputs),
        *((tensor.name, *map(str, tensor.shape)) for tensor in (*manifest.tensors, *manifest.core, *manifest.outputs)),
        *((variant.file, variant.sha256) for variant in manifest.variants),
    ):
        if not name.isprintable() or len(name) > LONGEST:
            yield f"a name is {name[:_SHOWN]!r}", f"at most {LONGEST} characters that can be shown"
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
        yield f"says nothing of {unknown[0]}", "a word about every file"


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
            yield f"says nothing of {file}, which generation names", "a word about every file"
