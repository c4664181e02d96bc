"""Read recorded answers in groups, with the requests, stored rows and models behind them, for replay and monitoring."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.features import clock
from isthmus.features.contract.diff import require_service
from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.errors import DataError, DependencyError, IsthmusError, PackageError
from isthmus.features.offline.history import ViewHistory
from isthmus.features.pointintime.served import EVENT, KNOWN, served_history
from isthmus.features.profiles import ServingProfile
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.arrow import ARROW, micros
from isthmus.features.values.columns import Ints, Mask, Values
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import find_contract, missing_answer_error
from isthmus.orchestration.recording.requests import (
    Keys,
    Requests,
    feature_group_key,
    lookup_of,
    read_requests,
    unreadable,
)
from isthmus.orchestration.recording.storedrows import (
    StoredRows,
    columns_of,
    from_history,
    view_answers,
    with_values,
)
from isthmus.orchestration.recording.table import RecordedAnswers, by_view
from isthmus.orchestration.server.secret import known_secret
from isthmus.package.manifest import Package, open_package
from isthmus.package.prompts import generation_of
from isthmus.serving.deployment.cache import folder_of
from isthmus.serving.deployment.record import unverified_deployment
from isthmus.serving.lookup.lookup import Lookup
from isthmus.serving.lookup.prompt import Prompt
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.predict.tensors import TensorPredictor

# Rows per call of a model.
_ROWS = 1 << 14
_T = TypeVar("_T")


class Cause(StrEnum):
    """Reason why an answer differs from its record or cannot be recomputed."""

    LATE = "a late row"
    PUSH = "a push not in the history"
    PACKAGE = "another package"
    CLOCK = "a clock"
    ENGINE = "an engine"
    STORE = "the online store"
    HISTORY = "the history"
    CONTRACT = "the contract"
    KEY = "a key"


class UnreadableAnswersError(IsthmusError):
    """Recorded answers cannot be recomputed; `cause` says if a key, contract, package or history is gone."""

    def __init__(self, cause: Cause, why: str) -> None:
        self.cause = cause
        super().__init__("recorded answers", why)

    def __str__(self) -> str:
        return self.found


@dataclass(frozen=True, eq=False)
class Group:
    """Recorded answers that are recomputed together: they share contract, package, precision, views and features.

    Arrays have the rows of all readable requests, one after another. Requests of tensors have no rows.

    Attributes:
        answers: table with one row per answer, in the columns of the table of recorded answers.
        model: model that answered, or the model that replaces it; None for lookups.
        bodies: request body of each answer; an error if a private key could not be restored.
        answer: for each row, the index of its answer.
        starts: for each answer, the index of its first row.
        at: time of each row's answer, microseconds since 1970 UTC.
        outputs: recorded outputs of all rows in one dimension, float32.
        digest: recorded digests of all rows; may be empty.
        then: rows that Redis returned, by view: times and hashes, but no feature values.
        now: rows that the history has now for the same keys and times, by view.
    """

    answers: pa.Table
    contract: Contract
    model: DeployedModel | None
    reader: Lookup | Predictor | Prompt | TensorPredictor
    bodies: Sequence[bytes | LookupError]
    requests: Requests
    answer: Ints
    starts: Ints
    at: Ints
    outputs: np.ndarray[Any, Any]
    digest: np.ndarray[Any, np.dtype[np.uint64]]
    histories: Mapping[str, ViewHistory]
    then: Mapping[str, StoredRows]
    now: Mapping[str, StoredRows]

    def served(self) -> tuple[dict[str, StoredRows], Mask]:
        """Return the rows that Redis returned for these answers, by view, with their feature values.

        Records have only times and hashes of the rows, so the values come from the history. Also returns a mask (n,),
        False for rows with values that the history does not have.
        """
        found = {
            name: with_values(history, self.requests.keys, self.now[name], self.then[name])
            for name, history in self.histories.items()
        }
        known: Mask = np.logical_and.reduce([np.ones(len(self.answer), bool), *(own for _, own in found.values())])
        return {name: rows for name, (rows, _) in found.items()}, known

    @property
    def predictor(self) -> Predictor:
        assert isinstance(self.reader, Predictor)  # noqa: S101 - the route is `predict`
        return self.reader

    def inputs(self, rows: Mapping[str, StoredRows]) -> dict[str, Values]:
        return self.predictor.inputs(self.requests.fields, view_answers(rows))


class ServedAnswers:
    """Reads recorded answers, and opens the contracts, histories and models that recompute them.

    Caches what it opens, and errors too. If `package` is set, the package in that folder replaces every package that
    answered.
    """

    def __init__(self, project: Project, package: Path | None = None) -> None:
        self.project, self.package_folder = project, package
        self.offline, self.table = project.offline_store(), RecordedAnswers.of(project)
        self._opened: dict[Any, Any] = {}

    def answer(self, identity: str) -> pa.Table:
        answers = self.table.read(ds.field("id") == identity)
        if not len(answers):
            raise missing_answer_error(self.project, identity)
        return answers

    def read(
        self, *, route: str | None = None, first: datetime | None = None, end: datetime | None = None,
        callers: Iterable[str] | None = None, columns: Sequence[str] | None = None,
    ) -> pa.Table:  # fmt: skip
        condition = ds.scalar(True)
        if route is not None:
            condition &= ds.field("route") == route
        if first is not None:
            condition &= ds.field("at") >= _instant(first)
        if end is not None:
            condition &= ds.field("at") < _instant(end)
        if callers is not None:
            condition &= ds.field("caller").isin([*callers])
        return self.table.read(condition, columns)

    def open(self, answers: pa.Table, other: DeployedModel | None = None) -> Group:
        """Load everything that is needed to recompute recorded answers: contract, model, histories and stored rows.

        `answers` is a table that `split_answers` yields. `other` replaces the model that answered. It must have the
        same service, and may read only views that the recorded model read. Raises UnreadableAnswersError if the
        contract, the package or a history is gone or has changed, or if `other` does not fit. Raises DataError if a
        saved contract is damaged, or the secret that hashes private join keys cannot be read. An unreadable request
        raises no
        error: see `Requests.unread`.
        """
        first = answers.slice(0, 1).to_pylist()[0]
        contract = self.contract(first["contract"])
        graphs = lru_cache(None)(lambda name: RowGraph(contract.transforms[name]))
        reader: Lookup | Predictor | Prompt | TensorPredictor
        model = None
        try:
            if first["route"] == "lookup":
                reader = lookup_of(contract, first["request"].encode(), graphs)
            else:
                model = other or self.model(first["package"], first["variant"])
                reader = _reader(first["route"], contract, model, graphs)
        except DependencyError:
            raise
        except IsthmusError as error:
            cause = Cause.CONTRACT if first["route"] == "lookup" else Cause.PACKAGE
            raise UnreadableAnswersError(cause, str(error)) from error
        except msgspec.MsgspecError as error:
            raise UnreadableAnswersError(Cause.KEY, unreadable(error)) from error
        reads = {view.name for view in reader.plan.views}
        if model is not None:
            read = {*first["views"]}
            # The request may lack the keys that another package needs.
            if reads - read or (other is None and reads != read):
                wanted, recorded = (", ".join(sorted(names)) or "nothing" for names in (reads, read))
                why = f"package {model.deployment.digest[:12]} reads {wanted}, not {recorded}"
                raise UnreadableAnswersError(Cause.PACKAGE, why)
        try:
            # Another model may lack the join keys of views that only the model that answered read.
            histories = {name: self.history(contract.views[name]) for name in first["views"] if name in reads}
        except IsthmusError as error:
            raise UnreadableAnswersError(Cause.HISTORY, str(error)) from error
        for name, view_hash in zip(first["views"], first["hashes"], strict=True):
            if name in histories and histories[name].view.hash != view_hash:
                raise UnreadableAnswersError(Cause.HISTORY, f"view {name} has another definition now")
        # Requests of tensors have no keys, although their server may hash those of lookups.
        hashed = () if isinstance(reader, TensorPredictor) else first["hashed"]
        bodies = self._bodies(answers, contract, hashed)
        requests = read_requests(reader, bodies, answers["rows"].to_pylist())
        rows = requests.rows
        answer = np.repeat(np.arange(len(answers)), rows)
        at = micros(answers["at"])[answer]
        whole = answers.filter(pa.array(rows > 0))
        event, known, content, status = (
            by_view(_flat(whole[name]).astype(np.int64), rows[rows > 0], len(first["views"]))
            for name in ("event", "known", "content", "status")
        )
        return Group(
            answers, contract, model, reader, bodies, requests, answer, np.cumsum(rows) - rows, at,
            _flat(whole["outputs"]), _flat(whole["digest"]).view(np.uint64), histories,
            {
                name: StoredRows(event[n], known[n], content[n], status[n], {})
                for n, name in enumerate(first["views"]) if name in histories
            },
            {name: self._rows(own, contract.views[name], requests.keys, at) for name, own in histories.items()},
        )  # fmt: skip

    def predictions(
        self, answers: pa.Table, other: DeployedModel | None = None
    ) -> Iterator[tuple[pa.Table, Group | IsthmusError]]:
        for part in split_answers(answers):
            found: Group | IsthmusError
            try:
                found = self.open(part, other)
                if not found.requests.rows.any():
                    raise UnreadableAnswersError(Cause.KEY, "their requests cannot be read any more")
            except IsthmusError as error:
                found = error
            yield part, found

    def contract(self, known: str) -> Contract:
        contract = self._once(("contract", known), lambda: find_contract(self.project, known))
        if contract is None:
            why = f"contract {known[:12]} is gone: neither the project nor a package has it"
            raise UnreadableAnswersError(Cause.CONTRACT, why)
        return contract

    def _rows(
        self, history: ViewHistory, view: ViewContract, keys: Mapping[str, Sequence[Any]], at: Ints
    ) -> StoredRows:
        """Look up the rows of keys at times. Streamed rows count from the time at which they were written online."""
        if history.commit.origin.position is None:
            return from_history(history, view, keys, at)
        served = self._once(("served", view.hash), lambda: served_history(self.offline, view))
        return from_history(served, view, keys, at, times=(EVENT, KNOWN))

    def history(self, view: ViewContract) -> ViewHistory:
        return self._once(("history", view.hash), lambda: self.offline.history(view))

    def model(self, digest: str, variant: str) -> DeployedModel:
        precision, threads, *device = variant.split("/")

        def opened() -> DeployedModel:
            settings = {"precision": precision, "threads": int(threads), "device": device[0] if device else "cpu"}
            profile = msgspec.convert(settings, ServingProfile)
            return DeployedModel(unverified_deployment(self.package(digest), profile, 0, None))

        return self._once(("model", digest, variant), opened)

    def package(self, digest: str) -> Package:
        folder = self.package_folder or folder_of(self.project.deployment_file) / digest
        if self.package_folder is None and not folder.is_dir():
            raise DataError(
                f"package {digest[:12]}",
                "is gone",
                remedy="restore it in .isthmus/deployments, or pass another one with --package",
            )
        package = open_package(folder)
        if self.package_folder is None and package.files.digest != digest:
            raise DataError(f"package {digest[:12]}", f"has changed: its digest is {package.files.digest[:12]} now")
        return package

    def _once(self, name: object, opened: Callable[[], _T]) -> _T:
        if name not in self._opened:
            try:
                self._opened[name] = opened()
            except IsthmusError as error:
                self._opened[name] = error
        if isinstance(known := self._opened[name], IsthmusError):
            raise known.with_traceback(None)
        return cast("_T", known)

    def _bodies(self, answers: pa.Table, contract: Contract, hashed: Sequence[str]) -> list[bytes | LookupError]:
        texts = answers["request"].to_pylist()
        if not hashed:
            return [text.encode() for text in texts]
        columns = {column.name: column for view in contract.views.values() for column in view.keys}
        keys = Keys(known_secret(self.project), lambda name: self._key_values(contract, name))
        bodies: list[bytes | LookupError] = []
        for text in texts:
            try:
                bodies.append(keys.restore(text, [columns[name] for name in hashed]))
            except LookupError as error:
                bodies.append(error)
        return bodies

    def _key_values(self, contract: Contract, name: str) -> set[Any]:
        distinct: set[Any] = set()
        for view in contract.views.values():
            if name in [column.name for column in view.keys]:
                try:
                    distinct.update(key_values(pc.unique(columns_of(self.history(view), [name])[name])))
                except IsthmusError:
                    continue
        return distinct


def _reader(
    route: str, contract: Contract, model: DeployedModel, graphs: Callable[[str], RowGraph]
) -> Predictor | Prompt | TensorPredictor:
    if route == "infer":
        return TensorPredictor(contract, model)
    if route == "predict":
        if not model.inputs:
            raise PackageError(f"package {model.manifest.name}", "does not predict from rows of features")
        return Predictor(contract, model, graphs)
    service = model.deployment.service
    require_service(f"model {model.deployment.model}", model.contract, contract, service)
    return Prompt(generation_of(model.manifest), contract, service, graphs=graphs)


def split_answers(answers: pa.Table) -> Iterator[pa.Table]:
    """Split recorded answers into tables of answers that can be recomputed together, as `ServedAnswers.open` requires.

    All answers in a table have the same route, contract, package, precision, views and hashed join keys. Lookups in a
    table also request the same features.
    """
    pairs = zip(answers["route"].to_pylist(), answers["request"].to_pylist(), strict=True)
    features = [feature_group_key(text) if route == "lookup" else "" for route, text in pairs]
    parts = [answers[name] for name in ("route", "contract", "package", "variant")]
    parts += [pc.binary_join(answers[name], ",") for name in ("views", "hashes", "hashed")]
    joined = pc.binary_join_element_wise(*parts, pa.array(features, pa.string()), "\n")
    for group in pc.unique(joined):
        yield answers.filter(pc.equal(joined, group)).combine_chunks()


def predict_all(model: DeployedModel, inputs: Mapping[str, Values]) -> np.ndarray[Any, Any]:
    rows = len(next(iter(inputs.values())).valid)
    parts = [
        model.predict({name: values.take(slice(start, start + _ROWS)) for name, values in inputs.items()})
        for start in range(0, max(rows, 1), _ROWS)
    ]
    return np.concatenate(parts)


def _instant(moment: datetime) -> pa.Scalar:
    # In UTC: Arrow has no zones with seconds, which Python has.
    return pa.scalar(clock.micros(moment), pa.int64()).cast(ARROW["UnixTimestamp"])


def _flat(lists: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    flat: np.ndarray[Any, Any] = pc.list_flatten(lists).combine_chunks().to_numpy(zero_copy_only=False)
    return flat


def key_values(values: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    plain: list[Any] = values.to_pylist()
    return plain
