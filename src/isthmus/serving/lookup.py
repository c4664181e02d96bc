"""A lookup: which columns an answer has, and how stored values become Feast's JSON."""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from isthmus.features.clock import Status
from isthmus.features.columns import Values
from isthmus.features.contract import SEPARATOR, Contract
from isthmus.features.errors import RequestError
from isthmus.features.online import LookupPlan, ViewAnswer
from isthmus.features.types import DataType
from isthmus.serving.refusals import NotFoundError

OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z
LABELS = np.array(["PRESENT", "NULL_VALUE", "OUTSIDE_MAX_AGE", "NOT_FOUND"], dtype=object)
"""Feast's word for each code of `Status`."""

_MICROSECONDS = 1_000_000
_EPOCH = b'"1970-01-01T00:00:00Z"'


class Lookup:
    """One list of features, compiled once and used by every request that asks for it.

    Args:
        contract: the project's contract.
        features: (view, feature) pairs that exist in the contract.
        full_names: whether to name features `view__feature`.

    Raises:
        RequestError: two columns would have one name.
    """

    def __init__(self, contract: Contract, features: Sequence[tuple[str, str]], *, full_names: bool) -> None:
        self.contract = contract
        self.plan = LookupPlan(contract, [view for view, _ in features])
        self.names = [f"{view}{SEPARATOR}{feature}" if full_names else feature for view, feature in features]
        seen: set[str] = set(self.plan.keys)
        for name in self.names:
            if name in seen:
                raise RequestError(
                    "features", f"two columns of the answer would be named {name}",
                    remedy="set full_feature_names to true, and name each feature once",
                )  # fmt: skip
            seen.add(name)
        types = {(view.name, column.name): column.dtype for view in self.plan.views for column in view.fields}
        self.features = [(view, feature, types[view, feature]) for view, feature in features]

    def encode(self, keys: Mapping[str, Sequence[Any]], rows: int, answers: Mapping[str, ViewAnswer]) -> bytes:
        """The JSON answer for `rows` rows."""
        present = orjson.Fragment(repeated(b'"PRESENT"', rows))
        epoch = orjson.Fragment(repeated(_EPOCH, rows))
        results: list[dict[str, Any]] = [
            {"values": column, "statuses": present, "event_timestamps": epoch} for column in keys.values()
        ]
        views = {name: _ViewPart(answer, present) for name, answer in answers.items()}
        for view, feature, dtype in self.features:
            part, column = views[view], answers[view].columns[feature]
            complete = _all(column.valid)
            results.append(
                {
                    "values": json_values(column, dtype, complete=complete),
                    "statuses": part.present if complete else part.statuses(column),
                    "event_timestamps": part.times,
                }
            )
        metadata = {"feature_names": [*keys, *self.names], "contract": self.contract.hash}
        return orjson.dumps({"metadata": metadata, "results": results}, option=OPTIONS)


class _ViewPart:
    """What all columns of one view share in an answer."""

    def __init__(self, answer: ViewAnswer, present: orjson.Fragment) -> None:
        self.status = answer.status
        self.present = present
        missing = answer.status == Status.NOT_FOUND
        event = np.where(missing, 0, answer.event) if missing.any() else np.ascontiguousarray(answer.event)
        self.times = orjson.Fragment(orjson.dumps(event.view("<M8[us]"), option=OPTIONS))

    def statuses(self, column: Values) -> list[str]:
        codes = np.where(~column.valid & (self.status == Status.PRESENT), np.uint8(Status.NULL), self.status)
        return labels(codes)


def resolve(contract: Contract, references: Sequence[str]) -> list[tuple[str, str]]:
    """(view, feature) pairs of Feast's references `view:feature`.

    Raises:
        NotFoundError: a view or a feature is not in the contract.
        RequestError: something is no reference, or there is none.
    """
    if not references:
        raise RequestError("features", "there is none", expected="at least one, as view:feature")
    pairs = []
    for reference in references:
        view, colon, feature = reference.partition(":")
        if not colon:
            raise RequestError(f"features, {reference!r}", "is no feature reference", expected="view:feature")
        known = contract.views.get(view)
        if known is None:
            raise NotFoundError(f"features, {reference!r}", f"no view {view!r}", expected=_one_of(contract.views))
        names = [column.name for column in known.fields]
        if feature not in names:
            raise NotFoundError(f"features, {reference!r}", f"no feature {feature!r}", expected=_one_of(names))
        pairs.append((view, feature))
    return pairs


def service_features(contract: Contract, name: str) -> list[tuple[str, str]]:
    """(view, feature) pairs of a feature service.

    Raises:
        NotFoundError: it is not in the contract.
        RequestError: it has request fields only.
    """
    service = contract.services.get(name)
    if service is None:
        raise NotFoundError("feature_service", f"no service {name!r}", expected=_one_of(contract.services))
    if not service.features:
        raise RequestError("feature_service", f"{name} has no stored feature", expected="a service that reads a view")
    return list(service.features)


def labels(codes: np.ndarray[Any, np.dtype[np.uint8]]) -> list[str]:
    """Feast's words for codes of `Status`."""
    words: list[str] = LABELS[codes].tolist()
    return words


def json_values(column: Values, dtype: DataType, *, complete: bool) -> Any:
    """A column as orjson writes it: whole arrays where that is possible.

    float32 is widened to the double it is, timestamps are seconds (with a fraction where they have one), as in Feast.
    """
    data = column.data
    match dtype.name:
        case "Float32" | "Float64":
            wide = data.astype(np.float64)
            finite = np.isfinite(wide)
            if not complete:
                # orjson writes NaN as null, which is what a null is; other values that are not finite get words.
                finite |= ~column.valid
                wide[~column.valid] = np.nan
            if _all(finite):
                return wide
            words = wide.astype(object)
            words[~finite] = [_word(value) for value in wide[~finite].tolist()]
            return _masked(words, column, complete=complete)
        case "Bool":
            data = data.astype(bool)
        case "UnixTimestamp":
            whole = not (data % _MICROSECONDS).any()
            data = data // _MICROSECONDS if whole else data / _MICROSECONDS
        case "Bytes":
            coded = [None if value is None else b64encode(value).decode() for value in data.tolist()]
            data = np.array([*coded, None], dtype=object)[:-1]
    return _masked(data, column, complete=complete)


def repeated(item: bytes, count: int) -> bytes:
    """A JSON array that holds one item `count` times."""
    return b"[" + b",".join([item] * count) + b"]"


def _masked(data: np.ndarray[Any, Any], column: Values, *, complete: bool) -> Any:
    if complete:
        return data.tolist() if data.dtype == object else np.ascontiguousarray(data)
    masked = data.astype(object)
    masked[~column.valid] = None
    return masked.tolist()


def _all(flags: np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
    """`flags.all()`, which costs ten times as much for a short array."""
    return bool(np.count_nonzero(flags) == flags.size)


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _one_of(names: Any) -> str:
    return "one of " + (", ".join(sorted(names)) or "none")
