"""A compiled lookup: the columns of an answer, and their encoding as Feast's JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from isthmus.features.clock import Status
from isthmus.features.contract.schema import SEPARATOR, Column, Contract, optional_fields
from isthmus.features.errors import RequestError, one_of
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.request.graph import RowGraph
from isthmus.features.types import Bytes, DataType
from isthmus.features.values.columns import Values
from isthmus.serving.limits import Limits
from isthmus.serving.wire import decode
from isthmus.serving.wire.encode import (
    CALENDAR,
    EPOCH,
    OPTIONS,
    Nulls,
    base64_texts,
    json_columns,
    labels,
    repeated,
    status_words,
)
from isthmus.serving.wire.errors import NotFoundError

TransformOutputs = Mapping[str, Mapping[str, Values]]
"""Computed values by name of the request transform, then by name of its field."""

_PRESENT, _NULL, _NOT_FOUND = (np.uint8(code) for code in (Status.PRESENT, Status.NULL, Status.NOT_FOUND))

_PLACES = 10
"""Maximum number of damaged rows that an answer lists."""

_ORDERS = 16
"""Number of join key orders whose metadata are cached."""


@dataclass(slots=True)
class LookupInputs:
    """The rows of a lookup request: join keys and request fields by name, with one value per row."""

    keys: Mapping[str, Sequence[Any]]
    request: Mapping[str, Values]
    rows: int


class Lookup:
    """A list of features, compiled once and reused by every request for it.

    `features` are (view, feature) or (request transform, field) pairs of the contract; `full_names` names their columns
    `view__feature`. Rows of `earlier` contracts may still be in Redis. Raises a RequestError if two columns would have
    the same name, or a request field two types.

    Attributes:
        names: names of the feature columns in the answer, in the order of `features`.
        bits: features read of each view, for the metrics.
        request: request fields that request transforms read, by name.
        optional: names of request fields that may be missing.
        computes: True if it uses request transforms.
    """

    def __init__(
        self,
        contract: Contract,
        features: Sequence[tuple[str, str]],
        *,
        full_names: bool,
        graphs: Callable[[str], RowGraph],
        earlier: Sequence[Contract] = (),
    ) -> None:
        self.contract = contract
        self._graph = graphs
        self._graphs = [
            graphs(name) for name in dict.fromkeys(name for name, _ in features if name in contract.transforms)
        ]
        transforms = [graph.transform for graph in self._graphs]
        stored = [pair for pair in features if pair[0] in contract.views]
        read = dict.fromkeys((*stored, *(pair for transform in transforms for pair in transform.stored)))
        self.plan = LookupPlan(contract, [view for view, _ in read], earlier)
        self.bits = self.plan.bits(read)
        self.request: dict[str, Column] = {}
        readers: dict[str, str] = {}
        for transform in transforms:
            for column in transform.request:
                known = self.request.setdefault(column.name, column)
                first = readers.setdefault(column.name, transform.name)
                if known != column:
                    raise RequestError(
                        "features", f"request field {column.name} is {known.dtype} to {first} and {column.dtype} to "
                        f"{transform.name}", remedy="request these features separately",
                    )  # fmt: skip
        self.optional = optional_fields(transforms)
        self.computes = bool(transforms)
        self.names = [f"{view}{SEPARATOR}{feature}" if full_names else feature for view, feature in features]
        seen: set[str] = set(self.plan.keys)
        for name in self.names:
            if name in seen:
                raise RequestError(
                    "features", f"two columns of the answer would have the name {name}",
                    remedy="set full_feature_names to true, and name each feature once",
                )  # fmt: skip
            seen.add(name)
        self._columns = frozenset(self.names)
        places: dict[str, dict[str, int]] = {}
        for place, (view, feature) in enumerate(features):
            if view in contract.views:
                places.setdefault(view, {})[feature] = place
        self._views = [
            (view, [(part, [own[name] for name in part.names]) for part in self.plan.codecs[view].select(list(own))])
            for view, own in places.items()
        ]
        self.features = [
            (name, feature, (contract.stored if name in contract.views else contract.computed)((name, feature)).dtype)
            for name, feature in features
        ]
        self._computed = [(place, *self.features[place]) for place, (name, _) in enumerate(features)
                          if name in contract.transforms]  # fmt: skip
        keys = [column for view in contract.views.values() for column in view.keys]
        self._metadata = lru_cache(_ORDERS)(
            lambda keys: orjson.dumps({"feature_names": [*keys, *self.names], "contract": self.contract.hash})
        )
        self._coded = {column.name for column in keys if column.dtype == Bytes}

    def inputs(self, keys: Mapping[str, list[Any]], fields: Mapping[str, list[Any]], limits: Limits) -> LookupInputs:
        """Check the columns of a lookup request, and convert its request fields to NumPy, before stored rows are read.

        `keys` has the decoded join key columns and `fields` the columns that request transforms read, by name. A
        missing field becomes null. Raises RequestError if a join key is missing or has the name of a feature, if
        columns differ in length, or if a number is too large. Raises TooLargeError if the request exceeds `limits`.
        """
        decode.require_keys(self.plan.keys, keys)
        for name in keys:
            if name in self._columns:
                raise RequestError(
                    f"entities.{name}", "is also the name of a feature in the answer",
                    remedy="omit it, or set full_feature_names to true",
                )  # fmt: skip
        rows = decode.rows("entities", {**fields, **keys}, limits.rows)
        limits.require_values("entities and features", rows, len(self.names))
        absent = [None] * rows if self.computes else []
        request = {
            name: decode.values(fields.get(name, absent), column, "entities") for name, column in self.request.items()
        }
        return LookupInputs(keys, request, rows)

    def compute(self, request: Mapping[str, Values], answers: Mapping[str, ViewAnswer]) -> TransformOutputs:
        computed = {}
        for graph in self._graphs:
            transform = graph.transform
            columns = {SEPARATOR.join(pair): answers[pair[0]].columns[pair[1]] for pair in transform.stored}
            columns |= {column.name: request[column.name] for column in transform.request}
            computed[transform.name] = graph.require(columns, self._graph, "entities.{}".format)
        return computed

    def encode(
        self,
        keys: Mapping[str, Sequence[Any]],
        rows: int,
        answers: Mapping[str, ViewAnswer],
        computed: TransformOutputs,
    ) -> bytes:
        present = repeated(b'"PRESENT"', rows)
        end = _end(present, repeated(EPOCH, rows))
        columns = [b""] * len(self.names)
        shared = {view: _Shared(answers[view], present) for view, _ in self._views}
        for view, places, dtype, data, null in self.parts(answers):
            texts = _texts(dtype, json_columns(dtype, data, null))
            for place, text, ending in zip(places, texts, shared[view].ends(null, len(places)), strict=True):
                columns[place] = text + ending
        times = repeated(EPOCH, rows)
        for place, _, dtype, data, null in self.computed(computed):
            (text,) = _texts(dtype, json_columns(dtype, data, null))
            columns[place] = text + _end(
                present if null is None else status_words(null[0].view(np.uint8) * _NULL), times
            )
        encoded = [orjson.dumps(column)[1:-1] + end for column in self.encode_keys(keys)]
        listed = b',{"values":['.join(encoded + columns)
        metadata = self._metadata(tuple(keys))
        if problems := damage(answers):
            metadata = metadata[:-1] + b',"problems":' + orjson.dumps(problems) + b"}"
        return b'{"metadata":' + metadata + b',"results":[{"values":[' + listed + b"]}"

    def encode_values(
        self, keys: Mapping[str, Sequence[Any]], answers: Mapping[str, ViewAnswer], computed: TransformOutputs
    ) -> bytes:
        columns: list[Any] = [None] * len(self.names)
        for _, places, dtype, data, null in self.parts(answers):
            for place, column in zip(places, json_columns(dtype, data, null), strict=True):
                columns[place] = column
        for place, _, dtype, data, null in self.computed(computed):
            (columns[place],) = json_columns(dtype, data, null)
        metadata: dict[str, Any] = {"feature_names": [*keys, *self.names], "contract": self.contract.hash}
        if problems := damage(answers):
            metadata["problems"] = problems
        return orjson.dumps(
            {
                "metadata": metadata,
                "values": self.encode_keys(keys) + columns,
                "statuses": {view: labels(answer.status) for view, answer in answers.items()},
            },
            option=OPTIONS,
        )

    def encode_keys(self, keys: Mapping[str, Sequence[Any]]) -> list[Any]:
        return [base64_texts(column) if name in self._coded else column for name, column in keys.items()]

    def parts(
        self, answers: Mapping[str, ViewAnswer]
    ) -> Iterator[tuple[str, Sequence[int], DataType, np.ndarray[Any, Any], Nulls | None]]:
        """Yield the stored features in groups of one view and type that can be encoded together.

        A group is a tuple: the view, each feature's index in `names`, the type, the values of shape (features, rows),
        and a mask of nulls of that shape, or None without nulls.
        """
        for view, parts in self._views:
            for selection, places in parts:
                yield view, places, selection.dtype, *answers[view].columns.read(selection)

    def computed(
        self, outputs: TransformOutputs
    ) -> Iterator[tuple[int, str, DataType, np.ndarray[Any, Any], Nulls | None]]:
        for place, transform, field, dtype in self._computed:
            values = outputs[transform][field]
            yield place, transform, dtype, values.data[None], None if values.valid.all() else ~values.valid[None]


def damage(answers: Mapping[str, ViewAnswer]) -> list[str]:
    problems = []
    for view, answer in answers.items():
        if answer.complete:
            continue
        foreign = answer.foreign or {}
        if places := [n for n in np.flatnonzero(answer.status == Status.DAMAGED).tolist() if n not in foreign]:
            problems.append(f"view {view}: the stored rows of keys {_listed(places)} are damaged")
        for kind in sorted(set(foreign.values())):
            keys = _listed([place for place, own in foreign.items() if own == kind])
            cause = f"have type {kind} in Redis instead of hash: another program wrote them"
            problems.append(f"view {view}: keys {keys} {cause}")
    return problems


def _listed(places: Sequence[int]) -> str:
    more = f" and {len(places) - _PLACES:,} more" if len(places) > _PLACES else ""
    return ", ".join(map(str, places[:_PLACES])) + more


class _Shared:
    def __init__(self, answer: ViewAnswer, present: bytes) -> None:
        self._status = answer.status
        self._present = present
        event = np.ascontiguousarray(answer.event)
        if not answer.complete:
            event = np.where(answer.status >= _NOT_FOUND, 0, event)
        try:
            self._times = orjson.dumps(event.view("<M8[us]"), option=OPTIONS)
        except TypeError:
            # A year outside the range of dates must not fail the whole answer.
            self._times = orjson.dumps(np.clip(event, *CALENDAR).view("<M8[us]"), option=OPTIONS)

    def ends(self, null: Nulls | None, count: int) -> list[bytes]:
        """Return the JSON after the values of each of `count` columns. `null` is a mask (count, rows), or None."""
        if null is None:
            return [_end(self._present, self._times)] * count
        present = self._status == _PRESENT
        common = _end(status_words(self._status), self._times)
        # Rows that are not present are null in every column, and most columns have no other null.
        absent = present.size - np.count_nonzero(present)
        return [
            common if nulls == absent else _end(status_words(np.where(row & present, _NULL, self._status)), self._times)
            for row, nulls in zip(null, np.count_nonzero(null, axis=1).tolist(), strict=True)
        ]


def _end(statuses: bytes, times: bytes) -> bytes:
    return b'],"statuses":' + statuses + b',"event_timestamps":' + times + b"}"


def _texts(dtype: DataType, columns: list[Any]) -> list[bytes]:
    """Encode columns of one type as JSON, without the brackets around each column."""
    if dtype.numpy is None:
        return [orjson.dumps(column, option=OPTIONS)[1:-1] for column in columns]
    # Numbers contain no brackets, so encode all columns at once and split between them.
    return orjson.dumps(columns, option=OPTIONS)[2:-2].split(b"],[")


def resolve(contract: Contract, references: Sequence[str]) -> list[tuple[str, str]]:
    if not references:
        raise RequestError("features", "is empty", expected="at least one, as view:feature")
    pairs = []
    for reference in references:
        view, colon, feature = reference.partition(":")
        if not colon:
            raise RequestError(f"features, {reference!r}", "is not a feature reference", expected="view:feature")
        known = contract.views.get(view) or contract.transforms.get(view)
        if known is None:
            expected = one_of([*contract.views, *contract.transforms])
            raise NotFoundError(f"features, {reference!r}", f"no view {view!r}", expected=expected)
        names = [column.name for column in known.fields]
        if feature not in names:
            raise NotFoundError(f"features, {reference!r}", f"no feature {feature!r}", expected=one_of(names))
        pairs.append((view, feature))
    return pairs


def service_features(contract: Contract, name: str) -> list[tuple[str, str]]:
    service = contract.services.get(name)
    if service is None:
        raise NotFoundError("feature_service", f"no service {name!r}", expected=one_of(contract.services))
    if not service.features and not service.computed:
        raise RequestError("feature_service", f"{name} has request fields only", expected="a service with features")
    return [*service.features, *service.computed]
