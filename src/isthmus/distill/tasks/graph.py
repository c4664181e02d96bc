"""The graph of a student, as a device runs it."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import torch
from torch import nn

from isthmus.distill.tasks.task import Task
from isthmus.distill.types import evenly_spaced
from isthmus.features.errors import ConfigurationError, Problem

_ROWS = 8
"""Number of rows that are fed one by one, and the first two also together, to see which sizes differ."""


def student_graph(task: Task, student: nn.Module) -> onnx.ModelProto:
    """Export a student as the ONNX graph that a device runs, without metadata about the machine that exported it.

    Raise a ConfigurationError if the graph fixes an input size at a value that some validation rows do not have.
    """
    # Drop what torch caches of earlier exports; with it, torch.onnx would not export these as a loop over time.
    for operator in (torch.ops.aten.lstm.input, torch.ops.aten.gru.input):
        operator._dispatch_cache.clear()
    model = task.model(student)
    # Exporters record source locations, which are private and differ between machines.
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer):
        del value.metadata_props[:]
    del model.graph.metadata_props[:]
    _require_open(task, model.graph)
    return model


def _require_open(task: Task, graph: onnx.GraphProto) -> None:
    rows = task.material.parts.validation
    rows = rows[evenly_spaced(len(rows), _ROWS)]
    batches = [*np.split(rows, len(rows)), *task.graph_batches(rows[:2])]
    fed = [task.feeds(batch) for batch in batches]
    sizes = {
        (name, axis): tuple(tensors[name].shape[axis] for tensors in fed)
        for name, array in fed[0].items()
        for axis in range(array.ndim)
    }
    problems = [
        Problem(f"input {value.name}, axis {axis}", f"is fixed at {size.dim_value}, and is fed {_span(seen)}")
        for value in graph.input
        for axis, size in enumerate(value.type.tensor_type.shape.dim)
        if size.HasField("dim_value") and {*(seen := sizes.get((value.name, axis), ()))} - {size.dim_value}
    ]
    if problems:
        where = f"{task.material.declaration.where}: graph of the student"
        raise ConfigurationError(where, problems, remedy=_remedy(task, sizes, tuple(map(len, batches))))


def _remedy(task: Task, sizes: Mapping[tuple[str, int], tuple[int, ...]], rows: tuple[int, ...]) -> str:
    names = {rows: "N"}
    spare = iter((*task.max_sizes, *"PQRSTUVWXYZ"))
    axes: dict[str, dict[int, str]] = {name: {} for name, _ in sizes}
    for (name, axis), seen in sizes.items():
        if len({*seen}) > 1:
            axes[name][axis] = names.get(seen) or names.setdefault(seen, next(spare))
    limits = {name: f", max={largest}" for name, largest in task.max_sizes.items()}
    shapes = ", ".join(
        "{" + ", ".join(f'{axis}: torch.export.Dim("{n}"{limits.get(n, "")})' for axis, n in of.items()) + "}"
        for of in axes.values()
    )
    old = ", ".join(f'"{name}": {of}'.replace("'", '"') for name, of in axes.items())
    return (
        f"in `model`, give torch.onnx.export dynamic_shapes=({shapes},). If it has that, torch fixed the size as it "
        f"traced the student, as it does in nn.RNN and in loops over time: take nn.LSTM or nn.GRU, or give it "
        f"dynamo=False, dynamic_axes={{{old}}} instead"
    )


def _span(seen: Sequence[int]) -> str:
    return f"{min(seen)} to {max(seen)}" if len({*seen}) > 1 else str(seen[0])
