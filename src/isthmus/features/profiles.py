"""The configurations of training and serving: `[profiles.training]` and `[profiles.serving]` of isthmus.toml."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from isthmus.features.errors import Problem

_Count = Annotated[int, Ge(1)]

Accelerator = Literal["nvidia-t4", "nvidia-a10", "nvidia-l4", "nvidia-a100", "nvidia-h100", "nvidia-h200"]

WITHOUT_BF16 = frozenset({"nvidia-t4"})
"""Those below compute capability 8.0 (CUDA C++ Programming Guide, arithmetic instructions)."""

EPOCHS = 4
"""Passes over the training part, unless a profile or a distillation says otherwise."""


@dataclass(frozen=True, slots=True)
class TrainingProfile:
    """How the student is trained: throughput matters.

    Attributes:
        device: where the student trains; "auto" is CUDA if available.
        precision: arithmetic of the forward pass; "bf16" needs a device that has it.
        batch: rows per step.
        epochs: passes over the training part; None for four, or for as many as a `Tabular` on few rows needs.
        threads: CPU threads for the teacher and the student.
        compile: whether to use torch.compile, which pays off on a GPU and with large students.
        give_way: whether training pauses while the project's API on this machine misses its latency objective.
        framework: the training framework.
        accelerator: the accelerator of the training fleet's nodes; None for CPUs.
        nodes: machines of the fleet that train together.
        per_node: processes per node, each with its own accelerator if there are any.
        interconnect: the network between the nodes.
        memory_mb: main memory per node, in MiB.
        script: what every process runs, relative to the project; None for `isthmus distill`, a single process.
    """

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    batch: _Count = 1024
    epochs: _Count | None = None
    threads: _Count = 2
    compile: bool = False
    give_way: bool = True
    framework: Literal["torch"] = "torch"
    accelerator: Accelerator | None = None
    nodes: _Count = 1
    per_node: _Count = 1
    interconnect: Literal["ethernet", "infiniband"] = "ethernet"
    memory_mb: _Count = 8192
    script: str | None = None

    @property
    def processes(self) -> int:
        """The number of processes on all nodes."""
        return self.nodes * self.per_node

    @property
    def passes(self) -> int:
        """Return the number of epochs, or the default if none is given."""
        return self.epochs or EPOCHS

    def identity(self) -> dict[str, Any]:
        """The settings a student depends on; the number of machines is not among them."""
        named = _named(self, "device", "precision", "batch", "epochs", "threads", "compile")
        return {**named, "epochs": self.passes}

    def problems(self) -> Iterator[Problem]:
        """Valid values that do not go together, by the name of the field to change."""
        if self.accelerator is not None and self.device == "cpu":
            yield Problem("device", f'"cpu" leaves the accelerator {self.accelerator} idle', '"cuda" or "auto"')
        if self.precision == "bf16" and self.accelerator in WITHOUT_BF16:
            yield Problem("precision", f'"bf16", which {self.accelerator} has no arithmetic for', '"fp32"')
        if self.processes > 1 and self.script is None:
            missing = f"none for {self.processes} processes, and `isthmus distill` is one"
            yield Problem("script", missing, "a script for them (docs/training.md), or nodes = 1 and per_node = 1")
        if self.batch < self.processes:
            small = f"{self.batch}, which {self.processes} processes cannot share"
            yield Problem("batch", small, f"{self.processes} or more")


FASTEST = "fastest"
OBJECTIVE_MS = 1.0

BATCH_ROWS = 256
"""Rows that wait for a slow model and are predicted together; more raise the throughput and the latency."""


@dataclass(frozen=True, slots=True)
class ServingProfile:
    """How the student answers: latency matters.

    Attributes:
        runtime: what executes the exported graph.
        precision: the variant of the package to deploy; "fastest" is the faster variant when exported.
        threads: CPU threads per prediction.
        latency_objective_ms: upper limit, in milliseconds, for the p99 of single-row predictions at `export`; and of
            the API's answers, for `give_way`, unless `[server]` has its own.
        memory_mb: upper limit at `export`, in MiB, for the growth of a process that opens the model and answers.
        load_ms: upper limit, in milliseconds, from the model's file to its first answer; None for no limit.
        package_kb: upper limit for the package, in kB, with a single precision; None for no limit.
        batch: rows of several requests that a slow model predicts together.
        probation_seconds: how long a server undoes a deployment that fails, or that alone misses the latency objective;
            0 for never.
        replicas_min: servers of an idle fleet.
        replicas_max: upper limit for the servers of the fleet.
        target_utilization: CPU utilization of the servers above which the fleet grows.
    """

    runtime: Literal["onnxruntime"] = "onnxruntime"
    precision: Literal["fp32", "int8", "int4", "fastest"] = "int8"
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
        """The settings a package depends on; the number of servers is not among them."""
        return _named(
            self, "runtime", "precision", "threads", "latency_objective_ms", "memory_mb", "load_ms", "package_kb"
        )

    def problems(self) -> Iterator[Problem]:
        """Valid values that do not go together, by the name of the field to change."""
        if self.replicas_min > self.replicas_max:
            yield Problem("replicas_max", str(self.replicas_max), f"replicas_min ({self.replicas_min}) or more")


def _named(profile: TrainingProfile | ServingProfile, *names: str) -> dict[str, Any]:
    return {name: getattr(profile, name) for name in names}
