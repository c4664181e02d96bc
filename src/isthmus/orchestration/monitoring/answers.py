"""Recorded predictions of a model, one row per predicted row: keys, request fields, moment and outputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.distill.types import Array
from isthmus.features.contract.schema import Column
from isthmus.features.errors import IsthmusError
from isthmus.features.values.arrow import micros, to_arrow
from isthmus.features.values.columns import Ints, Mask, from_python
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.monitoring.labels import clock_went_back
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.requests import Keys
from isthmus.orchestration.recording.served import ServedAnswers
from isthmus.orchestration.server.secret import known_secret
from isthmus.package.manifest import open_package, read_package
from isthmus.serving.deployment.cache import folder_of
from isthmus.serving.deployment.history import DeploymentHistory
from isthmus.serving.wire import decode
from isthmus.serving.wire.messages import PredictRequest

_PREDICT = msgspec.json.Decoder(PredictRequest)
_TEXTS = msgspec.json.Decoder(list[str | None])
_READ = [
    "id", "run", "sequence", "written", "at", "contract", "package", "variant", "rows", "request", "hashed", "outputs",
]  # fmt: skip


@dataclass(frozen=True)
class PackageAnswers:
    """Recorded answers of a package in one precision, as n rows sorted by server process.

    Attributes:
        part: the answers as the table of recorded answers has them; an answer has one or more rows.
        answer: index in `part` of each row's answer, shape (n,).
        at: time of each row in microseconds since 1970 UTC, shape (n,).
        outputs: float64 (n, width); NaN if the model had no answer.
        columns: join keys and request fields of the n rows, null if a request lacks them.
        had: mask of the columns that each row's request has, shape (n, columns).
        twice: mask of rows whose time is ambiguous, because the server's clock was set back; shape (n,).
        unread: mask of rows whose request cannot be read, shape (n,).
    """

    package: str
    precision: str
    part: pa.Table
    answer: Ints
    at: Ints
    outputs: Array
    columns: pa.Table
    had: Mask
    twice: Mask
    unread: Mask


def read_answers(
    project: Project, declared: Distillation, columns: Sequence[Column], keys: Callable[[str], Sequence[Any]]
) -> list[PackageAnswers]:
    """Read a distillation's recorded predictions, to compare them with labels: one entry per package and precision.

    The package that answered last comes first. `columns` are the join keys and request fields to take from the
    requests. Private join keys are recorded as hashes: `keys` takes the name of a join key and returns its known
    values, to find the value of each hash. Skips answers to callers that `[monitor] callers`, if set, does not name.
    Answers of a package that is gone count only if the project has one distillation. Requests that cannot be read raise
    no error: see `PackageAnswers.unread`. Raise DataError if the table cannot be read.
    """
    rows = ServedAnswers(project).read(route="predict", callers=project.settings.monitor.callers, columns=_READ)
    models = _model_name_lookup(project)
    only_model = next(iter(project.definitions.distillations)) if len(project.definitions.distillations) == 1 else None
    digests = [
        digest for digest in pc.unique(rows["package"]).to_pylist() if (models(digest) or only_model) == declared.name
    ]
    rows = rows.filter(pc.is_in(rows["package"], pa.array(digests, pa.string()))).combine_chunks()
    run = pc.dictionary_encode(rows["run"]).combine_chunks()
    number = np.asarray(run.indices if isinstance(run, pa.DictionaryArray) else [], np.int64)
    twice = clock_went_back(number, rows["sequence"].to_numpy(), micros(rows["at"]))
    precision = pc.list_element(pc.split_pattern(rows["variant"], "/"), 0)
    kinds = pc.binary_join_element_wise(rows["package"], precision, "\n")
    # The secret is read only if a request has private keys.
    private = lru_cache(None)(lambda: Keys(known_secret(project), keys))
    packages = []
    for kind in pc.unique(kinds).to_pylist():
        chosen = pc.equal(kinds, kind)
        package, _, name = kind.partition("\n")
        part = rows.filter(chosen).combine_chunks()
        packages.append(_answers(package, name, part, twice[chosen.to_numpy()], columns, private))
    # If the clock of the project is frozen, the clock of the machine decides.
    return sorted(packages, key=lambda each: (int(each.at.max()), pc.max(each.part["written"]).as_py()), reverse=True)


def _model_name_lookup(project: Project) -> Callable[[str], str | None]:
    events = DeploymentHistory(project.deployment_file).read()
    deployed = {event.deployment.digest: event.deployment.model for event in events}

    def named(digest: str) -> str | None:
        if digest in deployed:
            return deployed[digest]
        try:
            manifest = read_package(folder_of(project.deployment_file) / digest)
        except (IsthmusError, OSError):
            return None
        return manifest.name

    return named


def package_folder(project: Project, declared: Distillation, digest: str) -> Path | None:
    folders = [folder_of(project.deployment_file) / digest]
    artifacts = Artifacts(project, declared)
    with suppress(IsthmusError):
        folders.append(artifacts.last_package())
    for folder in folders:
        try:
            if folder.is_dir() and open_package(folder).files.digest == digest:
                return folder
        except IsthmusError:
            continue
    return None


def _answers(
    package: str, precision: str, part: pa.Table, twice: Mask, columns: Sequence[Column], private: Callable[[], Keys]
) -> PackageAnswers:
    count = part["rows"].to_numpy().astype(np.int64)
    answer, ends = np.repeat(np.arange(len(part)), count), np.cumsum(count)
    values: dict[str, list[Any]] = {column.name: [] for column in columns}
    had = np.zeros((len(answer), len(columns)), bool)
    unread, types = np.zeros(len(part), bool), {column.name: column for column in columns}
    bodies = zip(part["request"].to_pylist(), part["hashed"].to_pylist(), count.tolist(), strict=True)
    for place, (body, hashed, rows) in enumerate(bodies):
        try:
            fields = dict(_request(body, hashed or (), rows, types, private))
        except (IsthmusError, msgspec.MsgspecError, ValueError):
            fields, unread[place] = {}, True
        for n, (name, column) in enumerate(values.items()):
            column.extend(fields.get(name) or [None] * rows)
            had[ends[place] - rows : ends[place], n] = name in fields
    table = pa.table({name: to_arrow(from_python(values[name], own.dtype), own.dtype) for name, own in types.items()})
    flat = pc.list_flatten(part["outputs"]).combine_chunks().to_numpy(zero_copy_only=False).astype(np.float64)
    outputs = flat.reshape(len(answer), -1) if len(answer) else flat.reshape(0, 1)
    at = micros(part["at"])[answer]
    return PackageAnswers(package, precision, part, answer, at, outputs, table, had, twice[answer], unread[answer])


def _request(
    body: str, hashed: Sequence[str], rows: int, columns: Mapping[str, Column], private: Callable[[], Keys]
) -> Iterator[tuple[str, list[Any]]]:
    message = _PREDICT.decode(body)
    for name, raw in {**message.request, **message.entities}.items():
        column = columns.get(name)
        if column is None:
            continue
        if name in hashed:
            known = private().by_hash(column)
            values = [None if text is None else known.get(text) for text in _TEXTS.decode(raw)]
        else:
            values = decode.decode_field(raw, column)
        if len(values) != rows:
            raise ValueError(f"{len(values)} values for {rows} rows")
        yield name, values
