"""Gates and bounds: limits on figures (metrics) of a model, the figures they may name, and texts of their results."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from isthmus.distill.labels import SEVERAL, Binary, Classes, Label, Number
from isthmus.features.errors import ConfigurationError, GateFailed, Problem, one_of

if TYPE_CHECKING:
    # Definitions must not import third-party libraries.
    from isthmus.features.production import Bound

OVERALL = ("taught", "gap_closed")
"""Figures of every report that do not belong to a single model."""

STAGES = ("staleness", "skew", "distillation", "precision", "runtime")
"""Stages between an ideal prediction and a device's, in order; `isthmus model attribute` splits their difference."""
PRODUCTION = "production"
"""Prefix of bounds on metrics that `isthmus answers monitor` measures."""
SLICES = "slices."
"""Second prefix of a production bound that applies to each slice, as in "production.slices.auc"."""
LOST = "lost"
"""Prefix of bounds on how much worse a deployment may be than the package before it."""
DEVICE = "device"
"""Prefix of bounds on what a device measured with the served ORT file."""
DEVICE_FIGURES = ("differing", "load_ms", "memory_mb", "p50_us", "p99_us", "worst")
EACH = "row"
"""Measure of a stage: how far it moves the score of a row, on average."""

_PREFIXES: Mapping[str, Sequence[str]] = {
    "stage": STAGES,
    PRODUCTION: (PRODUCTION, f"{PRODUCTION}.{SLICES.rstrip('.')}"),
    LOST: (LOST,),
    DEVICE: (DEVICE,),
}
BOUNDED: Mapping[type[Label], Mapping[str, Sequence[str]]] = {
    Binary: {
        "stage": ("score", "log_loss", "auc", EACH),
        PRODUCTION: ("auc", "log_loss", "brier", "ece"),
        LOST: ("auc", "log_loss", "brier"),
    },
    Classes: {PRODUCTION: ("log_loss", "accuracy", "ece")},
    Number: {
        "stage": ("score", "rmse", "mae", EACH),
        PRODUCTION: ("rmse", "mae"),
        LOST: ("rmse", "mae"),
    },
}
"""Measures that bounds may name, per kind of label; see `bounded`.

Models of several classes share no score to attribute. The loss of a measure needs a standard error from paired rows.
`Rank` is left out: few groups are recorded completely.
"""


@dataclass(frozen=True)
class Gate:
    """A requirement that a student must meet to be packaged.

    Attributes:
        metric: a figure of the report: "taught" (what the teacher adds to the task's metric), "gap_closed" (the share
            of the way from the control to the teacher), a figure that the task adds, or a model and its figure, such as
            "student.auc" or "student.p99_us".
        at_least: smallest value that passes; None for no lower bound.
        at_most: largest value that passes; None for no upper bound.
    """

    metric: str
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class GateResult(Gate):
    """A gate with the value of its metric in `found`, None if unknown. `holds` is True if it is within the limits."""

    found: float | None = None
    holds: bool = False

    def __str__(self) -> str:
        value = "has no value" if self.found is None else f"is {self.found:.4g}"
        return f"{self.metric} {value}"

    @property
    def failure(self) -> str:
        if self.found is None:
            return f"gate {self.metric} failed: it has no value"
        least = self.at_least is not None and self.found < self.at_least
        bound = f"< {self.at_least:g}" if least else f"> {self.at_most:g}"
        return f"gate {self.metric} failed: {self.found:.4g} {bound}"

    @property
    def expected(self) -> str:
        return f"{self.metric} {_limits(self.at_least, self.at_most)}"


def check_gate(gate: Gate, value: float | None) -> GateResult:
    least, most = gate.at_least, gate.at_most
    holds = value is not None and (least is None or value >= least) and (most is None or value <= most)
    return GateResult(**asdict(gate), found=value, holds=holds)


def check_gates(report: Mapping[str, Any], gates: Sequence[Gate], where: str) -> list[GateResult]:
    """Compare the figures of a student's report with gates; return a result for each gate, even if it does not hold.

    `where` names the declaration in error messages. Raises a ConfigurationError if the report lacks the metric of a
    gate.
    """
    figures = gate_figures(report)
    problems = [Problem("gate", repr(gate.metric), one_of(figures)) for gate in gates if gate.metric not in figures]
    if problems:
        raise ConfigurationError(where, problems)
    return check_figures(figures, gates)


def check_figures(figures: Mapping[str, float | None], gates: Iterable[Gate]) -> list[GateResult]:
    return [check_gate(gate, figures[gate.metric]) for gate in gates if gate.metric in figures]


def require_passed(where: str, results: Iterable[GateResult], remedy: str) -> None:
    if failed := [result for result in results if not result.holds]:
        expected = "; ".join(result.expected for result in failed)
        raise GateFailed(where, "; ".join(map(str, failed)), expected=expected, remedy=remedy)


def gate_figures(report: Mapping[str, Any]) -> dict[str, float | None]:
    figures: dict[str, float | None] = {name: (report[name] or {}).get("value") for name in OVERALL}
    figures |= report["measures"]
    for model, record in report["models"].items():
        plain = {name: value for name, value in record.items() if isinstance(value, int | float)}
        figures |= {f"{model}.{name}": value for name, value in {**record["quality"], **plain}.items()}
    for model, agreement in report["agreement"].items():
        figures |= {f"{model}.{name}": value for name, value in agreement.items()}
    return figures


def bounds_on(bounds: Iterable[Gate], *prefixes: str) -> list[Gate]:
    return [bound for bound in bounds if bound.metric.partition(".")[0] in prefixes]


def have_limits(gates: Iterable[Gate]) -> bool:
    limits = [[limit for limit in (gate.at_least, gate.at_most) if limit is not None] for gate in gates]
    return all(own and all(map(_is_finite, own)) for own in limits)


def bounded(label: Label | None) -> Mapping[str, Sequence[str]]:
    return {} if label is None or label == SEVERAL else BOUNDED.get(type(label), {})


def bound_problems(where: str, label: Label | None, bounds: Sequence[Gate]) -> list[Problem]:
    measures = {**bounded(label), DEVICE: DEVICE_FIGURES}
    known = {f"{prefix}.{name}" for kind, names in measures.items() for prefix in _PREFIXES[kind] for name in names}
    parts = (f"{' or '.join(_PREFIXES[kind])}, a dot, and {one_of(names)}" for kind, names in measures.items())
    expected = ", or ".join(parts)
    unknown = [bound.metric for bound in bounds if bound.metric not in known]
    return [Problem(f"{where}: bound", repr(metric), expected) for metric in unknown] + [
        Problem(f"{where}: {bound.metric}", repr(bound), "at_most alone, 0 or more")
        for bound in bounds_on(bounds, LOST)
        if bound.at_least is not None or (bound.at_most is not None and bound.at_most < 0)
    ]


def value_text(bound: "Bound") -> str:
    if bound.found is None:
        return f"{bound.measure} is not known yet"
    found, of = bound.found, f" in {bound.week}" if bound.week else f" of {bound.slice}" if bound.slice else ""
    ends = "" if found.low is None else f" ({found.low:.4g} to {found.high:.4g})"
    return f"{bound.measure}{of} is {found.value:.4g}{ends}"


def limits_text(bound: "Bound") -> str:
    return f"{bound.measure} {_limits(bound.at_least, bound.at_most)}"


def _limits(least: float | None, most: float | None) -> str:
    parts = [] if least is None else [f"at least {least:g}"]
    parts += [] if most is None else [f"at most {most:g}"]
    return " and ".join(parts)


def _is_finite(limit: object) -> bool:
    return isinstance(limit, Real) and abs(limit) < math.inf  # type: ignore[operator, no-any-return, unused-ignore]
