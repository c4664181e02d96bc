"""Bounds on production quality, which chance alone does not break."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist

import msgspec

from isthmus.distill.declaration import PRODUCTION, SLICES, Distillation, Gate
from isthmus.distill.evaluation.interval import LEVEL
from isthmus.features.errors import GateFailed
from isthmus.features.production import Bound, MeasuredValue, PackageQuality, Production, SliceQuality

KEEPS, LIKE = "keeps_its_quality_in_production", "is_served_what_it_learned_from"
"""The checks."""


def bounds(declared: Distillation) -> Sequence[Gate]:
    """Those on production quality."""
    return [bound for bound in declared.bounds if bound.metric.startswith(f"{PRODUCTION}.")]


def require_bounds(result: Production, page: Path) -> None:
    """Raises a GateFailed with every bound that is broken, or if the deployment has lost more than it may."""
    if broken := [bound for bound in result.bounds if bound.broken]:
        raise GateFailed(
            f"production of {result.model}", "; ".join(map(said, broken)), expected="; ".join(map(wanted, broken)),
            remedy=f"look at {page}; `isthmus rollback` puts the package before it in force",
        )  # fmt: skip
    if result.undone:
        raise GateFailed(f"production of {result.model}", result.undone, expected="a deployment that loses no more",
                         remedy=f"look at {page}")  # fmt: skip


def problems(result: Production) -> Mapping[str, list[str]]:
    """By check, what is wrong, in sentences: the bounds that are broken, and what has drifted of the last package."""
    broken = [f"{said(bound)}, expected {wanted(bound)}" for bound in result.bounds if bound.broken]
    drifted = [
        f"{found.name} has drifted: {', '.join(found.exceeded)}; psi {found.psi:.3g}"
        for package in result.packages[:1]
        for found in package.drift
        if found.exceeded
    ]
    broken += [result.undone] if result.undone else []
    return {KEEPS: broken, LIKE: drifted}


def said(bound: Bound) -> str:
    """What was found."""
    if bound.found is None:
        return f"{bound.measure} is not known yet"
    found, of = bound.found, f" in {bound.week}" if bound.week else f" of {bound.slice}" if bound.slice else ""
    ends = "" if found.low is None else f" ({found.low:.4g} to {found.high:.4g})"
    return f"{bound.measure}{of} is {found.value:.4g}{ends}"


def wanted(bound: Bound) -> str:
    """The bound, in words."""
    least = [] if bound.at_least is None else [f"at least {bound.at_least:g}"]
    most = [] if bound.at_most is None else [f"at most {bound.at_most:g}"]
    return f"{bound.measure} {' and '.join(least + most)}"


def judged(bound: Gate, package: PackageQuality | None, slices: Sequence[SliceQuality] = ()) -> Bound:
    """Whether a bound holds of all answers of a package, and of its newest week with such a measure; or of its slices.

    `slices` are all that were looked at, not the worst alone.
    """
    measure = bound.metric.partition(".")[2]
    result = Bound(measure=measure, at_least=bound.at_least, at_most=bound.at_most)
    if measure.startswith(SLICES):
        return _judged_by_slices(bound, result, slices)
    if package is None or measure not in package.measures:
        return result
    week = next((week for week in reversed(package.weeks) if measure in week.measures), None)
    parts: list[tuple[MeasuredValue, str | None]] = [(package.measures[measure], None)]
    if week is not None:
        parts.append((week.measures[measure], week.week))
    for found, name in parts:
        if _beyond(bound, found):
            return msgspec.structs.replace(result, found=found, week=name, broken=True)
    return msgspec.structs.replace(result, found=package.measures[measure])


def _judged_by_slices(bound: Gate, result: Bound, slices: Sequence[SliceQuality]) -> Bound:
    measure = result.measure.removeprefix(SLICES)
    found = [part for part in slices if measure in part.measures]
    sign = -1 if bound.at_least is None else 1
    # The worst that breaks it, else the worst: that of few rows may be the worst by chance.
    ranked = sorted(
        found,
        key=lambda part: (
            not _beyond(bound, part.measures[measure], len(found)), sign * part.measures[measure].value
        ),
    )  # fmt: skip
    if not ranked:
        return result
    worst = ranked[0].measures[measure]
    return msgspec.structs.replace(
        result, found=worst, slice=ranked[0].name, broken=_beyond(bound, worst, len(found))
    )  # fmt: skip


def _beyond(bound: Gate, found: MeasuredValue, looks: int = 1) -> bool:
    """Whether the whole interval is beyond a bound; a figure of so few rows that it has none breaks nothing.

    Of several `looks` any may be off by chance: each interval is as much wider as keeps 95 % for all of them together
    (Bonferroni), by a normal distribution.
    """
    if found.low is None or found.high is None:
        return False
    wider = _half(looks) / _half(1)
    low, high = (found.value + (end - found.value) * wider for end in (found.low, found.high))
    return (bound.at_least is not None and high < bound.at_least) or (bound.at_most is not None and low > bound.at_most)


def _half(looks: int) -> float:
    return NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / looks)
