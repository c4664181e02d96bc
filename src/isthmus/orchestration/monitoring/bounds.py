"""Bounds on production quality. A bound is broken only if the difference is statistically significant."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist

import msgspec

from isthmus.distill.evaluation.interval import LEVEL
from isthmus.distill.gates import SLICES, Gate, limits_text, value_text
from isthmus.features.errors import GateFailed
from isthmus.features.production import Bound, MeasuredValue, PackageQuality, Production, SliceQuality

# Names of the checks.
KEEPS, LIKE = "keeps_its_quality_in_production", "is_served_what_it_learned_from"


def require_bounds(result: Production, page: Path) -> None:
    if broken := [bound for bound in result.bounds if bound.broken]:
        raise GateFailed(
            f"production of {result.model}", "; ".join(map(value_text, broken)),
            expected="; ".join(map(limits_text, broken)),
            remedy=f"open {page}; `isthmus deploy rollback` restores the previous package",
        )  # fmt: skip
    if result.undone:
        raise GateFailed(f"production of {result.model}", result.undone, expected="a loss within its bound",
                         remedy=f"open {page}")  # fmt: skip


def problems(result: Production) -> Mapping[str, list[str]]:
    broken = [f"{value_text(bound)}, expected {limits_text(bound)}" for bound in result.bounds if bound.broken]
    drifted = [
        f"{found.name} has drifted: {', '.join(found.exceeded)}; psi {found.psi:.3g}"
        for package in result.packages[:1]
        for found in package.drift
        if found.exceeded
    ]
    broken += [result.undone] if result.undone else []
    return {KEEPS: broken, LIKE: drifted}


def check_bound(bound: Gate, package: PackageQuality | None, slices: Sequence[SliceQuality] = ()) -> Bound:
    """Check a bound that a distillation declares on its production quality, such as a smallest AUC, for one package.

    The bound applies to the quality of all answers and to that of the newest week that has the measure. It is broken if
    the whole 95 % interval of one of them is outside. A missing package or measure does not break it. A bound on slices
    applies to `slices` only. Pass all slices, because their number widens the intervals.
    """
    measure = bound.metric.partition(".")[2]
    result = Bound(measure=measure, at_least=bound.at_least, at_most=bound.at_most)
    if measure.startswith(SLICES):
        return _judge_slices(result, slices)
    if package is None or measure not in package.measures:
        return result
    week = next((week for week in reversed(package.weeks) if measure in week.measures), None)
    parts: list[tuple[MeasuredValue, str | None]] = [(package.measures[measure], None)]
    if week is not None:
        parts.append((week.measures[measure], week.week))
    for found, name in parts:
        if _beyond(result, found):
            return msgspec.structs.replace(result, found=found, week=name, broken=True)
    return msgspec.structs.replace(result, found=package.measures[measure])


def _judge_slices(bound: Bound, slices: Sequence[SliceQuality]) -> Bound:
    measure = bound.measure.removeprefix(SLICES)
    found = [part for part in slices if measure in part.measures]
    sign = -1 if bound.at_least is None else 1
    # Broken bounds first: the worst value may come from few rows, by chance.
    ranked = sorted(
        found,
        key=lambda part: (
            not _beyond(bound, part.measures[measure], len(found)), sign * part.measures[measure].value
        ),
    )  # fmt: skip
    if not ranked:
        return bound
    worst = ranked[0].measures[measure]
    broken = _beyond(bound, worst, len(found))
    return msgspec.structs.replace(bound, found=worst, slice=ranked[0].name, broken=broken)


def _beyond(bound: Bound, found: MeasuredValue, looks: int = 1) -> bool:
    """Return True if the whole interval of a value violates the bound. A value without an interval never violates it.

    For several `looks`, intervals are widened to hold together (Bonferroni, normal distribution).
    """
    if found.low is None or found.high is None:
        return False
    wider = _half(looks) / _half(1)
    low, high = (found.value + (end - found.value) * wider for end in (found.low, found.high))
    return (bound.at_least is not None and high < bound.at_least) or (bound.at_most is not None and low > bound.at_most)


def _half(looks: int) -> float:
    return NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / looks)
