"""What students and their graphs answer to rows."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.distill.tasks.task import Task, answers
from isthmus.distill.types import Answers, Array, Index, in_batches
from isthmus.features.errors import ConfigurationError, Problem
from isthmus.features.package.inputs import Feeds


def student_answers(task: Task, module: nn.Module, rows: Index, device: torch.device) -> dict[str, Array]:
    """The outputs of a module in eval mode for rows, computed in parts. Lists of layers are for objectives alone.

    Raises a ConfigurationError if the sizes of an output differ between parts.
    """
    parts: list[dict[str, Tensor]] = []
    with torch.inference_mode():
        for places in in_batches(rows, task.at_once):
            batch = task.batch(torch.from_numpy(places))
            outputs = answers(task, module(*(tensor.to(device) for tensor in batch.inputs)))
            parts.append({key: value for key, value in outputs.items() if isinstance(value, Tensor)})
    sizes = {key: sorted({tuple(part[key].shape[1:]) for part in parts}) for key in parts[0]}
    problems = [
        Problem(f"output {key}", f"sizes {shapes[0]} and {shapes[1]}", "the same for all rows: pad to a common length")
        for key, shapes in sizes.items()
        if len(shapes) > 1
    ]
    if problems:
        raise ConfigurationError(f"{task.material.declaration.where}: student", problems)
    return {key: torch.cat([part[key] for part in parts]).float().cpu().numpy() for key in parts[0]}


def graph_answers(task: Task, run: Callable[[Feeds], Answers], rows: Index, *, core: bool = False) -> dict[str, Array]:
    """The answers of a graph, or of its core, for rows, for `quality`, computed in parts."""

    def running(places: Index) -> Callable[[Feeds], Answers]:
        return (lambda _: run(task.core_feeds(places))) if core else run

    parts = [task.replies(running(places), places) for places in task.graph_batches(rows)]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
