"""Check that a student's model files are accurate, good, fast and small enough to serve."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from isthmus.distill.evaluation.metrics import interleaved, throughput
from isthmus.distill.export.candidate import Candidate, ParityLimits, StudentReference
from isthmus.distill.export.conversion import OPTIONAL
from isthmus.distill.gates import Gate, check_figures, require_passed
from isthmus.distill.onnx.quantize import MIXED
from isthmus.distill.onnx.runtime import Run
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, GateFailed, ParityFailed, Problem
from isthmus.features.profiles import FASTEST, SMALLEST, ServingProfile
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import CORE, MODEL, Format, Precision, Variant
from isthmus.package.replay import Deviation


class Accepted(NamedTuple):
    variant: Variant
    model: bytes
    outputs: list[dict[str, Array]]


LADDER = ("int4", "int8", *OPTIONAL, "fp32")
"""Precisions in the order in which "smallest" tries them: integer layers first, as they are faster, then by size."""

SLOWER = 1.1
"""Ratio of two medians from which one counts as slower."""


def accept(
    reference: StudentReference,
    limits: ParityLimits,
    file: str,
    model: bytes,
    run: Run,
    max_sizes: Mapping[str, int] | None = None,
) -> Accepted:
    """Check a model file against its student before it is packaged; return its manifest entry and golden outputs.

    Args:
        reference: student and the outputs that the file must match.
        limits: largest differences allowed.
        file: name of the file, such as "model.int8.ort".
        model: content of the file.
        run: maps inputs to outputs by running the file.
        max_sizes: maximum of each dynamic dimension of the file's inputs, by the dimension's name.

    Raises:
        ParityFailed: the outputs differ too much from the student's.
        GateFailed: the file's metrics miss a gate such as "student.auc". Gates on other figures are not checked.
        ConfigurationError: the task's `expected` lacks an output of the file.
    """
    task, (part, precision, suffix) = reference.task, file.split(".", 2)
    core = part == CORE
    outputs, deviations = reference.compare(run, limits, precision, core=core)
    require_parity(file, limits, precision, deviations)
    quality = reference.quality(run, core=core)
    figures = {f"student.{name}": value for name, value in quality.items()}
    require_gates(file, figures, task.material.declaration.required)
    variant = Variant(
        file=file,
        precision=msgspec.convert(precision, Precision),
        format=msgspec.convert(suffix.removesuffix(".zip"), Format),
        bytes=len(model),
        sha256=hashlib.sha256(model).hexdigest(),
        tolerance=limits.largest(precision),
        worst=max(far.by for far in deviations),
        quality=finite(quality),
        most=dict(max_sizes or {}),
        core=core,
        # A number that another processor rounds differently may tip an INT8 input over, which later layers multiply.
        rounding=limits.largest(precision) if precision == MIXED else None,
    )
    return Accepted(variant, model, outputs)


def require_parity(file: str, limits: ParityLimits, precision: str, deviations: Sequence[Deviation]) -> None:
    far = max(deviations, key=lambda each: each.share)
    if far.share <= 1:
        return
    remedy = "make the graph compute what the student computes"
    if precision != "fp32":
        remedy = 'serve "smallest" or fp32, or train again'
    if line := limits.tolerance_line(precision, max(each.by for each in deviations)):
        remedy += f", or allow a larger difference: {line}"
    raise ParityFailed(
        f"{file}: {far.place}", far.message("the student in torch"),
        expected=f"at most {far.limit:.3g}, {limits.source(precision)}", remedy=remedy,
    )  # fmt: skip


def require_gates(file: str, figures: Mapping[str, float], gates: Sequence[Gate]) -> None:
    remedy = "serve another precision, train longer, or change the gates in the definitions"
    require_passed(file, check_figures(figures, gates), remedy)


def finite(quality: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in quality.items()}


class Measured(msgspec.Struct, frozen=True):
    precision: str
    threads: int
    p50_us: float
    p99_us: float
    requests_per_second: float
    memory_mb: float
    load_ms: float


def exported_precisions(tolerances: Mapping[str, float], profile: ServingProfile) -> list[str]:
    """Return the precisions that export tries: those with a tolerance, and the optional ones that `profile` needs.

    An optional precision without its own tolerance has the tolerance of int8.
    """
    needed = [name for name in OPTIONAL if "int8" in tolerances and profile.precision in (name, SMALLEST)]
    optional = [name for name in OPTIONAL if name in tolerances or name in needed]
    return [*(name for name in tolerances if name not in OPTIONAL), *optional]


def allowed_precisions(precisions: Sequence[str], profile: ServingProfile) -> list[str]:
    if profile.precision == SMALLEST:
        return [precision for precision in LADDER if precision in precisions]
    if allowed := [precision for precision in precisions if profile.precision in (precision, FASTEST)]:
        return allowed
    problem = Problem("precision", profile.precision, f"a precision that the task has: {', '.join(precisions)}")
    raise ConfigurationError("profiles.serving", [problem])


def served_models(models: Mapping[str, bytes], allowed: Sequence[str], profile: ServingProfile) -> dict[str, bytes]:
    """Select the models to time, by precision: all allowed ones, or only the first of them for "smallest"."""
    found = [precision for precision in allowed if precision in models]
    return {precision: models[precision] for precision in (found[:1] if profile.precision == SMALLEST else found)}


def require_smaller(precision: str, models: Mapping[str, bytes], profile: ServingProfile) -> None:
    """Raise GateFailed if a file that should save space is not smaller than fp32. `models` is by file name."""
    if precision not in (OPTIONAL if profile.precision != SMALLEST else ("int8", *OPTIONAL)):
        return
    require_fewer_bytes(f"{MODEL}.{precision}.ort", *(models[f"{MODEL}.{name}.ort"] for name in (precision, "fp32")))


def require_fewer_bytes(file: str, model: bytes, whole: bytes) -> None:
    if len(model) >= len(whole):
        raise GateFailed(
            file, f"has {len(model):,} bytes", expected=f"fewer than the {len(whole):,} of fp32",
            remedy="serve fp32, or another precision",
        )  # fmt: skip


def fastest_within_budget(
    models: Mapping[str, bytes], row: Feeds, sizes: Mapping[str, int], profile: ServingProfile
) -> Measured:
    """Find the precision with the lowest median latency, and check it against the budgets of the serving profile.

    Times all models in turn on the prediction of `row`, and starts a fresh process to measure memory and load time.

    Args:
        models: content of the ORT file of each precision.
        row: inputs of one prediction.
        sizes: bytes of a package with only this precision, by precision.
        profile: threads and budgets.

    Raises:
        GateFailed: a budget is exceeded; the message lists all of them.
    """
    candidates = {precision: Candidate(model, profile.threads) for precision, model in models.items()}
    times = interleaved({name: candidate.call(row) for name, candidate in candidates.items()}, calls=2000)
    fastest = min(times, key=lambda precision: times[precision]["p50_us"])
    candidate = candidates[fastest]
    measured = Measured(
        fastest, profile.threads, **times[fastest], requests_per_second=throughput(candidate.call(row)),
        **msgspec.structs.asdict(candidate.footprint(row, profile.load_ms)),
    )  # fmt: skip
    if exceeded := _exceeded(measured, sizes[fastest], profile):
        keys = [problem.where for problem in exceeded]
        raise GateFailed(
            ", ".join(f"profiles.serving.{key}" for key in keys),
            "; ".join(problem.found for problem in exceeded),
            expected="; ".join(problem.expected for problem in exceeded),
            remedy="make the student smaller, keep fewer golden rows, serve int8, or raise the limit"
            if keys == ["package_kb"]
            else "make the student smaller, raise the limit"
            + ("" if keys == ["memory_mb"] else ", or measure on an idle machine"),
        )
    return measured


def int8_advice(models: Mapping[str, bytes], row: Feeds, threads: int) -> str:
    if not models.keys() >= {"fp32", "int8"}:
        return ""
    times = interleaved({name: Candidate(models[name], threads).call(row) for name in ("fp32", "int8")}, calls=500)
    sizes, p50 = (
        {name: len(model) for name, model in models.items()},
        {name: t["p50_us"] for name, t in times.items()},
    )
    smaller, slower = sizes["int8"] < sizes["fp32"], p50["int8"] > SLOWER * p50["fp32"]
    if smaller and not slower:
        return ""
    return (
        f"INT8 {'is smaller but slower here' if smaller else 'is not smaller'}: {sizes['int8']:,} bytes and "
        f"{p50['int8']:.3g} µs per prediction, fp32 {sizes['fp32']:,} bytes and {p50['fp32']:.3g} µs. "
        'Set precision = "fp32" in [profiles.serving] to serve fp32.'
    )


def _exceeded(measured: Measured, size: int, profile: ServingProfile) -> list[Problem]:
    p99_ms, kilobytes = measured.p99_us / 1000, size / 1000
    budgets = [
        ("latency_objective_ms", p99_ms, f"p99 of one row is {p99_ms:.3f}", "ms"),
        ("memory_mb", measured.memory_mb, f"a session of the model uses {measured.memory_mb}", "MiB"),
        ("load_ms", measured.load_ms, f"loading and the first prediction take {measured.load_ms}", "ms"),
        ("package_kb", kilobytes, f"a package with only {measured.precision} has {kilobytes:.1f}", "kB"),
    ]
    return [
        Problem(key, f"{text} {unit}", f"at most {most:g} {unit}")
        for key, value, text, unit in budgets
        if (most := getattr(profile, key)) is not None and value > most
    ]
