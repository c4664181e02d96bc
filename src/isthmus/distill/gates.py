"""Checks a student's gates against its report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.distill.declaration import OVERALL, Gate
from isthmus.features.errors import ConfigurationError, Problem, one_of


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
