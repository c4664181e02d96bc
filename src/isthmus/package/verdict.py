"""The verdict: whether every value that serving answers is the value that training saw, to the bit."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from isthmus.features import clock
from isthmus.features.errors import GateFailed
from isthmus.features.types import DataType
from isthmus.features.values.columns import Values
from isthmus.features.values.equality import equal_values, identical

ONNX_RUNTIME = "ONNX Runtime"
"""Which runs a package behind the API."""

EXAMPLES = 3
_CANDIDATES = 1000
"""Differing rows from which a comparison picks examples."""
PAIRS = 200
"""Pairs of differing numbers in the plot of a feature."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value that differs.

    Attributes:
        key: the key, or another name of the row.
        offline: training's value; a time as text, in UTC.
        online: the value of serving, a graph or a model.
        event_timestamp: event time of the offline row, if any, in UTC.
    """

    key: str
    offline: Any
    online: Any
    event_timestamp: str | None = None


@dataclass(frozen=True, slots=True)
class FeatureVerdict:
    """The comparison of a feature over all compared keys.

    Attributes:
        compared: number of values compared, nulls included.
        differing: number of values that are neither the same to the bit nor within the tolerance.
        worst: largest absolute difference of two numbers that are not the same to the bit, of times in microseconds;
            infinity where a side has no number.
        examples: the first few differences.
        tolerance: the absolute difference of two numbers that does not count.
        pairs: both sides of a sample of the differing numbers, for a plot; not saved in the file.
    """

    compared: Annotated[int, msgspec.Meta(ge=0)]
    differing: Annotated[int, msgspec.Meta(ge=0)]
    worst: float
    examples: Sequence[ValueDifference] = ()
    tolerance: float = 0.0
    pairs: Sequence[tuple[float, float]] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Sample:
    """How many rows were compared, of how many that `isthmus verify --all` compares."""

    rows: Annotated[int, msgspec.Meta(ge=0)]
    of: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class RuntimeVerdict:
    """What a runtime answered.

    Attributes:
        files: the names of its comparisons in `Verdict.files`.
        rows: number of rows of which each file was asked, golden cases included.
        milliseconds: for all of its files, with starting and opening them.
    """

    files: Sequence[str]
    rows: Annotated[int, msgspec.Meta(ge=0)]
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of `isthmus verify`.

    Attributes:
        contract: hash of the contract of both sides.
        at: the moment of the comparison, microseconds since 1970 UTC.
        views: view to feature to its comparison; the status of the view's rows is feature `status`, their event times
            are `event_timestamp`. Request transforms are among the views: the engine's results against their graphs'.
        tables: view to the fingerprint that the last build of the compared offline table has left.
        ahead: view to the number of keys left out: their served rows were pushed after everything in the table became
            known, so there is nothing to compare them with until the table has caught up.
        package: digest of the package whose output was compared, or None.
        model: comparison of the package's output with the student's, all files together, or None.
        files: model file of the package to its part in `model`; a server's predictions are `/predict`, and what a
            file answers in onnxruntime-web is `FILE in onnxruntime-web`.
        inputs: input of the package's graph to the comparison of its offline and served values.
        device: likewise, of its offline value at the moment of the snapshot with what the reference client feeds the
            graph, from the file of the snapshot.
        runtimes: what each runtime that can run here was asked; a runtime that cannot is in `skipped`.
        samples: whatever only a sample was compared of, in words: keys of views, rows in runtimes or asked of the API.
        skipped: whatever could not be compared to the reason: `deploy` refuses where a model needs it.
        singly: every comparison of rows that were asked for alone, or computed alone, by its name: no row may depend on
            others. Its rows are among those of the other comparisons.
    """

    contract: str
    at: int
    views: Mapping[str, Mapping[str, FeatureVerdict]]
    tables: Mapping[str, str] = field(default_factory=dict)
    ahead: Mapping[str, int] = field(default_factory=dict)
    package: str | None = None
    model: FeatureVerdict | None = None
    files: Mapping[str, FeatureVerdict] = field(default_factory=dict)
    inputs: Mapping[str, FeatureVerdict] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    singly: Mapping[str, FeatureVerdict] = field(default_factory=dict)
    device: Mapping[str, FeatureVerdict] = field(default_factory=dict)
    runtimes: Mapping[str, RuntimeVerdict] = field(default_factory=dict)
    samples: Mapping[str, Sample] = field(default_factory=dict)

    @property
    def compared(self) -> int:
        """Total number of compared values."""
        return sum(feature.compared for feature in self._all())

    @property
    def differing(self) -> int:
        """Total number of differing values."""
        return sum(feature.differing for feature in self._all())

    @property
    def passed(self) -> bool:
        """Whether anything was compared, and nothing differs."""
        return self.compared > 0 and self.differing == 0

    def _all(self) -> list[FeatureVerdict]:
        features = [feature for view in self.views.values() for feature in view.values()]
        features += [part for group in (self.inputs, self.device, self.singly) for part in group.values()]
        return [*features, *([self.model] if self.model else [])]

    @property
    def limits(self) -> list[str]:
        """Whatever the verdict says nothing of, in sentences: pushed rows, samples, and what could not be compared."""
        ahead = (
            f"left out: {keys:,} of the keys of {view}, pushed after everything the table holds"
            for view, keys in self.ahead.items()
            if keys
        )
        samples = (f"a sample: {part.rows:,} of {part.of:,} {name}" for name, part in self.samples.items())
        return [*ahead, *samples, *(f"not compared: {name}, because {why}" for name, why in self.skipped.items())]

    def named(self) -> dict[str, FeatureVerdict]:
        """Every comparison by its name in messages: `view.feature`, `input x`, `file y in z`, `view.feature alone`.

        What differs among others has no second name for rows alone.
        """
        parts = flat(self.views)
        parts |= {f"input {name}": part for name, part in self.inputs.items()}
        parts |= {f"input {name} on a device": part for name, part in self.device.items()}
        runtimes = {file: name for name, runtime in self.runtimes.items() for file in runtime.files}
        parts |= {f"file {in_runtime(name, runtimes.get(name, ''))}": part for name, part in self.files.items()}
        if self.model is not None and not self.files:
            parts["the package's output"] = self.model
        alone = {name: part for name, part in self.singly.items() if name not in parts or not parts[name].differing}
        return parts | {f"{name} alone": part for name, part in alone.items()}

    def as_dict(self) -> dict[str, Any]:
        """As strict JSON: an infinite `worst` is null, a value that JSON lacks is its text."""
        sums = {"passed": self.passed, "compared": self.compared, "differing": self.differing}
        plain: dict[str, Any] = _plain({**sums, **asdict(self)})
        for feature in _comparisons(plain):
            del feature["pairs"]
            if feature["worst"] == str(math.inf):
                feature["worst"] = None
        return plain

    def dumps(self) -> bytes:
        """The content of the verdict's file."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False).encode() + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str = "verdict.json") -> "Verdict":
        """The inverse of `dumps`.

        Raises:
            GateFailed: the text is no verdict.
        """
        try:
            data = json.loads(text)
            for feature in _comparisons(data):
                feature["worst"] = math.inf if feature["worst"] is None else feature["worst"]
            required = {name: data[name] for name in ("tables", "ahead", "package")}
            verdict = msgspec.convert({**data, **required}, cls)
            altered = [n for n in ("passed", "compared", "differing") if data[n] != getattr(verdict, n)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise GateFailed(where, f"is not a verdict ({error})", remedy="run `isthmus verify`") from error
        if altered:
            claim = f"says {altered[0]} {data[altered[0]]!r}, its values {getattr(verdict, altered[0])!r}"
            raise GateFailed(where, claim, remedy="it was altered: run `isthmus verify`")
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


def _comparisons(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All comparisons in a verdict's JSON. Earlier verdicts had fewer groups."""
    more = ("files", "inputs", "device", "singly")
    groups = [*data["views"].values(), *(data.get(name, {}) for name in more)]
    return [feature for group in groups for feature in group.values()] + ([data["model"]] if data["model"] else [])


def compare(
    keys: Sequence[str],
    offline: Values,
    online: Values,
    dtype: DataType,
    tolerance: float | np.ndarray[Any, Any] = 0.0,
    times: Sequence[int | None] = (),
) -> FeatureVerdict:
    """Compares two columns value by value: equal are two nulls, two NaNs, or two values with the same bits.

    Two arrays are equal if their lengths and all their elements are. The payload of a NaN means nothing, and engines do
    not preserve it.

    Args:
        keys: the name of each row in an example.
        offline: shape (n,).
        online: shape (n,).
        dtype: the type of both.
        tolerance: the absolute difference of two floating-point numbers that does not count, or one of each row.
        times: event time of each row, if any, in microseconds.
    """
    if not len(keys) == len(offline.data) == len(online.data):
        raise ValueError(f"{len(keys)} keys, {len(offline.data)} offline and {len(online.data)} online values")
    equal = equal_values(offline, online, dtype)
    unlike = np.flatnonzero(~equal)
    worst = _worst(offline.take(unlike), online.take(unlike), dtype) if len(unlike) else 0.0
    if np.any(tolerance) and dtype.name in ("Float32", "Float64"):
        with np.errstate(invalid="ignore", over="ignore"):
            gaps = np.abs(offline.data.astype(np.float64) - online.data)
        equal |= offline.valid & online.valid & (gaps <= tolerance)
    differing = np.flatnonzero(~equal)
    first = _first(keys, differing)
    examples = []
    for n, *sides in zip(first.tolist(), *(side.take(first).tolist(dtype) for side in (offline, online)), strict=True):
        left, right = map(_moment, sides) if dtype.name == "UnixTimestamp" else sides
        examples.append(ValueDifference(keys[n], left, right, _moment(times[n]) if len(times) else None))
    plotted = _pairs(offline, online, differing, dtype)
    return FeatureVerdict(len(keys), len(differing), worst, examples, float(np.max(tolerance, initial=0.0)), plotted)


def _first(keys: Sequence[str], differing: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A few of the differing rows, of different keys if possible."""
    rows = differing[:_CANDIDATES].tolist()
    by_key = {keys[row]: row for row in reversed(rows)}
    return np.array([*dict.fromkeys([*sorted(by_key.values()), *rows])][:EXAMPLES], np.int64)


def in_runtime(file: str, runtime: str) -> str:
    """The name of what a model file answers in a runtime: a file in ONNX Runtime has its own name."""
    return file if runtime in ("", ONNX_RUNTIME) or file.endswith(runtime) else f"{file} in {runtime}"


def flat(groups: Mapping[str, Mapping[str, FeatureVerdict]]) -> dict[str, FeatureVerdict]:
    """Comparisons of groups, each as `group.name`."""
    return {f"{group}.{name}": part for group, parts in groups.items() for name, part in parts.items()}


def merged(parts: Sequence[FeatureVerdict]) -> FeatureVerdict:
    """The sum of several comparisons, with the largest tolerance."""
    return FeatureVerdict(
        sum(part.compared for part in parts),
        sum(part.differing for part in parts),
        max((part.worst for part in parts), default=0.0),
        [example for part in parts for example in part.examples][:EXAMPLES],
        max((part.tolerance for part in parts), default=0.0),
    )


def _moment(at: int | None) -> str | None:
    """A time as text; in microseconds beyond the years of a date."""
    if at is None:
        return None
    try:
        return f"{clock.moment(at):%Y-%m-%dT%H:%M:%S.%f}".removesuffix(".000000") + "Z"
    except (OverflowError, ValueError):
        return f"{at} µs"


def _pairs(left: Values, right: Values, differing: np.ndarray[Any, Any], dtype: DataType) -> list[tuple[float, float]]:
    """Finite numbers of both sides in a sample of the differing rows."""
    if dtype.numpy is None or dtype.name == "Bool":
        return []
    both = differing[(left.valid & right.valid)[differing]]
    with np.errstate(invalid="ignore"):
        sides = [side.data[both].astype(np.float64) for side in (left, right)]
    finite = np.isfinite(sides[0]) & np.isfinite(sides[1])
    sides = [side[finite] for side in sides]
    count = len(sides[0])
    sample = np.unique(np.linspace(0, count - 1, min(count, PAIRS)).astype(np.int64))
    return list(zip(*(side[sample].tolist() for side in sides), strict=True))


def _worst(left: Values, right: Values, dtype: DataType) -> float:
    """The largest absolute difference of unlike values; infinity unless both are numbers."""
    if not (left.valid & right.valid).all():
        return math.inf
    if dtype.numpy is not None:
        return _gap(left.data, right.data)
    if dtype.element is None or dtype.element.numpy is None:
        return math.inf
    if any(len(a) != len(b) for a, b in zip(left.data, right.data, strict=True)):
        return math.inf
    # Two infinities or two NaNs have no difference.
    ours, theirs = np.concatenate(left.data.tolist()), np.concatenate(right.data.tolist())
    differing = ~identical(ours, theirs)
    return _gap(ours[differing], theirs[differing])


def _gap(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    """The largest absolute difference; infinity where either is not a number."""
    if left.dtype.kind in "iu":
        return float(max(abs(a - b) for a, b in zip(left.tolist(), right.tolist(), strict=True)))
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = np.abs(left.astype(np.float64) - right.astype(np.float64))
    return float(np.max(np.where(np.isnan(gaps), math.inf, gaps)))
