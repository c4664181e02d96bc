"""`isthmus plan`: what training and serving ask of a device, what they would take and cost on each, and on which best.

What is worked out stands beside what was measured here: the difference is what each call costs however little it does,
and is taken to be the same on every device.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.distill.declaration import Distillation
from isthmus.distill.reports.words import duration, scaled
from isthmus.features.errors import DependencyError
from isthmus.features.package.golden import read_golden
from isthmus.features.package.manifest import Manifest, read_package
from isthmus.features.profiles import ServingProfile
from isthmus.features.progress import Progress, silent
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.models.models import require_boundary
from isthmus.orchestration.planning.devices import HOST, Device, Precision, catalogue, measured
from isthmus.orchestration.planning.roofline import Estimate, Work, roofline, rows_to_ridge
from isthmus.orchestration.project import Project
from isthmus.orchestration.settings import PricesTable

WEIGHT = 4 * (2 + 1 + 4 + 3)
"""Bytes that a step of training moves for each weight, in float32: forward and backward read it, its gradient is
written, AdamW reads weight, gradient and two moments, and writes weight and moments."""
ACTIVATION = 5
"""Times that an activation goes to or from memory: written, read by the next layer, read by the backward pass, and its
gradient, written and read."""
KEPT = 4 * 4
"""Bytes of a weight, its gradient and its two moments."""
_EXPLAINED = 2.0
"""Times the least seconds that a measured time may be to be called explained by them."""


@dataclass(frozen=True)
class _Sheet:
    """What everything is worked out with: devices by name, this host's first, and what an hour of them costs."""

    devices: Mapping[str, Device]
    prices: PricesTable

    def cost(self, name: str, seconds: float) -> float | None:
        """Of the time, on a device; None where it has no price. That of this host is that of "cpu"."""
        price = self.prices.hour.get("cpu" if name == HOST else name)
        return None if price is None else price * seconds / 3600


def plan(
    project: Project,
    name: str | None = None,
    *,
    rate: float | None = None,
    progress: Progress = silent,
    speed: Callable[[int], Device] = measured,
) -> dict[str, Any]:
    """What training and serving take and cost, on each device that is known, as plain data.

    docs/plan.md says what each part is.

    Args:
        project: the project, with packages.
        name: the distillation; by default all.
        rate: requests a second that are to be answered; by default as many as one device answers.
        progress: told what is being done and the share that is done.
        speed: measures this host with so many threads.

    Raises:
        ConfigurationError: the catalogue or the prices are wrong; every problem is named.
        DataError: there is no student or no package yet.
        GateFailed: what they took has not been measured in full, or not as the profile serves them.
    """
    prices, profiles = project.settings.prices, project.settings.profiles
    known = catalogue(project.root, prices.hour)
    chosen = project.definitions.distillations.values() if name is None else ()
    declarations = list(chosen) or [project.distillation(name)]
    found = [_Planned.of(project, declared) for declared in declarations]
    progress("measuring this host", 0.2)
    hosts = {threads: speed(threads) for threads in {profiles.training.threads, profiles.serving.threads}}
    training = _Sheet({HOST: hosts[profiles.training.threads], **known}, prices)
    serving = _Sheet({HOST: hosts[profiles.serving.threads], **known}, prices)
    return {
        "currency": prices.currency,
        "rate": rate,
        "profiles": {
            "training": {"precision": profiles.training.precision, "threads": profiles.training.threads},
            "serving": {
                "threads": profiles.serving.threads, "latency_objective_ms": profiles.serving.latency_objective_ms,
            },
        },
        "devices": {name: device.model_dump() for name, device in training.devices.items()},
        "models": {
            one.name: {
                "uncounted": list(one.uncounted),
                "training": _training(one, training, profiles.training.precision),
                "serving": _serving(one, serving, profiles.serving, rate),
            }
            for one in found
        },
    }  # fmt: skip


@dataclass(frozen=True)
class _Planned:
    """What is known of a student: its work, and the times that were measured."""

    name: str
    uncounted: tuple[str, ...]
    training: Work
    memory: float
    trained: Mapping[str, Any]
    answer: Work
    fixed: float
    served: Mapping[str, Any]

    @classmethod
    def of(cls, project: Project, declared: Distillation) -> "_Planned":
        try:
            from isthmus.distill.onnx.cost import graph_work, weight_bytes
        except ImportError as error:
            raise DependencyError("mobile", f"cannot be imported ({error})",
                                  remedy="install it: pip install 'isthmus[mobile]'") from error  # fmt: skip
        Artifacts(project, declared).last_model()  # first: without a student there is nothing to export
        package = Artifacts(project, declared).last_package()
        require_boundary(project, declared)
        manifest, report = read_package(package), Artifacts(project, declared).packaged_report()
        graphs = {one.precision: package / one.file for one in manifest.variants if one.format == "onnx"}
        whole = graphs.get("fp32") or next(iter(graphs.values()))
        work = graph_work(whole.read_bytes(), _shapes(package, manifest))
        fixed = weight_bytes(graphs.get(report["serving"]["precision"], whole).read_bytes())
        half, weights = report["training"], report["models"]["student"]["parameters"]
        width = 2 if half["precision"] == "bf16" else 4
        activations = work.activations * width
        moved = half["steps"] * weights * WEIGHT + half["rows"] * (2 * work.values + ACTIVATION * activations)
        return cls(
            name=declared.name,
            uncounted=work.uncounted,
            training=Work(half["flops"], moved, half["steps"]),
            memory=weights * KEPT + half["rows"] / half["steps"] * (work.values + 2 * activations),
            trained=half,
            answer=Work(work.flops, fixed + work.values + 2 * 4 * work.activations),
            fixed=fixed,
            served=report["serving"],
        )


def _shapes(package: Path, manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Of what the model is fed in the first golden case: where a size has a name only, this one stands for it."""
    return {name: kept.shape for name, kept in read_golden(package, manifest).cases[0].tensors.items()}


def _training(one: _Planned, sheet: _Sheet, precision: Precision) -> dict[str, Any]:
    half, work = one.trained, one.training
    here = roofline(work, sheet.devices[HOST], half["precision"]) if half["device"] == "cpu" else None
    check = _check(here, half["seconds"], work, f"it ran on {half['device']} in {half['precision']}")
    overhead = check["overhead_us"]
    devices, left_out = {}, {}
    for name, device in sheet.devices.items():
        estimate = roofline(work, device, precision, (overhead or 0.0) / 1e6)
        if estimate is None:
            left_out[name] = f"nobody says how fast it is in {precision}"
        elif one.memory > device.memory:
            left_out[name] = f"holds {device.memory:,.0f} bytes, and a step takes {one.memory:,.0f}"
        else:
            devices[name] = {**_told(estimate), "cost": sheet.cost(name, estimate.seconds)}
    cheapest = _least(devices, "cost")
    fastest = _least(devices, "seconds")
    return {
        **_work(work),
        "precision": precision,
        "memory": one.memory,
        "devices": devices,
        "left_out": left_out,
        "recommended": {"cheapest": cheapest, "fastest": fastest, "by": "time" if cheapest is None else "price"},
        "check": check,
    }


def _serving(one: _Planned, sheet: _Sheet, profile: ServingProfile, rate: float | None) -> dict[str, Any]:
    threads, busy = profile.threads, profile.target_utilization
    half, work, precision = one.served, one.answer, one.served["precision"]
    p50, p99 = half["p50_us"] / 1e6, half["p99_us"] / 1e6
    check = _check(roofline(work, sheet.devices[HOST], precision), p50, work, "")
    devices, left_out = {}, {}
    for name, whole in sheet.devices.items():
        if whole.kind != "cpu":
            left_out[name] = "the profile's runtime answers on CPUs"
            continue
        device = whole.part(threads)
        estimate = roofline(work, device, precision, (check["overhead_us"] or 0.0) / 1e6)
        if estimate is None or one.fixed > device.memory:
            left_out[name] = f"has no {precision}, or no room for the weights"
            continue
        capacity = max(1, whole.cores // threads) / estimate.seconds
        count = 1 if rate is None else math.ceil(rate / (capacity * busy))
        tail = estimate.seconds * p99 / p50 * 1000
        devices[name] = {
            **_told(estimate),
            "rows_to_ridge": rows_to_ridge(work.flops, one.fixed, work.bytes - one.fixed, estimate.ridge),
            "p99_ms": tail,
            "holds": tail <= profile.latency_objective_ms,
            "requests_per_second": capacity,
            "cost": sheet.cost(name, 1000 / capacity),
            "count": count,
            "cost_hour": sheet.cost(name, 3600.0 * count),
        }
    fit = {name: told for name, told in devices.items() if told["holds"]}
    cheapest = _least(fit, "cost" if rate is None else "cost_hour")
    return {
        **_work(work),
        "precision": precision,
        "devices": devices,
        "left_out": left_out,
        "recommended": {
            "cheapest": cheapest, "fastest": _least(fit, "seconds"), "by": "time" if cheapest is None else "price",
        },
        "check": check,
    }  # fmt: skip


def _work(work: Work) -> dict[str, float]:
    return {"flops": work.flops, "bytes": work.bytes, "intensity": work.intensity, "calls": work.calls}


def _told(estimate: Estimate) -> dict[str, Any]:
    return {
        "ridge": estimate.ridge, "bound": estimate.bound, "least_seconds": estimate.least,
        "overhead_seconds": estimate.overhead, "seconds": estimate.seconds,
    }  # fmt: skip


def _least(devices: Mapping[str, Mapping[str, Any]], figure: str) -> str | None:
    """The device with the smallest figure, of those that have it, the faster one if two are alike; None if none has."""
    known = [(told[figure], told["seconds"], name) for name, told in devices.items() if told[figure] is not None]
    return min(known)[2] if known else None


def _check(least: Estimate | None, seconds: float, work: Work, otherwise: str) -> dict[str, Any]:
    """What was measured beside what the roofline of this host says, and in words why they differ."""
    found: dict[str, Any] = {"measured_seconds": seconds, "least_seconds": None, "ratio": None, "overhead_us": None}
    if least is None:
        why = f"{otherwise}, not as this host was measured: what a call costs is not known, and taken as 0"
        return {**found, "why": why}
    ratio = seconds / least.least
    overhead = max(0.0, seconds - least.least) / work.calls
    if ratio < 1:
        why = "sooner than the roofline allows: the data lie in caches, or the host is busier now than it was then"
    elif ratio <= _EXPLAINED:
        why = f"the {'arithmetic' if least.bound == 'compute' else 'memory'} of this host explains it"
    else:
        why = (
            f"{1 - 1 / ratio:.0%} of it is neither products nor memory: each call costs {duration(overhead * 1e6)} "
            f"beside its {scaled(work.flops / work.calls, 'FLOP')}"
        )
    return {**found, "least_seconds": least.least, "ratio": ratio, "overhead_us": overhead * 1e6, "why": why}
