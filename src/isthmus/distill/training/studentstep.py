"""The training step of a student: the loss of a batch and its gradient, at once or from the parts of the batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.distill.losses.objective import Objective
from isthmus.distill.tasks.task import Task, TeacherBatch, answers
from isthmus.distill.training.parts import Parts, Stepped, TrainingRows
from isthmus.features.errors import ConfigurationError, DataError, GateFailed, Problem


@dataclass(frozen=True, eq=False)
class StudentStep:
    """The loss of a student. Its parts give the loss and gradient of the whole batch, except for rounding.

    If the task is `separable`, each loss is a mean over elements of single rows. Each part then counts by its share of
    the elements of the batch.

    Otherwise the objective sees the outputs for all rows at once, as in GradCache (Gao et al., 2021, arXiv:2101.06983).
    A first forward pass computes the outputs of all parts without a graph. The objective gives the gradient of each
    output. A second forward pass, with the same random numbers, takes these gradients to the weights. So memory is
    needed for the graph of one part, and for the outputs of the whole batch.

    Attributes:
        student: the student to train, which may generate a batch (`Task.sampled`).
        steps: number of steps of the training, for error messages; None for a check before the training, which
            generates no batch.
    """

    task: Task
    student: nn.Module
    objective: Objective
    steps: int | None = None

    @property
    def whole(self) -> bool:
        return not self.task.separable

    def __call__(self, module: nn.Module, batch: TeacherBatch, done: float) -> Stepped:
        with self._located(done) as outputs:
            batch = self._sampled(batch)
            outputs |= answers(self.task, module(*batch.inputs))
            stepped: Stepped = self.objective(outputs, batch.teacher, batch.labels, done)
        return stepped

    def split(self, module: nn.Module, data: TrainingRows, parts: Parts, done: float) -> Iterator[Stepped]:
        return (self._joint if self.whole else self._separate)(module, data, parts, done)

    def check(self, module: nn.Module, data: TrainingRows, parts: Parts) -> None:
        """Compute every loss once, without gradients; raise a ConfigurationError that lists all that do not fit."""
        with torch.no_grad():
            batch = data[parts.rows]
            outputs = self._outputs(module, batch, parts, lambda tensor: tensor)
            self.objective.check(outputs, batch.teacher, batch.labels)

    def _separate(self, module: nn.Module, data: TrainingRows, parts: Parts, done: float) -> Iterator[Stepped]:
        with self._located(done):
            batches = [self._sampled(data[part]) for part in parts.indexes]
        counts = [self._counts(batch) for batch in batches]
        total = parts.total(counts).clamp(min=1)
        for batch, count in zip(batches, counts, strict=True):
            shares = dict(zip(self.objective.terms, count / total * (not parts.empty), strict=True))
            with self._located(done) as outputs:
                outputs |= answers(self.task, module(*batch.inputs))
                loss, terms = self.objective(outputs, batch.teacher, batch.labels, done, shares)
            yield loss, {**terms, "loss": loss.detach()}

    def _counts(self, batch: TeacherBatch) -> Tensor:
        counted, rows = self.task.counted(batch), batch.inputs[0].new_tensor(len(batch.inputs[0]), dtype=torch.float32)
        return torch.stack([counted.get(name, rows).float() for name in self.objective.terms])

    def _joint(self, module: nn.Module, data: TrainingRows, parts: Parts, done: float) -> Iterator[Stepped]:
        leaves: list[Tensor] = []

        def leaf(output: Tensor) -> Tensor:
            output = parts.gather(output)
            leaves.append(output.requires_grad_(output.is_floating_point()))
            return leaves[-1]

        with self._located(done) as outputs:
            batch = self._sampled(data[parts.rows])
            device = batch.inputs[0].device
            before = _random_state(device)
            with torch.no_grad():
                outputs |= self._outputs(module, batch, parts, leaf)
            loss, terms = self.objective(outputs, batch.teacher, batch.labels, done)
        loss.backward()
        share = 1 / (len(parts.shares) * len(parts.indexes))
        values = {name: value * share for name, value in {**terms, "loss": loss.detach()}.items()}
        after, gradients = _random_state(device), [output.grad for output in leaves]
        _restore_random_state(before, device)
        for n, rows in enumerate(parts.slices()):
            found: list[Tensor] = []
            _map(found.append, answers(self.task, module(*_inputs(batch, rows))))
            if n == len(parts.indexes) - 1:
                _restore_random_state(after, device)
            scalar = torch.zeros((), device=device, requires_grad=True)
            for output, gradient in zip(found, gradients, strict=True):
                if gradient is not None:
                    scalar = scalar + (output * gradient[rows] * (not parts.empty)).sum()
            yield scalar, values

    def _outputs(
        self, module: nn.Module, batch: TeacherBatch, parts: Parts, convert: Callable[[Tensor], Tensor]
    ) -> Mapping[str, Any]:
        """Return the outputs of all parts of this process together; leave batch norm as it was."""
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        found = [answers(self.task, module(*_inputs(batch, rows))) for rows in parts.slices()]
        for buffer, value in buffers:
            buffer.copy_(value)
        if parts.single:
            return found[0]

        def join(*outputs: Tensor) -> Tensor:
            for output, part in zip(outputs, parts.indexes, strict=True):
                if output.shape[:1] != part.shape:
                    problem = Problem("output", f"shape {(*output.shape,)} for {len(part)} rows", "a row for each row")
                    where = f"{self.task.material.declaration.where}: student"
                    raise ConfigurationError(
                        where, [problem], remedy="set accumulation to 1, or make the task separable"
                    )
            return convert(torch.cat(outputs))

        outputs: Mapping[str, Any] = _map(join, *found)
        return outputs

    def _sampled(self, batch: TeacherBatch) -> TeacherBatch:
        generates = self.steps is not None and self.objective.asks_teacher
        return self.task.sampled(self.student, batch) if generates else batch

    @contextmanager
    def _located(self, done: float) -> Iterator[dict[str, Any]]:
        """Name the step in an error, and the outputs that are not finite among those added to the dict."""
        outputs = dict[str, Any]()
        try:
            yield outputs
        except (GateFailed, DataError) as error:
            if self.steps is None:
                raise
            place = f"{self.task.material.declaration.where}: step {round(done * self.steps) + 1} of {self.steps}"
            cause = f"{_not_finite(outputs)}{error.where}: {error.found}"
            raise type(error)(place, cause, expected=error.expected, remedy=error.remedy) from error


def _inputs(batch: TeacherBatch, rows: slice) -> tuple[Tensor, ...]:
    count = len(batch.inputs[0])
    return tuple(tensor[rows] if tensor.ndim and len(tensor) == count else tensor for tensor in batch.inputs)


def _map(function: Callable[..., Any], *outputs: Any) -> Any:
    """Call a function with each tensor of several outputs of the same form: tensors, or lists of tensors, by name."""
    first = outputs[0]
    if isinstance(first, Mapping):
        return {key: _map(function, *(output[key] for output in outputs)) for key in first}
    if isinstance(first, list | tuple):
        return [_map(function, *items) for items in zip(*outputs, strict=True)]
    return function(*outputs) if isinstance(first, Tensor) else first


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _restore_random_state(state: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def _not_finite(outputs: Mapping[str, Any]) -> str:
    wrong = [key for key, value in outputs.items() if isinstance(value, Tensor) and not value.isfinite().all()]
    return f"the student's {', '.join(wrong)} are not finite, and so " if wrong else ""
