"""The profiles of training and serving: `[profiles.training]` and `[profiles.serving]` of isthmus.toml."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from isthmus.features.errors import Problem

_Count = Annotated[int, Ge(1)]

Accelerator = Literal["nvidia-t4", "nvidia-a10", "nvidia-l4", "nvidia-a100", "nvidia-h100", "nvidia-h200"]

ServingDevice = Literal["cpu", "cuda", "tensorrt"]

WITHOUT_BF16 = frozenset({"nvidia-t4"})
"""Accelerators with a compute capability below 8.0 (CUDA C++ Programming Guide, arithmetic instructions)."""

EPOCHS = 4
"""The default number of passes over the training part."""


@dataclass(frozen=True, slots=True)
class TrainingProfile:
    """How the student is trained. The goal is throughput.

    Attributes:
        device: device of the training; "auto" is CUDA if available.
        precision: arithmetic of the forward pass; "bf16" needs a device that supports it.
        batch: rows per step.
        epochs: passes over the training part; None for four, or for more if a `Tabular` has few rows.
        threads: CPU threads for the teacher and the student.
        compile: True to use torch.compile, which pays off on a GPU and with large students.
        shard: True to divide the weights of student and teacher among the processes (FSDP2 of torch), for a model that
            exceeds one device.
        give_way: True to pause training while the project's API on this machine misses its latency objective.
        accelerator: accelerator of the training fleet's nodes; None for CPUs.
        nodes: machines of the fleet that train together.
        per_node: processes per node; each uses one accelerator if there are any.
        parallel: parts in which students and controls train side by side, with the same figures: pods of the fleet,
            or ops in Dagster; as many as there are students and controls give each its own.
        memory_mb: main memory per node, in MiB.
        wait_seconds: time after which a process gives up on another one that does not answer.
        script: script that every process runs, relative to the project; None for `isthmus distill`.
    """

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    batch: _Count = 1024
    epochs: _Count | None = None
    threads: _Count = 2
    compile: bool = False
    shard: bool = False
    give_way: bool = True
    framework: Literal["torch"] = "torch"
    accelerator: Accelerator | None = None
    nodes: _Count = 1
    per_node: _Count = 1
    parallel: _Count = 1
    interconnect: Literal["ethernet", "infiniband"] = "ethernet"
    memory_mb: _Count = 8192
    wait_seconds: Annotated[float, Gt(0)] = 300.0
    script: str | None = None

    @property
    def processes(self) -> int:
        return self.nodes * self.per_node

    @property
    def passes(self) -> int:
        return self.epochs or EPOCHS

    def identity(self) -> dict[str, Any]:
        """Return the settings that change the trained student, by name. A student is stale if they differ from its own.

        Settings that do not change the student, such as the number of nodes, are left out.
        """
        named = _values(self, "device", "precision", "batch", "epochs", "threads", "compile")
        # Leave out the default, so that earlier students keep their identity.
        return {**named, "epochs": self.passes, **({"shard": True} if self.shard else {})}

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each setting that conflicts with another setting, such as bf16 on a device without it.

        Each problem names the setting, what is wrong, and which values are expected.
        """
        if self.accelerator is not None and self.device == "cpu":
            yield Problem("device", f'"cpu" leaves the accelerator {self.accelerator} idle', '"cuda" or "auto"')
        if self.precision == "bf16" and self.accelerator in WITHOUT_BF16:
            yield Problem("precision", f'"bf16", which {self.accelerator} does not support', '"fp32"')
        if self.parallel > 1 and (self.processes > 1 or self.script):
            found = f"{self.parallel}, which does not go together with script, or with nodes or per_node above 1"
            yield Problem("parallel", found, "either")
        if self.shard and self.compile:
            yield Problem("shard", "true, which does not go together with compile = true", "one of them")
        if self.batch < self.processes:
            small = f"{self.batch} rows cannot be divided among {self.processes} processes"
            yield Problem("batch", small, f"{self.processes} or more")


FASTEST, SMALLEST = "fastest", "smallest"
OBJECTIVE_MS = 1.0

BATCH_ROWS = 256
"""Rows that wait for a slow model and are predicted together; more rows increase throughput and latency."""


@dataclass(frozen=True, slots=True)
class ServingProfile:
    """How the student is served. The goal is low latency.

    Attributes:
        device: device of the predictions; "cuda" and "tensorrt" are ONNX Runtime's execution providers for a GPU.
        precision: variant of the package to deploy. "w8" stores weights in 8 bits and "fp16" in 16, and both compute in
            float32. "mixed" is w8 for layers with outliers, int8 for all others. "fastest" is the fastest variant at
            export; "smallest" is the first of int8, mixed, w8, fp16 and fp32 that passes the checks of `export`.
        threads: CPU threads per prediction.
        latency_objective_ms: upper limit, in milliseconds, for the p99 of single-row predictions at `export`; also of
            API responses, for `give_way`, unless `[server]` has its own.
        memory_mb: upper limit, in MiB, at `export` for the memory growth of a process that loads the model and
            predicts.
        load_ms: upper limit, in milliseconds, from opening the model's file to its first prediction; None for no limit.
        package_kb: upper limit for the package, in kB, with a single precision; None for no limit.
        batch: rows of several requests that a slow model predicts together.
        probation_seconds: time after a deployment in which a server rolls it back if it fails, or if it misses the
            latency objective and the previous one does not; 0 for never.
        replicas_min: servers of an idle fleet.
        replicas_max: upper limit for the servers of the fleet.
        target_utilization: CPU utilization of the servers above which the fleet grows.
    """

    runtime: Literal["onnxruntime"] = "onnxruntime"
    device: ServingDevice = "cpu"
    precision: Literal["fp32", "fp16", "w8", "mixed", "int8", "int4", "fastest", "smallest"] = "int8"
    threads: _Count = 1
    latency_objective_ms: Annotated[float, Gt(0)] = OBJECTIVE_MS
    memory_mb: _Count = 64
    load_ms: Annotated[float, Gt(0)] | None = None
    package_kb: Annotated[float, Gt(0)] | None = None
    batch: _Count = BATCH_ROWS
    probation_seconds: Annotated[float, Ge(0)] = 3600.0
    replicas_min: _Count = 2
    replicas_max: _Count = 8
    target_utilization: Annotated[float, Ge(0.01), Le(1)] = 0.6

    def identity(self) -> dict[str, Any]:
        return _values(
            self, "runtime", "precision", "threads", "latency_objective_ms", "memory_mb", "load_ms", "package_kb"
        )

    def problems(self) -> Iterator[Problem]:
        if self.replicas_min > self.replicas_max:
            yield Problem("replicas_max", str(self.replicas_max), f"replicas_min ({self.replicas_min}) or more")


def _values(profile: TrainingProfile | ServingProfile, *names: str) -> dict[str, Any]:
    return {name: getattr(profile, name) for name in names}
