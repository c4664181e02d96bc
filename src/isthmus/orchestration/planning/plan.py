"""`isthmus infra plan`: estimate time and cost of training and serving on each device, and recommend one."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.distill.language.causal import Causal
from isthmus.distill.reports.words import duration, scaled
from isthmus.features.errors import extra
from isthmus.features.profiles import ServingProfile
from isthmus.features.progress import Progress, silent
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.models.students import require_costs
from isthmus.orchestration.planning.devices import HOST, Device, Precision, catalog, measure_host
from isthmus.orchestration.planning.roofline import TimeEstimate, Work, roofline, rows_to_ridge
from isthmus.orchestration.planning.tokenrate import Probe, TextModel, probe
from isthmus.orchestration.project import Project
from isthmus.orchestration.settings import PricesTable
from isthmus.package.generation.prompt import TOKENS
from isthmus.package.golden import read_golden
from isthmus.package.manifest import open_package

# Bytes that a training step moves for each float32 weight: two reads (forward, backward), one write of the gradient,
# four reads by AdamW (weight, gradient, two moments), and three writes (weight, two moments).
_TRAFFIC_PER_WEIGHT = 4 * (2 + 1 + 4 + 3)
# Memory transfers of an activation: written, read by the next layer and the backward pass; gradient written and read.
_TRAFFIC_PER_ACTIVATION = 5
_MEMORY_PER_WEIGHT = 4 * 4  # bytes of a weight, its gradient and two moments
_AS_FAST = 1.1  # devices within this ratio of expected seconds count as equally fast; estimates are not more exact
_EXPLAINED = 2.0  # up to this ratio of measured to estimated seconds, the estimate explains the measurement


@dataclass(frozen=True)
class _Sheet:
    devices: Mapping[str, Device]
    prices: PricesTable

    def cost(self, name: str, seconds: float) -> float | None:
        price = self.prices.hour.get("cpu" if name == HOST else name)
        return None if price is None else price * seconds / 3600


def plan(
    project: Project,
    name: str | None = None,
    *,
    rate: float | None = None,
    progress: Progress = silent,
    speed: Callable[[int], Device] = measure_host,
    decoding: Probe = probe,
) -> dict[str, Any]:
    """Estimate time and cost of training and serving on each device, to choose hardware; as plain data (docs/plan.md).

    Plans all distillations if `name` is None. `rate` is the load to serve in requests per second; None means as many as
    one device can serve. Calls `speed` and, for language models, `decoding` to measure this host; tests replace them.
    Writes nothing. Raise DataError if a package is missing, and GateFailed if its costs were not measured with the
    current serving profile.
    """
    prices, profiles = project.settings.prices, project.settings.profiles
    known = catalog(project.root, prices.hour)
    declarations = project.definitions.distillations.values() if name is None else ()
    students = [_Student.of(Artifacts(project, d)) for d in list(declarations) or [project.distillation(name)]]
    progress("measuring this host", 0.2)
    threads = profiles.serving.threads
    hosts = {threads: speed(threads) for threads in {profiles.training.threads, threads}}
    training = _Sheet({HOST: hosts[profiles.training.threads], **known}, prices)
    serving = _Sheet({HOST: hosts[threads], **known}, prices)
    return {
        "currency": prices.currency,
        "rate": rate,
        "profiles": {
            "training": {"precision": profiles.training.precision, "threads": profiles.training.threads},
            "serving": {
                "threads": threads, "latency_objective_ms": profiles.serving.latency_objective_ms,
            },
        },
        "devices": {name: device.model_dump() for name, device in training.devices.items()},
        "models": {
            student.name: {
                "uncounted": list(student.uncounted),
                "training": _training(student, training, profiles.training.precision),
                "serving": _serving(student, serving, profiles.serving, rate),
                "decoding": student.text and student.text.plan(serving.devices, threads, decoding),
            }
            for student in students
        },
    }  # fmt: skip


@dataclass(frozen=True)
class _Student:
    """Work and measured costs of a student. `memory` is the bytes of a training step, `fixed` of the served weights."""

    name: str
    uncounted: tuple[str, ...]
    training: Work
    memory: float
    trained: Mapping[str, Any]
    answer: Work
    fixed: float
    served: Mapping[str, Any]
    text: TextModel | None

    @classmethod
    def of(cls, artifacts: Artifacts) -> "_Student":
        with extra("mobile"):
            from isthmus.distill.onnx.cost import graph_work, weight_bytes
        artifacts.last_model()  # a missing student is reported before a missing package
        package, declared = open_package(artifacts.last_package()), artifacts.declared
        require_costs(artifacts.project, declared)
        report = artifacts.packaged_report()
        graphs = {graph.precision: graph.file for graph in package.manifest.variants if graph.format == "onnx"}
        complete = graphs.get("fp32") or next(iter(graphs.values()))
        # Take the sizes of symbolic dimensions from the first golden case.
        shapes = {name: tensor.shape for name, tensor in read_golden(package).cases[0].tensors.items()}
        work = graph_work(package.files.read(complete), shapes)
        fixed = weight_bytes(package.files.read(graphs.get(report["serving"]["precision"], complete)))
        half, weights = report["training"], report["models"]["student"]["parameters"]
        # A language model is trained on blocks, answers one token, and its first golden case is a prompt.
        block, prompt = (declared.task.context, shapes[TOKENS][1]) if isinstance(declared.task, Causal) else (1, 1)
        values = work.values * block / prompt
        activations = work.activations * block / prompt * (2 if half["precision"] == "bf16" else 4)
        per_row = 2 * values + _TRAFFIC_PER_ACTIVATION * activations
        moved = half["steps"] * weights * _TRAFFIC_PER_WEIGHT + half["rows"] * per_row
        return cls(
            name=declared.name,
            uncounted=work.uncounted,
            training=Work(half["flops"], moved, half["steps"]),
            memory=weights * _MEMORY_PER_WEIGHT + half["rows"] / half["steps"] * (values + 2 * activations),
            trained=half,
            answer=Work(work.flops / prompt, fixed + (work.values + 2 * 4 * work.activations) / prompt),
            fixed=fixed,
            served=report["serving"],
            text=TextModel.of(artifacts, package.manifest, report["serving"]),
        )


def _training(student: _Student, sheet: _Sheet, precision: Precision) -> dict[str, Any]:
    half, work = student.trained, student.training
    here = roofline(work, sheet.devices[HOST], half["precision"]) if half["device"] == "cpu" else None
    check = _check(here, half["seconds"], work, f"it ran on {half['device']} in {half['precision']}")
    devices, left_out = {}, {}
    for name, device in sheet.devices.items():
        estimate = roofline(work, device, precision, (check["overhead_us"] or 0.0) / 1e6)
        if estimate is None:
            left_out[name] = f"its speed in {precision} is not known"
        elif student.memory > device.memory:
            left_out[name] = f"has {device.memory:,.0f} bytes of memory, and a step needs {student.memory:,.0f}"
        else:
            devices[name] = {**estimate.as_dict(), "cost": sheet.cost(name, estimate.seconds)}
    return {
        **work.as_dict(), "precision": precision, "memory": student.memory, "devices": devices, "left_out": left_out,
        "recommended": _recommended(devices, "cost", sheet), "check": check,
    }  # fmt: skip


def _serving(student: _Student, sheet: _Sheet, profile: ServingProfile, rate: float | None) -> dict[str, Any]:
    threads, busy = profile.threads, profile.target_utilization
    half, work, precision = student.served, student.answer, student.served["precision"]
    arithmetic: Precision = "int8" if precision == "int8" else "fp32"  # other precisions only store smaller weights
    p50, p99 = half["p50_us"] / 1e6, half["p99_us"] / 1e6
    check = _check(roofline(work, sheet.devices[HOST], arithmetic), p50, work, "")
    devices, left_out = {}, {}
    for name, device in sheet.devices.items():
        if device.kind != "cpu":
            left_out[name] = "the serving runtime needs a CPU"
            continue
        part = device.part(threads)
        estimate = roofline(work, part, arithmetic, (check["overhead_us"] or 0.0) / 1e6)
        if estimate is None or student.fixed > part.memory:
            left_out[name] = f"does not support {precision}, or has too little memory for the weights"
            continue
        capacity = max(1, device.cores // threads) / estimate.seconds
        count = 1 if rate is None else math.ceil(rate / (capacity * busy))
        tail = estimate.seconds * p99 / p50 * 1000
        devices[name] = {
            **estimate.as_dict(),
            "rows_to_ridge": rows_to_ridge(work.flops, student.fixed, work.bytes - student.fixed, estimate.ridge),
            "p99_ms": tail,
            "holds": tail <= profile.latency_objective_ms,
            "requests_per_second": capacity,
            "cost": sheet.cost(name, 1000 / capacity),
            "count": count,
            "cost_hour": sheet.cost(name, 3600.0 * count),
        }
    fit = {name: figures for name, figures in devices.items() if figures["holds"]}
    best = _recommended(fit, "cost" if rate is None else "cost_hour", sheet)
    return {
        **work.as_dict(), "precision": precision, "devices": devices, "left_out": left_out, "recommended": best,
        "check": check,
    }  # fmt: skip


def _recommended(devices: Mapping[str, Mapping[str, Any]], price: str, sheet: _Sheet) -> dict[str, str | None]:
    fit = _worthwhile(devices, sheet)
    cheapest, fastest = _least(fit, price), _least(devices, "seconds")
    return {
        "device": cheapest or (fastest and _sufficient(fit, sheet)), "cheapest": cheapest, "fastest": fastest,
        "by": "time" if cheapest is None else "price",
    }  # fmt: skip


def _worthwhile(devices: Mapping[str, Mapping[str, Any]], sheet: _Sheet) -> Mapping[str, Mapping[str, Any]]:
    if HOST not in devices or devices[HOST]["bound"] != "overhead":
        return devices
    return {name: figures for name, figures in devices.items() if sheet.devices[name].kind == "cpu"}


def _sufficient(devices: Mapping[str, Mapping[str, Any]], sheet: _Sheet) -> str:
    """Return the device to recommend if none has a price: this host if it is overhead-bound or among the fastest."""
    fewest = min(figures.get("count", 1) for figures in devices.values())
    few = {name: figures for name, figures in devices.items() if figures.get("count", 1) == fewest}
    if HOST in few and few[HOST]["bound"] == "overhead":
        return HOST
    enough = _AS_FAST * min(figures["seconds"] for figures in few.values())
    fast = [name for name, figures in few.items() if figures["seconds"] <= enough]
    return min(fast, key=lambda name: (name != HOST, sheet.devices[name].watts or math.inf, name))


def _least(devices: Mapping[str, Mapping[str, Any]], figure: str) -> str | None:
    known = [(part[figure], part["seconds"], name) for name, part in devices.items() if part[figure] is not None]
    return min(known)[2] if known else None


def _check(least: TimeEstimate | None, seconds: float, work: Work, otherwise: str) -> dict[str, Any]:
    if least is None:
        why = f"{otherwise}, which was not measured on this host: the overhead per call is unknown and taken as 0"
        return {"measured_seconds": seconds, "least_seconds": None, "ratio": None, "overhead_us": None, "why": why}
    ratio = seconds / least.least
    # The overhead per call is assumed to be the same on all devices.
    overhead_us = max(0.0, seconds - least.least) / work.calls * 1e6
    if ratio < 1:
        why = "faster than the roofline: the data fit in caches, or the host is busier now than during the measurement"
    elif ratio <= _EXPLAINED:
        why = f"explained by the {'arithmetic' if least.bound == 'compute' else 'memory'} speed of this host"
    else:
        why = (
            f"{1 - 1 / ratio:.0%} of it is overhead: each call costs {duration(overhead_us)} in addition to its "
            f"{scaled(work.flops / work.calls, 'FLOP')}"
        )
    return {
        "measured_seconds": seconds, "least_seconds": least.least, "ratio": ratio, "overhead_us": overhead_us,
        "why": why,
    }  # fmt: skip
