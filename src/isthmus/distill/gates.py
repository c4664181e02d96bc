"""Gates and bounds: requirements on figures of a student, how they are declared, and how a report meets them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from isthmus.distill.labels import Binary, Classes, Label, Number
from isthmus.features.errors import ConfigurationError, Problem, one_of

OVERALL = ("taught", "gap_closed")
"""Figures of every report that do not belong to a single model."""

STAGES = ("staleness", "skew", "distillation", "precision", "runtime")
"""Stages between an ideal prediction and a device's, in order; `isthmus model attribute` splits their difference."""
EACH = "row"
"""Measure of a stage: how far it moves the score of a row, on average."""
ATTRIBUTED: Mapping[type[Label], Sequence[str]] = {
    Binary: ("score", "log_loss", "auc", EACH),
    Number: ("score", "rmse", "mae", EACH),
}
"""Measures that `isthmus model attribute` supports per kind of label; for other kinds the models share no score."""

PRODUCTION = "production"
"""Prefix of bounds on metrics that `isthmus answers monitor` measures."""
SLICES = "slices."
"""Second prefix of such bounds that apply to each slice."""
LOST = "lost"
"""Prefix of bounds on how much worse a deployment may be than the package before it."""
COMPARED: Mapping[type[Label], Sequence[str]] = {
    Binary: ("auc", "log_loss", "brier"),
    Number: ("rmse", "mae"),
}
"""Metrics whose loss has a standard error from paired rows."""
MONITORED: Mapping[type[Label], Sequence[str]] = {
    Binary: ("auc", "log_loss", "brier", "ece"),
    Classes: ("log_loss", "accuracy", "ece"),
    Number: ("rmse", "mae"),
}
"""Metrics of recorded predictions per kind of label. `Rank` is left out: few groups are recorded completely."""


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


def bounded(gates: Sequence[Gate]) -> bool:
    """Return whether each gate has a bound, and all bounds are finite numbers."""
    bounds = [[bound for bound in (gate.at_least, gate.at_most) if bound is not None] for gate in gates]
    return all(own and all(map(_is_finite, own)) for own in bounds)


def _is_finite(bound: object) -> bool:
    return isinstance(bound, Real) and abs(bound) < math.inf  # type: ignore[operator, no-any-return, unused-ignore]


def bound_problems(bounds: Sequence[Gate], label: Label | None, where: str) -> list[Problem]:
    """Return a problem for each bound on an unknown figure, and for each on a loss that is not an upper bound."""
    measures = () if label is None else ATTRIBUTED.get(type(label), ())
    monitored = () if label is None else MONITORED.get(type(label), ())
    compared = () if label is None else COMPARED.get(type(label), ())
    known = [f"{stage}.{measure}" for stage in STAGES for measure in measures]
    known += [f"{PRODUCTION}.{part}{measure}" for part in ("", SLICES) for measure in monitored]
    known += [f"{LOST}.{measure}" for measure in compared]
    production = f"{PRODUCTION} or {PRODUCTION}.{SLICES.rstrip('.')}"
    parts = [(" or ".join(STAGES), measures), (production, monitored), (LOST, compared)]
    expected = ", or ".join(f"{first}, a dot, and {one_of(names)}" for first, names in parts if names)
    expected = expected or "no bounds: only a Tabular with a Binary, Classes or Number label has bounds"
    names = [bound.metric for bound in bounds if bound.metric not in known]
    wrong = [Problem(f"{where}: bound", repr(name), expected) for name in names]
    losses = [bound for bound in bounds if bound.metric.startswith(f"{LOST}.")]
    wrong += [
        Problem(f"{where}: {bound.metric}", repr(bound), "at_most alone, 0 or more")
        for bound in losses
        if bound.at_least is not None or (bound.at_most is not None and bound.at_most < 0)
    ]
    return wrong


@dataclass(frozen=True, slots=True)
class GateResult:
    """A gate and the report's value for it, or None if the report has no value."""

    gate: Gate
    value: float | None

    @property
    def holds(self) -> bool:
        """True if the value is within the bounds; False without a value."""
        least, most, value = self.gate.at_least, self.gate.at_most, self.value
        return value is not None and (least is None or value >= least) and (most is None or value <= most)

    def __str__(self) -> str:
        value = "has no value" if self.value is None else f"is {self.value:.4g}"
        return f"{self.gate.metric} {value}"

    @property
    def failure(self) -> str:
        if self.value is None:
            return f"gate {self.gate.metric} failed: it has no value"
        least = self.gate.at_least is not None and self.value < self.gate.at_least
        bound = f"< {self.gate.at_least:g}" if least else f"> {self.gate.at_most:g}"
        return f"gate {self.gate.metric} failed: {self.value:.4g} {bound}"

    @property
    def expected(self) -> str:
        least = [] if self.gate.at_least is None else [f"at least {self.gate.at_least:g}"]
        most = [] if self.gate.at_most is None else [f"at most {self.gate.at_most:g}"]
        return f"{self.gate.metric} {' and '.join(least + most)}"


def check_gates(report: Mapping[str, Any], gates: Sequence[Gate], where: str) -> list[GateResult]:
    """Check every gate. Raises a ConfigurationError if the report lacks the figure of a gate."""
    figures = gate_figures(report)
    problems = [Problem("gate", repr(gate.metric), one_of(figures)) for gate in gates if gate.metric not in figures]
    if problems:
        raise ConfigurationError(where, problems)
    return check_figures(figures, gates)


def check_figures(figures: Mapping[str, float | None], gates: Iterable[Gate]) -> list[GateResult]:
    """Check the gates whose figures are in `figures` and skip the others."""
    return [GateResult(gate, figures[gate.metric]) for gate in gates if gate.metric in figures]


def gate_figures(report: Mapping[str, Any]) -> dict[str, float | None]:
    """Return all figures of a report that a gate can name."""
    figures: dict[str, float | None] = {name: (report[name] or {}).get("value") for name in OVERALL}
    figures |= report["measures"]
    for model, record in report["models"].items():
        plain = {name: value for name, value in record.items() if isinstance(value, int | float)}
        figures |= {f"{model}.{name}": value for name, value in {**record["quality"], **plain}.items()}
    for model, agreement in report["agreement"].items():
        figures |= {f"{model}.{name}": value for name, value in agreement.items()}
    return figures
