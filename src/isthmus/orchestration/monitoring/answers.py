"""The recorded answers of a model, a row each: who was asked for what, when, and what was said."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.distill.declaration import Distillation
from isthmus.distill.types import Array
from isthmus.features.contract.schema import Column
from isthmus.features.errors import IsthmusError
from isthmus.features.values.arrow import micros, to_arrow
from isthmus.features.values.columns import Ints, Mask, from_python
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.monitoring.labels import clock_went_back
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.orchestration.server.secret import known_secret
from isthmus.package.manifest import open_package, read_package
from isthmus.serving.deployment.cache import folder_of
from isthmus.serving.deployment.history import DeploymentHistory
from isthmus.serving.recorder.columns import hashes
from isthmus.serving.wire import decode
from isthmus.serving.wire.messages import PredictRequest

_PREDICT = msgspec.json.Decoder(PredictRequest)
_TEXTS = msgspec.json.Decoder(list[str | None])
_READ = [
    "id", "run", "sequence", "written", "at", "contract", "package", "variant", "rows", "request", "hashed", "outputs",
]  # fmt: skip


@dataclass(frozen=True)
class Answered:
    """What a package in a precision answered to n rows, in the order of its processes.

    Attributes:
        part: the answers, as the table of recorded answers has them.
        answer: of each row the place of its answer, shape (n,).
        at: its moment, microseconds since 1970 UTC; likewise `run`, the number of the process.
        outputs: float64 (n, width); NaN where the model had no answer.
        columns: join keys and request fields, null where a request has none.
        had: which of the columns its request has, shape (n, columns).
        twice: whether the clock of its server has had its moment twice.
        unread: whether its request cannot be read any more.
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


def answered(
    project: Project, declared: Distillation, columns: Sequence[Column], keys: Callable[[str], Sequence[Any]]
) -> list[Answered]:
    """All recorded answers of a distillation's packages, those of the package that answered last first.

    `columns` are what to read of requests. Of private join keys, whose values are hashes, `keys` has all that are known
    of a column; it is asked only for those. Answers to callers whom `[monitor] callers` does not name are left out.

    Raises:
        DataError: the table cannot be read.
    """
    wanted, callers = ds.field("route") == "predict", project.settings.monitor.callers
    if callers is not None:
        wanted &= ds.field("caller").isin([*callers])
    rows = RecordedAnswers.of(project).read(wanted, _READ)
    models = _models(project)
    only = next(iter(project.definitions.distillations)) if len(project.definitions.distillations) == 1 else None
    own = [digest for digest in pc.unique(rows["package"]).to_pylist() if (models(digest) or only) == declared.name]
    rows = rows.filter(pc.is_in(rows["package"], pa.array(own, pa.string()))).combine_chunks()
    run = pc.dictionary_encode(rows["run"]).combine_chunks()
    number = np.asarray(run.indices if isinstance(run, pa.DictionaryArray) else [], np.int64)
    twice = clock_went_back(number, rows["sequence"].to_numpy(), micros(rows["at"]))
    precision = pc.list_element(pc.split_pattern(rows["variant"], "/"), 0)
    kinds = pc.binary_join_element_wise(rows["package"], precision, "\n")
    reader = _Reader(project, columns, keys)
    found = []
    for kind in pc.unique(kinds).to_pylist():
        chosen = pc.equal(kinds, kind)
        package, _, name = kind.partition("\n")
        part = rows.filter(chosen).combine_chunks()
        found.append(reader.read(package, name, part, twice[chosen.to_numpy()]))
    # Where the clock of a project stands still, that of its machine decides.
    return sorted(found, key=lambda each: (int(each.at.max()), pc.max(each.part["written"]).as_py()), reverse=True)


def _models(project: Project) -> Callable[[str], str | None]:
    """Digest to the name of its model: by the history of deployments, else by the package; None if both are gone."""
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
    """The folder of a package, as deployed or as exported last; None if it is gone."""
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


class _Reader:
    """Reads requests."""

    def __init__(self, project: Project, columns: Sequence[Column], keys: Callable[[str], Sequence[Any]]) -> None:
        self._project, self._keys = project, keys
        self._columns = {column.name: column for column in columns}
        self._hashed: dict[str, Mapping[str, Any]] = {}

    def read(self, package: str, precision: str, part: pa.Table, twice: Mask) -> Answered:
        count = part["rows"].to_numpy().astype(np.int64)
        answer = np.repeat(np.arange(len(part)), count)
        values: dict[str, list[Any]] = {name: [] for name in self._columns}
        had = np.zeros((len(answer), len(self._columns)), bool)
        unread, start = np.zeros(len(part), bool), 0
        bodies = zip(part["request"].to_pylist(), part["hashed"].to_pylist(), count.tolist(), strict=True)
        for place, (body, hashed, rows) in enumerate(bodies):
            try:
                given = dict(self._request(body, hashed or (), rows))
            except (IsthmusError, msgspec.MsgspecError, ValueError):
                given, unread[place] = {}, True
            for n, (name, column) in enumerate(values.items()):
                column.extend(given.get(name) or [None] * rows)
                had[start : start + rows, n] = name in given
            start += rows
        table = pa.table(
            {name: to_arrow(from_python(values[name], column.dtype), column.dtype)
             for name, column in self._columns.items()}
        )  # fmt: skip
        flat = pc.list_flatten(part["outputs"]).combine_chunks().to_numpy(zero_copy_only=False).astype(np.float64)
        outputs = flat.reshape(len(answer), -1) if len(answer) else flat.reshape(0, 1)
        at = micros(part["at"])[answer]
        return Answered(package, precision, part, answer, at, outputs, table, had, twice[answer], unread[answer])

    def _request(self, body: str, hashed: Sequence[str], rows: int) -> Iterator[tuple[str, list[Any]]]:
        message = _PREDICT.decode(body)
        for name, raw in {**message.request, **message.entities}.items():
            column = self._columns.get(name)
            if column is None:
                continue
            if name in hashed:
                known = self._known(column)
                values = [None if text is None else known.get(text) for text in _TEXTS.decode(raw)]
            else:
                values = decode.field(raw, column)
            if len(values) != rows:
                raise ValueError(f"{len(values)} values for {rows} rows")
            yield name, values

    def _known(self, column: Column) -> Mapping[str, Any]:
        if column.name not in self._hashed:
            values = list(self._keys(column.name))
            known = hashes(known_secret(self._project), column, values)
            self._hashed[column.name] = dict(zip(known, values, strict=True))
        return self._hashed[column.name]
