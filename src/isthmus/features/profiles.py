"""Two workloads, two typed configurations: `[profiles.training]` and `[profiles.serving]` of isthmus.toml."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from isthmus.features.errors import Problem

_Count = Annotated[int, Ge(1)]

Accelerator = Literal["nvidia-t4", "nvidia-a10", "nvidia-l4", "nvidia-a100", "nvidia-h100", "nvidia-h200"]

WITHOUT_BF16 = frozenset({"nvidia-t4"})
"""Accelerators older than compute capability 8.0, the first with bf16 (CUDA C++ Programming Guide, arithmetic
instructions)."""


@dataclass(frozen=True, slots=True)
class TrainingProfile:
    """How the student is trained: throughput matters.

    Attributes:
        device: where the student trains; "auto" takes CUDA where there is one.
        precision: arithmetic of the forward pass; "bf16" needs a device that has it.
        batch: rows in one step.
        epochs: passes over the training part.
        threads: CPU threads for the teacher and the student.
        compile: whether torch.compile prepares the student first, which pays off on a GPU and with large students.
        give_way: whether a training leaves this machine to the project's API while that is slower than it may be.
        framework: what trains.
        accelerator: what a node of the training fleet has; None for CPUs alone.
        nodes: machines of the fleet that train together.
        per_node: processes of each, with an accelerator of its own each if there are any.
        interconnect: what joins the nodes.
        memory_mb: main memory of a node's part, in MiB.
        script: what every process runs, relative to the project; None for `isthmus distill`, which is one process.
    """

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    batch: _Count = 1024
    epochs: _Count = 4
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
        """Processes of all nodes together."""
        return self.nodes * self.per_node

    def identity(self) -> dict[str, Any]:
        """What a student depends on; how many machines share the work is no part of it."""
        return _named(self, "device", "precision", "batch", "epochs", "threads", "compile")

    def problems(self) -> list[Problem]:
        """Values that are sound and do not go together, by the name of the field to change."""
        found = []
        if self.accelerator is not None and self.device == "cpu":
            found.append(Problem("device", f'"cpu" leaves the accelerator {self.accelerator} idle', '"cuda" or "auto"'))
        if self.precision == "bf16" and self.accelerator in WITHOUT_BF16:
            found.append(Problem("precision", f'"bf16", which {self.accelerator} has no arithmetic for', '"fp32"'))
        if self.processes > 1 and self.script is None:
            expected = "a script for them (docs/training.md), or nodes = 1 and per_node = 1"
            what = f"none for {self.processes} processes, and `isthmus distill` is one"
            found.append(Problem("script", what, expected))
        if self.batch < self.processes:
            what = f"{self.batch}, which {self.processes} processes cannot share"
            found.append(Problem("batch", what, f"{self.processes} or more"))
        return found


FASTEST = "fastest"
OBJECTIVE_MS = 1.0

BATCH_ROWS = 256
"""Rows that wait for a slow model and are predicted together; more are faster together and later one by one."""


@dataclass(frozen=True, slots=True)
class ServingProfile:
    """How the student answers: latency matters.

    Attributes:
        runtime: what executes the exported graph.
        precision: which variant of the package is deployed; "fastest" is the one that answered sooner when it was
            exported.
        threads: CPU threads of one prediction.
        latency_objective_ms: largest p99 of a one-row prediction, in milliseconds, that `export` lets through, and of
            the API's answers beside which a training does not give way, unless `[server]` has one of its own.
        memory_mb: largest growth of a process, in MiB, that opens the model and answers, that `export` lets through.
        load_ms: longest time from the model's file to its first answer, in milliseconds; None for no limit.
        package_kb: largest package, in kB, with one precision only; None for no limit.
        batch: rows of several requests that a slow model predicts together.
        replicas_min: servers of the fleet when it is idle.
        replicas_max: servers of the fleet at most.
        target_utilization: share of the CPUs it asks for at which a server is busy enough for another one.
    """

    runtime: Literal["onnxruntime"] = "onnxruntime"
    precision: Literal["fp32", "int8", "fastest"] = "int8"
    threads: _Count = 1
    latency_objective_ms: Annotated[float, Gt(0)] = OBJECTIVE_MS
    memory_mb: _Count = 64
    load_ms: Annotated[float, Gt(0)] | None = None
    package_kb: Annotated[float, Gt(0)] | None = None
    batch: _Count = BATCH_ROWS
    replicas_min: _Count = 2
    replicas_max: _Count = 8
    target_utilization: Annotated[float, Ge(0.01), Le(1)] = 0.6

    def identity(self) -> dict[str, Any]:
        """What a package depends on; how many servers answer with it is no part of it."""
        return _named(
            self, "runtime", "precision", "threads", "latency_objective_ms", "memory_mb", "load_ms", "package_kb"
        )

    def problems(self) -> list[Problem]:
        """Values that are sound and do not go together, by the name of the field to change."""
        if self.replicas_min <= self.replicas_max:
            return []
        expected = f"replicas_min ({self.replicas_min}) or more"
        return [Problem("replicas_max", str(self.replicas_max), expected)]


def _named(profile: TrainingProfile | ServingProfile, *names: str) -> dict[str, Any]:
    every = asdict(profile)
    return {name: every[name] for name in names}
