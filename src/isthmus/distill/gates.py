"""What a student must reach, held against its report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.distill.declaration import OVERALL, Gate
from isthmus.features.contract.contract import one_of
from isthmus.features.errors import ConfigurationError, Problem


@dataclass(frozen=True, slots=True)
class GateResult:
    """A gate and what was found.

    Attributes:
        gate: as declared.
        value: the figure of the report; None if it has no value there.
        holds: whether it passes; a figure without a value does not.
    """

    gate: Gate
    value: float | None
    holds: bool

    def __str__(self) -> str:
        value = "has no value" if self.value is None else f"is {self.value:.4g}"
        return f"{self.gate.metric} {value}"

    @property
    def expected(self) -> str:
        """What would pass, in words."""
        least = [] if self.gate.at_least is None else [f"at least {self.gate.at_least:g}"]
        most = [] if self.gate.at_most is None else [f"at most {self.gate.at_most:g}"]
        return f"{self.gate.metric} {' and '.join(least + most)}"


def check_gates(report: Mapping[str, Any], gates: Sequence[Gate], where: str) -> list[GateResult]:
    """Every gate held against a report.

    Raises:
        ConfigurationError: a gate is about a figure that the report does not have.
    """
    known = gate_figures(report)
    unknown = [gate.metric for gate in gates if gate.metric not in known]
    if unknown:
        problems = [Problem("gate", repr(metric), one_of(known)) for metric in unknown]
        raise ConfigurationError(where, problems)
    return check_figures(known, gates)


def check_figures(known: Mapping[str, float | None], gates: Iterable[Gate]) -> list[GateResult]:
    """The gates about figures that are known, held against them."""
    own = [(gate, known[gate.metric]) for gate in gates if gate.metric in known]
    return [GateResult(gate, found, _holds(gate, found)) for gate, found in own]


def gate_figures(report: Mapping[str, Any]) -> dict[str, float | None]:
    """All numbers of a report that a gate can be about, by name."""
    found: dict[str, float | None] = {name: (report[name] or {}).get("value") for name in OVERALL}
    found |= report["measures"]
    for model, told in report["models"].items():
        plain = {name: value for name, value in told.items() if isinstance(value, int | float)}
        found |= {f"{model}.{name}": value for name, value in {**told["quality"], **plain}.items()}
    for model, told in report["agreement"].items():
        found |= {f"{model}.{name}": value for name, value in told.items()}
    return found


def _holds(gate: Gate, found: float | None) -> bool:
    if found is None:
        return False
    return (gate.at_least is None or found >= gate.at_least) and (gate.at_most is None or found <= gate.at_most)
