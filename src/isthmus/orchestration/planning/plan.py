"""`isthmus plan`: how long training and serving take and what they cost on each device, and which device is best.

Estimates stand beside measurements of this host. Their difference is the overhead of a call, which is assumed to be the
same on every device.
"""

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
from isthmus.orchestration.models.students import require_boundary
from isthmus.orchestration.planning.devices import HOST, Device, Precision, catalogue, measure_host
from isthmus.orchestration.planning.roofline import Estimate, Work, roofline, rows_to_ridge
from isthmus.orchestration.planning.tokenrate import Probe, Text, probe
from isthmus.orchestration.project import Project
from isthmus.orchestration.settings import PricesTable
from isthmus.package.generation.prompt import TOKENS
from isthmus.package.golden import read_golden
from isthmus.package.manifest import open_package

_TRAFFIC_PER_WEIGHT = 4 * (2 + 1 + 4 + 3)
"""Bytes that a step of training moves for each weight, in float32: forward and backward read it, its gradient is
written, AdamW reads weight, gradient and two moments, and writes weight and moments."""
_TRAFFIC_PER_ACTIVATION = 5
"""How often an activation goes to or from memory: written, read by the next layer, read by the backward pass, and its
gradient, written and read."""
_MEMORY_PER_WEIGHT = 4 * 4
"""Bytes of a weight, its gradient and its two moments."""
_AS_FAST = 1.1
"""The largest ratio of expected seconds at which two devices count as equally fast: no estimate is more exact."""
_EXPLAINED = 2.0
"""The largest ratio of measured to estimated seconds at which the estimate explains the measurement."""


@dataclass(frozen=True)
class _Sheet:
    """Devices by name, this host first, and the price of an hour of each."""

    devices: Mapping[str, Device]
    prices: PricesTable

    def cost(self, name: str, seconds: float) -> float | None:
        """The price of so much time; None without a price. This host has the price of "cpu"."""
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
    """The time and cost of training and serving on each device, as plain data: docs/plan.md describes its parts.

    Without the name of a distillation it is about all of them. `rate` is requests per second to answer, by default as
    many as one device answers; `speed` measures this host with so many threads, and `decoding` for a model that
    continues texts.

    Raises:
        ConfigurationError: the catalogue or the prices are wrong; every problem is named.
        DataError: there is no student or no package yet.
        GateFailed: the cost of a package was not measured in full, or not as the profile serves it.
    """
    prices, profiles = project.settings.prices, project.settings.profiles
    known = catalogue(project.root, prices.hour)
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
    """The work and the measurements of a student: of all steps of its training, and of the answer to a row.

    A step needs `memory` bytes; `fixed` are the bytes of its weights as served. `uncounted` operations are no part of
    the work; `trained` and `served` are the measured halves of its boundary; `text` is what continues texts.
    """

    name: str
    uncounted: tuple[str, ...]
    training: Work
    memory: float
    trained: Mapping[str, Any]
    answer: Work
    fixed: float
    served: Mapping[str, Any]
    text: Text | None

    @classmethod
    def of(cls, artifacts: Artifacts) -> "_Student":
        with extra("mobile"):
            from isthmus.distill.onnx.cost import graph_work, weight_bytes
        artifacts.last_model()  # first: without a student there is nothing to export
        package, declared = open_package(artifacts.last_package()), artifacts.declared
        require_boundary(artifacts.project, declared)
        report = artifacts.packaged_report()
        graphs = {graph.precision: graph.file for graph in package.manifest.variants if graph.format == "onnx"}
        complete = graphs.get("fp32") or next(iter(graphs.values()))
        # The first golden case decides the dimensions that have only a name.
        shapes = {name: tensor.shape for name, tensor in read_golden(package).cases[0].tensors.items()}
        work = graph_work(package.files.read(complete), shapes)
        fixed = weight_bytes(package.files.read(graphs.get(report["serving"]["precision"], complete)))
        half, weights = report["training"], report["models"]["student"]["parameters"]
        # A language model learns from blocks, answers a token, and has a prompt in its first golden case.
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
            text=Text.of(artifacts, package.manifest, report["serving"]),
        )


def _training(student: _Student, sheet: _Sheet, precision: Precision) -> dict[str, Any]:
    half, work = student.trained, student.training
    here = roofline(work, sheet.devices[HOST], half["precision"]) if half["device"] == "cpu" else None
    check = _check(here, half["seconds"], work, f"it ran on {half['device']} in {half['precision']}")
    devices, left_out = {}, {}
    for name, device in sheet.devices.items():
        estimate = roofline(work, device, precision, (check["overhead_us"] or 0.0) / 1e6)
        if estimate is None:
            left_out[name] = f"nobody says how fast it is in {precision}"
        elif student.memory > device.memory:
            left_out[name] = f"holds {device.memory:,.0f} bytes, and a step takes {student.memory:,.0f}"
        else:
            devices[name] = {**estimate.as_dict(), "cost": sheet.cost(name, estimate.seconds)}
    return {
        **work.as_dict(), "precision": precision, "memory": student.memory, "devices": devices, "left_out": left_out,
        "recommended": _recommended(devices, "cost", sheet), "check": check,
    }  # fmt: skip


def _serving(student: _Student, sheet: _Sheet, profile: ServingProfile, rate: float | None) -> dict[str, Any]:
    threads, busy = profile.threads, profile.target_utilization
    half, work, precision = student.served, student.answer, student.served["precision"]
    p50, p99 = half["p50_us"] / 1e6, half["p99_us"] / 1e6
    check = _check(roofline(work, sheet.devices[HOST], precision), p50, work, "")
    devices, left_out = {}, {}
    for name, device in sheet.devices.items():
        if device.kind != "cpu":
            left_out[name] = "the profile's runtime answers on CPUs"
            continue
        part = device.part(threads)
        estimate = roofline(work, part, precision, (check["overhead_us"] or 0.0) / 1e6)
        if estimate is None or student.fixed > part.memory:
            left_out[name] = f"has no {precision}, or no room for the weights"
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
    """The devices without GPUs where this host is bound by overhead, which no GPU shortens, whatever it costs."""
    if HOST not in devices or devices[HOST]["bound"] != "overhead":
        return devices
    return {name: figures for name, figures in devices.items() if sheet.devices[name].kind == "cpu"}


def _sufficient(devices: Mapping[str, Mapping[str, Any]], sheet: _Sheet) -> str:
    """The device to take where none has a price: of those that are as fast as any, this host, or that of fewest watts.

    Work that is bound by overhead stays on this host: no device saves half of it. Where a rate takes several devices,
    those of which the fewest are needed count.
    """
    fewest = min(figures.get("count", 1) for figures in devices.values())
    few = {name: figures for name, figures in devices.items() if figures.get("count", 1) == fewest}
    if HOST in few and few[HOST]["bound"] == "overhead":
        return HOST
    enough = _AS_FAST * min(figures["seconds"] for figures in few.values())
    fast = [name for name, figures in few.items() if figures["seconds"] <= enough]
    return min(fast, key=lambda name: (name != HOST, sheet.devices[name].watts or math.inf, name))


def _least(devices: Mapping[str, Mapping[str, Any]], figure: str) -> str | None:
    """The device with the smallest figure, and of equals the fastest; None if no device has the figure."""
    known = [(part[figure], part["seconds"], name) for name, part in devices.items() if part[figure] is not None]
    return min(known)[2] if known else None


def _check(least: Estimate | None, seconds: float, work: Work, otherwise: str) -> dict[str, Any]:
    """A measurement beside the roofline of this host, and in words why they differ."""
    if least is None:
        why = f"{otherwise}, not as this host was measured: what a call costs is not known, and taken as 0"
        return {"measured_seconds": seconds, "least_seconds": None, "ratio": None, "overhead_us": None, "why": why}
    ratio = seconds / least.least
    overhead_us = max(0.0, seconds - least.least) / work.calls * 1e6
    if ratio < 1:
        why = "sooner than the roofline allows: the data lie in caches, or the host is busier now than it was then"
    elif ratio <= _EXPLAINED:
        why = f"the {'arithmetic' if least.bound == 'compute' else 'memory'} of this host explains it"
    else:
        why = (
            f"{1 - 1 / ratio:.0%} of it is neither products nor memory: each call costs {duration(overhead_us)} "
            f"beside its {scaled(work.flops / work.calls, 'FLOP')}"
        )
    return {
        "measured_seconds": seconds, "least_seconds": least.least, "ratio": ratio, "overhead_us": overhead_us,
        "why": why,
    }  # fmt: skip
