"""Run a package's JavaScript client in Node. `DeviceQuestions` has keys and request fields, `DeviceReport` outputs."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from isthmus.features.types import DataType
from isthmus.features.values.columns import Values
from isthmus.orchestration.runtimes.web import NodeRunner
from isthmus.package.checksums import GOLDEN, MANIFEST, SUMS
from isthmus.package.clients import CLIENT, READER
from isthmus.package.featurizer.form import HEAD
from isthmus.package.featurizer.interpreter import CoreFeeds
from isthmus.package.golden import TensorBytes
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import Manifest, Package
from isthmus.package.replay import Answers

_SNAPSHOT, _QUESTIONS = "snapshot", "questions.json"
_ALL = "all"


@dataclass(frozen=True, eq=False)
class DeviceQuestions:
    """Join keys and request fields of rows that a device, or the devices of several owners, shall answer.

    `snapshots` are files with stored features by owner, or under None if all devices share one. The PEM public `key`
    verifies them. `owner` is the join key of the owners. `at` is the time on the device, in microseconds since 1970
    UTC. `columns` has type and values by name.
    """

    snapshots: Mapping[object, bytes]
    owner: str | None
    key: str
    at: int
    columns: Mapping[str, tuple[DataType, Values]]


class DeviceAnswers(NamedTuple):
    """Tensors that a device fed to a model file, and the outputs of the file; one row per question in each tensor."""

    fed: Feeds
    outputs: Answers


class DeviceReport(NamedTuple):
    """Answers of the JavaScript client by ORT model file.

    `core` has the outputs of the package's head (the part that prepares inputs), None without a head.
    """

    files: dict[str, DeviceAnswers]
    core: CoreFeeds | None


class _Run(msgspec.Struct):
    fed: dict[str, TensorBytes]
    answers: dict[str, TensorBytes]


class _Core(msgspec.Struct):
    fed: dict[str, TensorBytes]
    refused: bool


class _Device(msgspec.Struct):
    files: dict[str, list[_Run]]
    core: list[_Core] | None


def ask_device(node: NodeRunner, package: Package, questions: DeviceQuestions) -> DeviceReport:
    """Run a package's JavaScript client in Node, as a web page would, and return the outputs of its ORT model files.

    `questions` has the rows to answer, and the snapshots with the stored features of the device. The client gets copies
    of the package's files and of the snapshots. It first checks checksums, contract and golden cases. Raises NodeFailed
    if the client rejects the package, a snapshot or a row, if a model fails, or after two minutes.
    """
    manifest = package.manifest
    variants = [variant for variant in manifest.variants if variant.format == "ort"]
    head = (HEAD, READER) if HEAD in manifest.files else ()
    names = (MANIFEST, GOLDEN, CLIENT, *head, *(variant.file for variant in variants))
    files = {name: package.files.read(name) for name in names}
    files[SUMS] = "".join(f"{digest}  {name}\n" for name, digest in package.files.sums.items()).encode()
    snapshots = {f"{_SNAPSHOT}-{number}": data for number, data in enumerate(questions.snapshots.values())}
    owners = [_ALL if owner is None else str(_text(owner)) for owner in questions.snapshots]
    asked = {
        "contract": manifest.contract,
        "precisions": [variant.precision for variant in variants],
        "types": {name: dtype.name for name, (dtype, _) in questions.columns.items()},
        "rows": _rows(questions.columns),
        "snapshots": dict(zip(owners, snapshots, strict=True)),
        "owner": questions.owner,
        "key": questions.key,
        "now": str(questions.at),
        "head": HEAD if head else None,
    }
    files |= {**snapshots, _QUESTIONS: msgspec.json.encode(asked)}
    answered = node.run("device.mjs", files, _QUESTIONS, kind=_Device)
    core = None
    if answered.core:
        tensors = {
            name: np.concatenate([row.fed[name].array for row in answered.core]) for name in answered.core[0].fed
        }
        core = CoreFeeds(tensors, np.array([row.refused for row in answered.core]))
    return DeviceReport({file: _together(manifest, runs) for file, runs in answered.files.items()}, core)


def _rows(columns: Mapping[str, tuple[DataType, Values]]) -> list[dict[str, Any]]:
    """Return each row by column name. Values are texts, because JavaScript numbers are doubles."""
    texts = [[_text(value) for value in values.tolist(dtype)] for dtype, values in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*texts, strict=True)]


def _text(value: Any) -> Any:
    match value:
        case list():
            return [*map(_text, value)]
        case None | str():
            return value
        case bytes():
            return base64.b64encode(value).decode()
        case bool() | int():
            return str(int(value))
    return {np.inf: "Infinity", -np.inf: "-Infinity"}.get(value, "NaN" if np.isnan(value) else repr(float(value)))


def _together(manifest: Manifest, runs: list[_Run]) -> DeviceAnswers:
    axes = {
        tensor.name: next(axis for axis, size in enumerate(tensor.shape) if isinstance(size, str))
        for tensor in (*manifest.tensors, *manifest.outputs)
    }
    parts = ([run.fed for run in runs], [run.answers for run in runs])
    fed, outputs = (
        {name: np.concatenate([row[name].array for row in rows], axes[name]) for name in rows[0]} for rows in parts
    )
    return DeviceAnswers(fed, outputs)
