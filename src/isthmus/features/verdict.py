"""The verdict: whether every value that serving answers is the value that training saw, to the bit."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from isthmus.features import clock
from isthmus.features.errors import GateFailed
from isthmus.features.types import DataType
from isthmus.features.values.columns import Values

EXAMPLES = 3
_LOOKED = 1000
"""Differing rows of which a comparison tells some."""
PAIRS = 200
"""Pairs of differing numbers that are kept of a feature, to be drawn."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """One value that differs: the key it belongs to, what each side says, and since when, in UTC.

    Attributes:
        key: the key, or what else the row is called.
        offline: what training has; a time as text, in UTC.
        online: what serving, a graph or a model has.
        event_timestamp: event time of the offline row; None where it has none.
    """

    key: str
    offline: Any
    online: Any
    event_timestamp: str | None = None


@dataclass(frozen=True, slots=True)
class FeatureVerdict:
    """The comparison of one feature over all compared keys.

    Attributes:
        compared: number of values compared, nulls included.
        differing: number of values that are not the same to the bit, and not within the tolerance either.
        worst: largest absolute difference of two numbers that are not the same to the bit, of times in microseconds;
            infinity where only one side has a number.
        examples: the first few differences.
        tolerance: the absolute difference of two numbers that does not count.
        pairs: of some differing numbers, spread over all, what each side says; to be drawn, and not kept in the file.
    """

    compared: int
    differing: int
    worst: float
    examples: Sequence[ValueDifference] = ()
    tolerance: float = 0.0
    pairs: Sequence[tuple[float, float]] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of `isthmus verify`.

    Attributes:
        contract: hash of the contract both sides were read under.
        at: the moment of the comparison, microseconds since 1970 UTC.
        views: view to feature to its comparison; the status of the view's rows is compared as feature `status`, their
            event times as `event_timestamp`. Request transforms stand among the views: what the engine computed beside
            what their graphs do.
        tables: view to the fingerprint of the offline table that was compared.
        ahead: view to the number of keys left out: what is served became known after everything the table holds, by a
            push, and there is nothing to compare it with until the table has caught up.
        package: digest of the package whose output was compared, or None.
        model: comparison of the package's output with the student's, all files together, or None.
        files: model file of the package to its part in `model`; what a server answered with the package as `/predict`.
        inputs: input of the package's graph to the comparison of what it is fed: offline values, and served ones.
        skipped: what could not be compared to why: `deploy` refuses where a model needs it.
    """

    contract: str
    at: int
    views: Mapping[str, Mapping[str, FeatureVerdict]]
    tables: Mapping[str, str] = field(default_factory=dict)
    ahead: Mapping[str, int] = field(default_factory=dict)
    package: str | None = None
    model: FeatureVerdict | None = field(default=None)
    files: Mapping[str, FeatureVerdict] = field(default_factory=dict)
    inputs: Mapping[str, FeatureVerdict] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def compared(self) -> int:
        """Values compared in all."""
        return sum(feature.compared for feature in self._all())

    @property
    def differing(self) -> int:
        """Values that differ in all."""
        return sum(feature.differing for feature in self._all())

    @property
    def passed(self) -> bool:
        """Whether something was compared, and nothing differs."""
        return self.compared > 0 and self.differing == 0

    def _all(self) -> list[FeatureVerdict]:
        features = [feature for view in self.views.values() for feature in view.values()]
        return [*features, *self.inputs.values(), *([self.model] if self.model else [])]

    def named(self) -> dict[str, FeatureVerdict]:
        """Every comparison by the name that messages give it: `view.feature`, `input x`, `file y`."""
        views = {f"{view}.{name}": one for view, features in self.views.items() for name, one in features.items()}
        parts = {f"input {name}": one for name, one in self.inputs.items()}
        parts |= {f"file {name}": one for name, one in self.files.items()}
        if self.model is not None and not self.files:
            parts["the package's output"] = self.model
        return views | parts

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form, in strict JSON: an infinite `worst` is null, a value JSON lacks is its text."""
        sums = {"passed": self.passed, "compared": self.compared, "differing": self.differing}
        plain: dict[str, Any] = _plain({**sums, **asdict(self)})
        groups = [*plain["views"].values(), plain["files"], plain["inputs"], {"": plain["model"]}]
        for feature in [feature for group in groups for feature in group.values() if feature]:
            del feature["pairs"]
            if feature["worst"] == str(math.inf):
                feature["worst"] = None
        return plain

    def dumps(self) -> bytes:
        """The verdict as a file."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False).encode() + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str = "verdict.json") -> "Verdict":
        """The inverse of `dumps`.

        Raises:
            GateFailed: the text is no verdict.
        """
        try:
            data = json.loads(text)
            views = {
                view: {name: _feature(feature) for name, feature in features.items()}
                for view, features in data["views"].items()
            }
            model = _feature(data["model"]) if data["model"] else None
            tables = {str(view): str(fingerprint) for view, fingerprint in data["tables"].items()}
            ahead = {str(view): int(keys) for view, keys in data["ahead"].items()}
            files, inputs = ({str(name): _feature(one) for name, one in data.get(part, {}).items()}
                             for part in ("files", "inputs"))  # fmt: skip
            skipped = {str(name): str(why) for name, why in data.get("skipped", {}).items()}
            verdict = cls(
                data["contract"], data["at"], views, tables, ahead, data["package"], model, files, inputs, skipped
            )
            altered = [n for n in ("passed", "compared", "differing") if data[n] != getattr(verdict, n)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise GateFailed(where, f"is not a verdict ({error})", remedy="run `isthmus verify`") from error
        if altered:
            found = f"says {altered[0]} {data[altered[0]]!r}, its values {getattr(verdict, altered[0])!r}"
            raise GateFailed(where, found, remedy="it was altered: run `isthmus verify`")
        return verdict


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
    return str(value)


def _feature(data: Mapping[str, Any]) -> FeatureVerdict:
    examples = [ValueDifference(**example) for example in data["examples"]]
    for name in ("compared", "differing"):
        if type(data[name]) is not int or data[name] < 0:
            raise ValueError(f"{name} is {data[name]!r}")
    worst = math.inf if data["worst"] is None else float(data["worst"])
    return FeatureVerdict(data["compared"], data["differing"], worst, examples, float(data.get("tolerance", 0.0)))


def compare(
    keys: Sequence[str],
    offline: Values,
    online: Values,
    dtype: DataType,
    tolerance: float = 0.0,
    times: Sequence[int | None] = (),
) -> FeatureVerdict:
    """Compares two columns value by value: equal are two nulls, two NaNs, or two values with the same bits.

    Two arrays are equal if they have the same length and their elements are equal one by one. The bits of a NaN beyond
    its being one mean nothing, and engines do not keep them.

    Args:
        keys: what to call each row in an example.
        offline: shape (n,).
        online: shape (n,).
        dtype: the type of both.
        tolerance: the absolute difference of two floating-point numbers that does not count.
        times: event time of each row in microseconds, or None where it has none; by default no row has.
    """
    if not len(keys) == len(offline.data) == len(online.data):
        raise ValueError(f"{len(keys)} keys, {len(offline.data)} offline and {len(online.data)} online values")
    if dtype.numpy is not None:
        same = identical(offline.data, online.data)
    elif dtype.element is not None and dtype.element.numpy is not None:
        pairs = zip(offline.data, online.data, strict=True)
        same = np.array([a is not None and b is not None and _same_array(a, b) for a, b in pairs], bool)
    else:
        same = np.array([a == b for a, b in zip(offline.data, online.data, strict=True)], bool)
    equal = (offline.valid == online.valid) & (same | ~offline.valid)
    unlike = np.flatnonzero(~equal)
    worst = _worst(offline.take(unlike), online.take(unlike), dtype) if len(unlike) else 0.0
    if tolerance and dtype.name in ("Float32", "Float64"):
        with np.errstate(invalid="ignore", over="ignore"):
            gaps = np.abs(offline.data.astype(np.float64) - online.data)
        equal |= offline.valid & online.valid & (gaps <= tolerance)
    differing = np.flatnonzero(~equal)
    first = _first(keys, differing)
    examples = zip(first.tolist(), offline.take(first).tolist(dtype), online.take(first).tolist(dtype), strict=True)
    said = _moment if dtype.name == "UnixTimestamp" else _as_it_is
    told = [
        ValueDifference(keys[n], said(a), said(b), _moment(times[n]) if len(times) else None) for n, a, b in examples
    ]
    drawn = _pairs(offline, online, differing, dtype)
    return FeatureVerdict(len(keys), len(differing), worst, told, tolerance, drawn)


def _first(keys: Sequence[str], differing: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A few of the differing rows, of different keys where the first ones have them."""
    rows = differing[:_LOOKED].tolist()
    of_a_key: dict[str, int] = {}
    for row in rows:
        of_a_key.setdefault(keys[row], row)
    return np.array([*dict.fromkeys([*of_a_key.values(), *rows])][:EXAMPLES], np.int64)


def merged(parts: Sequence[FeatureVerdict]) -> FeatureVerdict:
    """Several comparisons as one; of tolerances, the largest."""
    return FeatureVerdict(
        sum(one.compared for one in parts),
        sum(one.differing for one in parts),
        max((one.worst for one in parts), default=0.0),
        [example for one in parts for example in one.examples][:EXAMPLES],
        max((one.tolerance for one in parts), default=0.0),
    )


def _as_it_is(value: Any) -> Any:
    return value


def _moment(at: int | None) -> str | None:
    """A time as text; microseconds where it is in no year that a date can have."""
    if at is None:
        return None
    try:
        return f"{clock.moment(at):%Y-%m-%dT%H:%M:%S.%f}".removesuffix(".000000") + "Z"
    except (OverflowError, ValueError):
        return f"{at} µs"


def _pairs(left: Values, right: Values, differing: np.ndarray[Any, Any], dtype: DataType) -> list[tuple[float, float]]:
    """Finite numbers of both sides in some of the differing rows."""
    if dtype.numpy is None or dtype.name == "Bool":
        return []
    both = differing[(left.valid & right.valid)[differing]]
    with np.errstate(invalid="ignore"):
        sides = [side.data[both].astype(np.float64) for side in (left, right)]
    finite = np.isfinite(sides[0]) & np.isfinite(sides[1])
    sides = [side[finite] for side in sides]
    count = len(sides[0])
    some = np.unique(np.linspace(0, count - 1, min(count, PAIRS)).astype(np.int64))
    return list(zip(*(side[some].tolist() for side in sides), strict=True))


def identical(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of two fixed-width columns' values are the same."""
    bits = f"<u{left.dtype.itemsize}"
    same: np.ndarray[Any, np.dtype[np.bool_]]
    same = np.ascontiguousarray(left).view(bits) == np.ascontiguousarray(right).view(bits)
    return same | np.isnan(left) & np.isnan(right) if left.dtype.kind == "f" else same


def _same_array(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    return len(left) == len(right) and (left.tobytes() == right.tobytes() or bool(identical(left, right).all()))


def _worst(left: Values, right: Values, dtype: DataType) -> float:
    """The largest absolute difference of values that are not the same; infinity where not both are numbers."""
    if not (left.valid & right.valid).all():
        return math.inf
    if dtype.numpy is not None:
        return _gap(left.data, right.data)
    if dtype.element is None or dtype.element.numpy is None:
        return math.inf
    if any(len(a) != len(b) for a, b in zip(left.data, right.data, strict=True)):
        return math.inf
    # Of the elements that are the same, two infinities or two NaNs have no difference.
    flat, other = np.concatenate(left.data.tolist()), np.concatenate(right.data.tolist())
    differing = ~identical(flat, other)
    return _gap(flat[differing], other[differing])


def _gap(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    """The largest absolute difference; infinity where one of two is not a number."""
    if left.dtype.kind in "iu":
        return float(max(abs(a - b) for a, b in zip(left.tolist(), right.tolist(), strict=True)))
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = np.abs(left.astype(np.float64) - right.astype(np.float64))
    return float(np.max(np.where(np.isnan(gaps), math.inf, gaps)))
