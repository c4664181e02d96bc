"""Runs students and their graphs on many rows, and checks that a student is deterministic."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.distill.tasks.task import Task, answers
from isthmus.distill.types import Answers, Array, Index, in_batches, inlier_mask
from isthmus.features.errors import ConfigurationError, Problem
from isthmus.package.inputs import Feeds


def student_answers(task: Task, module: nn.Module, rows: Index, device: torch.device) -> dict[str, Array]:
    """Run a student on rows in batches, to measure it; return its outputs by key, as float32 arrays.

    `module` must be in eval mode and on `device`. `rows` has row numbers of the training set. Drops outputs that are
    not tensors. Raise a ConfigurationError if an output has different sizes in different batches.
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


def require_steady(task: Task, module: nn.Module, rows: Index, whose: str = "student") -> None:
    """Check that a model in eval mode computes each row's output from this row alone, and not at random.

    `rows` has a few row numbers of the training set to try. `whose` names the model in the error. Checks only for
    randomness if an input or output does not have an entry per row. Leaves buffers and torch's random state on the CPU
    unchanged. Raise a ConfigurationError if outputs differ.
    """
    batch = task.batch(torch.from_numpy(rows))
    state = {name: buffer.clone() for name, buffer in module.named_buffers()}
    turned = torch.arange(len(rows) - 1, -1, -1)
    by_row = all(len(tensor) == len(rows) for tensor in batch.inputs)
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):

        def ask(order: Tensor | None = None) -> dict[str, Tensor]:
            inputs = batch.inputs if order is None else [tensor.index_select(0, order) for tensor in batch.inputs]
            outputs = answers(task, module(*inputs))
            return {key: value for key, value in outputs.items() if isinstance(value, Tensor) and value.dim()}

        first = ask()
        # Repeat, since a few rows can get the same output by chance.
        same = (_differences(first, ask(), "two answers to the same rows", _SAME, _AT_RANDOM) for _ in range(4))
        problems = next(filter(None, same), [])
        if not problems and by_row and all(len(value) == len(rows) for value in first.values()):
            again = {key: value.flip(0) for key, value in ask(turned).items()}
            problems = _differences(first, again, "answers to the same rows in another order", _ALONE, _BY_NEIGHBORS)
            # Use two rows: batch norm rejects a single one.
            beside = {key: value[:2].flip(0) for key, value in first.items()}
            problems = problems or _differences(
                beside, ask(turned[-2:]), "answers to two rows beside others and alone", _ALONE, _BY_NEIGHBORS
            )
        for name, buffer in module.named_buffers():
            buffer.copy_(state[name])
    if problems:
        raise ConfigurationError(f"{task.material.declaration.where}: {whose}", problems)


_SAME = "the same answer each time"
_ALONE = "an answer that depends on its row alone"
_AT_RANDOM = (
    "most likely it calls torch.nn.functional.dropout, which is also active in eval mode: write dropout(x, p, "
    "training=self.training) in its forward, or use torch.nn.Dropout"
)
_BY_NEIGHBORS = (
    "most likely its batch norm also uses batch statistics in eval mode: write batch_norm(..., "
    "training=self.training) in its forward, or remove track_running_stats=False; or it computes across rows, "
    "such as a softmax or a mean over dimension 0"
)


def _differences(
    first: dict[str, Tensor], second: dict[str, Tensor], what: str, expected: str, remedy: str
) -> list[Problem]:
    problems = []
    for key, answer in first.items():
        ours, theirs = (values.float().cpu().numpy() for values in (answer, second[key]))
        counted = inlier_mask(ours)
        scale = max(float(np.abs(ours[counted]).max(initial=0)), 1e-6)
        # Allow rounding: matrix products of other sizes add up in a different order.
        gap = float(np.nan_to_num(np.abs(ours[counted] - theirs[counted]), nan=np.inf).max(initial=0))
        if gap > 1e-3 * scale:
            difference = f"{what} differ by up to {gap:.3g}, for numbers up to {scale:.3g}"
            problems.append(Problem(f"output {key}", difference, expected, remedy))
    return problems


def graph_answers(task: Task, run: Callable[[Feeds], Answers], rows: Index, *, core: bool = False) -> dict[str, Array]:
    """Run an exported graph on rows in batches, to measure it; return outputs by key, as `Task.quality` takes them.

    `rows` has row numbers of the training set. `run` maps inputs to outputs, both arrays by name. With `core`, `run`
    must run only the graph's numeric core, and gets the inputs of the core.
    """

    def running(places: Index) -> Callable[[Feeds], Answers]:
        return (lambda _: run(task.core_feeds(places))) if core else run

    parts = [task.replies(running(places), places) for places in task.graph_batches(rows)]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
