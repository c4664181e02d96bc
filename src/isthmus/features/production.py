"""Production quality: recorded predictions compared with labels that became known later. Needs no Arrow or NumPy."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from isthmus.features.errors import DataError

FORMAT = 1
FOLDER = "production"
"""The folder of the files, in the state folder next to the deployment."""


class MeasuredValue(msgspec.Struct, frozen=True):
    """A metric's value and its two-sided 95 % interval; no interval if there are too few rows."""

    value: float
    low: float | None = None
    high: float | None = None


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """The quality of a group of predictions.

    Attributes:
        answers: number of predictions.
        rows: number of predictions with a known label; each label counts once.
        measures: metric name to value, over `rows`. Binary labels have `auc`, `log_loss`, `brier`, `ece`, the mean
            `score` and the share of ones, `label`; numbers `rmse`, `mae` and both means; classes `log_loss`, `accuracy`
            and `ece`. Metrics that are undefined for these rows, such as the AUC of a single class, are missing.
    """

    answers: int
    rows: int
    measures: Mapping[str, MeasuredValue]


class Week(Quality, frozen=True, kw_only=True):
    """The quality of predictions in an ISO week in UTC, such as "2026-W48"."""

    week: str


class SliceQuality(Quality, frozen=True, kw_only=True):
    """The quality of predictions whose `column` has this value; None is the slice of nulls."""

    column: str
    value: str | None

    @property
    def name(self) -> str:
        return f"{self.column} is null" if self.value is None else f"{self.column}: {self.value}"


class InputDrift(msgspec.Struct, frozen=True, kw_only=True):
    """The drift of a model input, or of "score", from the training set. See `isthmus.features.quality.drift.Drift`."""

    name: str
    rows: int
    psi: float
    ks: float | None = None
    wasserstein: float | None = None
    exceeded: tuple[str, ...] = ()


class QualityLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The loss of quality against the previous package, over predictions since the deployment.

    Attributes:
        former: digest of the previous package, which got the same requests; empty if a rollback is not possible.
        rows: number of rows with a label and a prediction of both packages.
        value: loss, positive if the new package is worse; None for too few rows.
        least: lower confidence bound of the loss; None like `value`.
    """

    measure: str
    at_most: float
    former: str = ""
    rows: int = 0
    value: float | None = None
    least: float | None = None

    @property
    def beyond(self) -> bool:
        return self.least is not None and self.least > self.at_most


class PackageQuality(Quality, frozen=True, kw_only=True):
    """The quality of all predictions of a package in one precision.

    Attributes:
        first: time of the first prediction, in microseconds since 1970 UTC.
        last: time of the last prediction, like `first`.
        lost: losses against the previous package, if this one is deployed and a loss is bounded.
        unknown: sentences about missing results, for example because the package is gone.
    """

    package: str
    precision: str
    first: int
    last: int
    weeks: tuple[Week, ...] = ()
    slices: tuple[SliceQuality, ...] = ()
    drift: tuple[InputDrift, ...] = ()
    drift_since: int | None = None
    lost: tuple[QualityLoss, ...] = ()
    unknown: tuple[str, ...] = ()


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A limit for a metric.

    Attributes:
        measure: name of the metric; the prefix "slices." applies the bound to each slice.
        found: measured value, or None. It covers all predictions, or the newest week with labels if that breaks the
            bound; for slices, the worst slice.
        broken: True if the whole interval is beyond the bound, so that chance alone does not break it.
    """

    measure: str
    at_least: float | None = None
    at_most: float | None = None
    found: MeasuredValue | None = None
    week: str | None = None
    slice: str | None = None
    broken: bool = False


class Production(msgspec.Struct, frozen=True, kw_only=True):
    """The production quality of a model, which `isthmus answers monitor` writes and servers show as gauges.

    Attributes:
        metric: main metric of the task: "auc", "log_loss", "rmse" or "mae".
        at: time by which labels had to be known, in microseconds since 1970 UTC.
        left_out: reason to the number of predictions that no metric covers.
        packages: the deployed package first, then by the latest prediction.
        undone: sentence that the deployment was rolled back because of a loss, or why not; empty without a loss.
    """

    model: str
    metric: str
    higher_is_better: bool
    at: int
    left_out: Mapping[str, int]
    packages: tuple[PackageQuality, ...]
    bounds: tuple[Bound, ...] = ()
    undone: str = ""
    format: int = FORMAT

    def of(self, package: str, precision: str | None = None) -> PackageQuality | None:
        parts = (part for part in self.packages if part.package == package)
        return next((part for part in parts if precision in (None, part.precision)), None)

    def dumps(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str = "production.json") -> "Production":
        remedy = "run `isthmus answers monitor`"
        try:
            if (version := msgspec.json.decode(text, type=_Versioned).format) != FORMAT:
                raise DataError(where, f"has format {version}", expected=str(FORMAT), remedy=remedy)
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(where, f"is not a production quality file ({error})", remedy=remedy) from error


class _Versioned(msgspec.Struct):
    format: int


def production_file(state: Path, model: str) -> Path:
    return state / FOLDER / model / "production.json"
