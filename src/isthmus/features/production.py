"""Production quality: what labels that became known later say of recorded answers.

`isthmus monitor` writes it; a server reads it for its gauges. Neither Arrow nor NumPy is needed to read it.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from isthmus.features.errors import DataError

FORMAT = 1
FOLDER = "production"
"""In the state folder, beside the deployment."""


class Measure(msgspec.Struct, frozen=True):
    """A figure and its two-sided 95 % interval, which a figure of too few rows does not have."""

    value: float
    low: float | None = None
    high: float | None = None


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """Of some answers.

    Attributes:
        answers: rows that were answered.
        rows: those of them with a label that is known by now, each label once.
        measures: by name, over `rows`: of a label of 0 and 1 `auc`, `log_loss`, `brier`, `ece`, the mean `score` and
            the share of ones, `label`; of a number `rmse`, `mae`, and both means; of classes `log_loss`, `accuracy` and
            `ece`. What has no value for these rows, as an AUC of one class, is not there.
    """

    answers: int
    rows: int
    measures: Mapping[str, Measure]


class Week(Quality, frozen=True, kw_only=True):
    """Of the answers of an ISO week in UTC, such as "2026-W48"."""

    week: str


class SliceQuality(Quality, frozen=True, kw_only=True):
    """Of the answers whose column has a value, in words; None for those without a value."""

    column: str
    value: str | None

    @property
    def name(self) -> str:
        """What it is called wherever there is no room for a column of its own: no two slices share it."""
        return f"{self.column} is null" if self.value is None else f"{self.column}: {self.value}"


class InputDrift(msgspec.Struct, frozen=True, kw_only=True):
    """How far what was served is from the training set; see `isthmus.features.quality.drift`.

    Attributes:
        name: of a raw input of the model, or "score".
        psi: population stability index.
        ks: Kolmogorov-Smirnov statistic; None for categories. Likewise `wasserstein`, in standard deviations.
        exceeded: the measures that are beyond threshold, chance and usual variation.
    """

    name: str
    rows: int
    psi: float
    ks: float | None = None
    wasserstein: float | None = None
    exceeded: tuple[str, ...] = ()


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """What a deployment loses beside the package before it, over the rows that it answered since it was deployed.

    Attributes:
        at_most: how much of the measure it may lose.
        former: the digest of the package before it, which was asked the same; empty if there is no way back.
        rows: that have a label, and an answer of both.
        value: above 0 where it is worse; None for too few rows. Likewise `least`, what it loses unless by rare chance.
    """

    measure: str
    at_most: float
    former: str = ""
    rows: int = 0
    value: float | None = None
    least: float | None = None

    @property
    def beyond(self) -> bool:
        """Whether it loses more than it may, and not by chance."""
        return self.least is not None and self.least > self.at_most


class PackageQuality(Quality, frozen=True, kw_only=True):
    """Of all answers of a package in a precision.

    Attributes:
        package: its digest.
        first: of the answers, microseconds since 1970 UTC; likewise `last`.
        drift: of the answers since `drift_since`.
        lost: beside the package before it, if it is deployed and has a bound on that.
        unknown: what is not known of it, in sentences: the package is gone, say.
    """

    package: str
    precision: str
    first: int
    last: int
    weeks: tuple[Week, ...] = ()
    slices: tuple[SliceQuality, ...] = ()
    drift: tuple[InputDrift, ...] = ()
    drift_since: int | None = None
    lost: tuple[Loss, ...] = ()
    unknown: tuple[str, ...] = ()


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What a measure must reach.

    Attributes:
        measure: with "slices." before it, of each slice.
        found: the measure, as far as there is one: of all answers, or of the newest week with labels if that breaks it;
            of slices that of the worst. `week` and `slice` are their names.
        broken: whether the whole interval is beyond the bound, so that chance alone does not break it.
    """

    measure: str
    at_least: float | None = None
    at_most: float | None = None
    found: Measure | None = None
    week: str | None = None
    slice: str | None = None
    broken: bool = False


class Production(msgspec.Struct, frozen=True, kw_only=True):
    """The production quality of a model.

    Attributes:
        metric: the measure that decides, as of the task: "auc", "log_loss", "rmse" or "mae".
        higher_is_better: of that.
        at: the moment by which labels had to be known, microseconds since 1970 UTC.
        left_out: why rows of answers have no part in any measure, and how many.
        bounds: those of the distillation, of the first package.
        packages: the deployed one comes first, and then the one that answered last.
        undone: that the deployment was undone for what it lost, or why it could not be; else empty.
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
        """What is known of a package by its digest; of several precisions, of that which answered last."""
        found = (part for part in self.packages if part.package == package)
        return next((part for part in found if precision in (None, part.precision)), None)

    def dumps(self) -> bytes:
        """The text of the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str = "production.json") -> "Production":
        """The inverse of `dumps`.

        Raises:
            DataError: it is damaged, or of another version.
        """
        remedy = "run `isthmus monitor`"
        try:
            if (version := msgspec.json.decode(text, type=_Versioned).format) != FORMAT:
                raise DataError(where, f"has format {version}", expected=str(FORMAT), remedy=remedy)
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(where, f"is no production quality ({error})", remedy=remedy) from error


class _Versioned(msgspec.Struct):
    format: int


def production_file(state: Path, model: str) -> Path:
    """Where it is of a model, in the state folder, which is that of the deployment."""
    return state / FOLDER / model / "production.json"
