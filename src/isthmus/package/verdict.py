"""The verdict: the comparison of every value that serving returns with the value used in training, bit for bit."""

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
"""Runtime that runs packages behind the API."""

EXAMPLES = 3
_CANDIDATES = 1000
"""Differing rows from which a comparison picks examples."""
PAIRS = 200
"""Pairs of differing numbers in the plot of a feature."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """A value that differs between training (`offline`) and serving, a graph or a model (`online`). Times are UTC."""

    key: str
    offline: Any
    online: Any
    event_timestamp: str | None = None


@dataclass(frozen=True, slots=True)
class FeatureVerdict:
    """The comparison of a feature over all compared keys.

    Attributes:
        compared: number of values compared, including nulls.
        differing: number of values that are neither equal bit for bit nor within the tolerance.
        worst: largest absolute difference of two numbers that are not equal bit for bit (times in microseconds);
            infinity if one side is not a number.
        tolerance: largest absolute difference of two numbers that is ignored.
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
    """The number of rows compared, and the number that `isthmus verify --all` compares."""

    rows: Annotated[int, msgspec.Meta(ge=0)]
    of: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class RuntimeVerdict:
    """The results of a runtime. `files` are its keys in `Verdict.files`; `rows` is per file and includes golden cases.

    `milliseconds` is the time for all files, including starting the runtime and opening the files.
    """

    files: Sequence[str]
    rows: Annotated[int, msgspec.Meta(ge=0)]
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of `isthmus verify`. Each comparison adds its results to the groups.

    Attributes:
        contract: hash of the contract of both sides.
        at: time of the comparison, microseconds since 1970 UTC.
        views: comparisons by view and feature, with `status` and `event_timestamp` of the rows. Request transforms
            appear as views: the engine's results against their graphs.
        tables: fingerprint of the last build of each view's offline table.
        ahead: number of keys per view that are left out until the table catches up, because their rows were pushed
            later.
        package: digest of the package whose output was compared, or None.
        model: comparison of the package's output with the student's, all files together, or None.
        files: part of `model` for each model file, for a server (`/predict`), and for a browser (`FILE in
            onnxruntime-web`).
        inputs: comparison of offline and served values for each input of the package's graph.
        skipped: reason for each comparison that was not possible; `deploy` refuses if a model needs it.
        singly: comparisons by name of rows requested or computed one by one, which also belong to the other
            comparisons.
        device: comparison of each input's offline value at the time of the snapshot with the value that the reference
            client reads from the snapshot file.
        runtimes: results of each runtime that can run here; others are in `skipped`.
        samples: comparisons limited to a sample: keys of views, or rows in runtimes or requested from the API.
    """

    contract: str
    at: int
    views: dict[str, Mapping[str, FeatureVerdict]]
    tables: Mapping[str, str] = field(default_factory=dict)
    ahead: dict[str, int] = field(default_factory=dict)
    package: str | None = None
    model: FeatureVerdict | None = None
    files: dict[str, FeatureVerdict] = field(default_factory=dict)
    inputs: dict[str, FeatureVerdict] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    singly: dict[str, FeatureVerdict] = field(default_factory=dict)
    device: dict[str, FeatureVerdict] = field(default_factory=dict)
    runtimes: dict[str, RuntimeVerdict] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)

    @property
    def compared(self) -> int:
        return sum(feature.compared for feature in self._all())

    @property
    def differing(self) -> int:
        return sum(feature.differing for feature in self._all())

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.differing == 0

    def _all(self) -> list[FeatureVerdict]:
        features = [feature for view in self.views.values() for feature in view.values()]
        features += [part for group in (self.inputs, self.device, self.singly) for part in group.values()]
        return [*features, *([self.model] if self.model else [])]

    @property
    def limits(self) -> list[str]:
        """Return sentences about what `isthmus verify` did not compare, such as rows outside a sample, for its page."""
        ahead = (
            f"left out: {keys:,} keys of {view}, pushed after everything in the table"
            for view, keys in self.ahead.items()
            if keys
        )
        samples = (f"a sample: {part.rows:,} of {part.of:,} {name}" for name, part in self.samples.items())
        return [*ahead, *samples, *(f"not compared: {name}, because {why}" for name, why in self.skipped.items())]

    def named(self) -> dict[str, FeatureVerdict]:
        """Return all comparisons by their names in messages, such as `view.feature` or `input NAME`.

        `NAME alone` compares the same value for rows that were computed one by one, not in a batch. It is omitted if
        the comparison `NAME` already differs.
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
        """Convert the verdict to plain values that strict JSON can hold, without the `pairs` for plots.

        An infinite `worst` becomes null, and a value that JSON cannot hold becomes text.
        """
        sums = {"passed": self.passed, "compared": self.compared, "differing": self.differing}
        plain: dict[str, Any] = _plain({**sums, **asdict(self)})
        for feature in _comparisons(plain):
            del feature["pairs"]
            if feature["worst"] == str(math.inf):
                feature["worst"] = None
        return plain

    def dumps(self) -> bytes:
        return json.dumps(self.as_dict(), indent=1, allow_nan=False).encode() + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str = "verdict.json") -> "Verdict":
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
            claim = f"says {altered[0]} {data[altered[0]]!r}, but its values give {getattr(verdict, altered[0])!r}"
            raise GateFailed(where, claim, remedy="the file was changed: run `isthmus verify`")
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
    """Compare n offline values with n online values bit for bit; return the number of differences and examples.

    Two nulls, or two NaNs, are equal. `keys` names the row of each value in the examples. `times` has the event time of
    each row in microseconds since 1970 UTC, or is empty. `tolerance` is the largest absolute difference of floats to
    ignore: a number for all rows, or an array with a number per row. Raises ValueError if the two columns and `keys`
    differ in length.
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
    rows = differing[:_CANDIDATES].tolist()
    by_key = {keys[row]: row for row in reversed(rows)}
    return np.array([*dict.fromkeys([*sorted(by_key.values()), *rows])][:EXAMPLES], np.int64)


def in_runtime(file: str, runtime: str) -> str:
    return file if runtime in ("", ONNX_RUNTIME) or file.endswith(runtime) else f"{file} in {runtime}"


def flat(groups: Mapping[str, Mapping[str, FeatureVerdict]]) -> dict[str, FeatureVerdict]:
    return {f"{group}.{name}": part for group, parts in groups.items() for name, part in parts.items()}


def merged(parts: Sequence[FeatureVerdict]) -> FeatureVerdict:
    return FeatureVerdict(
        sum(part.compared for part in parts),
        sum(part.differing for part in parts),
        max((part.worst for part in parts), default=0.0),
        [example for part in parts for example in part.examples][:EXAMPLES],
        max((part.tolerance for part in parts), default=0.0),
    )


def _moment(at: int | None) -> str | None:
    if at is None:
        return None
    try:
        return f"{clock.moment(at):%Y-%m-%dT%H:%M:%S.%f}".removesuffix(".000000") + "Z"
    except (OverflowError, ValueError):
        return f"{at} µs"


def _pairs(left: Values, right: Values, differing: np.ndarray[Any, Any], dtype: DataType) -> list[tuple[float, float]]:
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
    if not (left.valid & right.valid).all():
        return math.inf
    if dtype.numpy is not None:
        return _gap(left.data, right.data)
    if dtype.element is None or dtype.element.numpy is None:
        return math.inf
    if any(len(a) != len(b) for a, b in zip(left.data, right.data, strict=True)):
        return math.inf
    # Equal infinities or NaNs have no difference.
    ours, theirs = np.concatenate(left.data.tolist()), np.concatenate(right.data.tolist())
    differing = ~identical(ours, theirs)
    return _gap(ours[differing], theirs[differing])


def _gap(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    if left.dtype.kind in "iu":
        return float(max(abs(a - b) for a, b in zip(left.tolist(), right.tolist(), strict=True)))
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = np.abs(left.astype(np.float64) - right.astype(np.float64))
    return float(np.max(np.where(np.isnan(gaps), math.inf, gaps)))
