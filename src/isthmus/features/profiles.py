"""Two workloads, two typed configurations: `[profiles.training]` and `[profiles.serving]` of isthmus.toml."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

_Count = Annotated[int, Ge(1)]


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
    """

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"
    batch: _Count = 1024
    epochs: _Count = 4
    threads: _Count = 2
    compile: bool = False


FASTEST = "fastest"


@dataclass(frozen=True, slots=True)
class ServingProfile:
    """How the student answers: latency matters.

    Attributes:
        runtime: what executes the exported graph.
        precision: which variant of the package is deployed; "fastest" is the one that answered sooner when it was
            exported.
        threads: CPU threads of one prediction.
        latency_objective_ms: largest p99 of a one-row prediction, in milliseconds, that `export` lets through.
        memory_mb: largest growth of a process, in MiB, that opens the model and answers, that `export` lets through.
        load_ms: longest time from the model's file to its first answer, in milliseconds; None for no limit.
        package_kb: largest package, in kB, with one precision only; None for no limit.
    """

    runtime: Literal["onnxruntime"] = "onnxruntime"
    precision: Literal["fp32", "int8", "fastest"] = "int8"
    threads: _Count = 1
    latency_objective_ms: Annotated[float, Gt(0)] = 1.0
    memory_mb: _Count = 64
    load_ms: Annotated[float, Gt(0)] | None = None
    package_kb: Annotated[float, Gt(0)] | None = None
