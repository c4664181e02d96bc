"""The objective of a training: a weighted sum of named losses."""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isthmus.distill.accelerator import is_full
from isthmus.features.errors import ConfigurationError, GateFailed, Problem

Outputs = Mapping[str, Any]
"""Outputs of a model for a batch by name: tensors, or lists of tensors."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A weight that moves from `start` to `end` and stays there.

    With x = min(1, progress / until), the weight is start + (end - start) x if linear, and start + (end - start) (1 -
    cos(πx)) / 2 if cosine.

    Attributes:
        curve: "linear", or "cosine", which changes slowly at both ends.
        until: share of the training at which `end` is reached, above 0 and at most 1.
    """

    start: float
    end: float
    curve: Literal["linear", "cosine"] = "linear"
    until: float = 1.0

    def __post_init__(self) -> None:
        problems = [
            Problem(name, repr(value), "a finite number")
            for name, value in (("start", self.start), ("end", self.end))
            if not math.isfinite(value)
        ]
        if self.curve not in ("linear", "cosine"):
            problems.append(Problem("curve", repr(self.curve), '"linear" or "cosine"'))
        if not 0 < self.until <= 1:
            problems.append(Problem("until", repr(self.until), "above 0, at most 1"))
        if problems:
            raise ConfigurationError("schedule of a weight", problems)

    def __call__(self, progress: float) -> float:
        """Return the weight at `progress`, the finished share of training, 0 to 1."""
        share = min(1.0, progress / self.until)
        if self.curve == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return (1 - share) * self.start + share * self.end


_OPTIONS = "bind options of the loss with functools.partial; the weight is the second argument"


class Term(nn.Module):
    """A loss of an objective, with its weight and the sources of its arguments.

    Args:
        loss: function or module that maps tensors to a scalar. Bind options of a function with `functools.partial`; the
            parameters of a module are trained with the student.
        weight: a finite number, or a function of the finished share of training that returns one (`Schedule`).
        arguments: source of each argument of the loss: "student.KEY" or "teacher.KEY" of the outputs, or "labels".

    Raises:
        ConfigurationError: the weight is not finite, a source is invalid, the loss does not take these arguments, or a
            module is hidden in a function, so that no optimizer would find its parameters.
    """

    def __init__(
        self, loss: Callable[..., Tensor], weight: float | Callable[[float], float] = 1.0, /, **arguments: str
    ) -> None:
        super().__init__()
        self.loss, self.weight, self.arguments = loss, weight, arguments
        problems = [
            Problem(name, repr(source), f'"student.KEY", "teacher.KEY" or "labels"; {_OPTIONS}')
            for name, source in arguments.items()
            # A common mistake is to pass temperature=2.0 here.
            if not (isinstance(source, str) and re.fullmatch(r"labels|(student|teacher)\..+", source))
        ]
        if not callable(weight) and not math.isfinite(weight):
            problems.append(Problem("weight", repr(weight), "a finite number"))
        if not isinstance(loss, nn.Module):
            inner = loss.func if isinstance(loss, partial) else getattr(loss, "__self__", None)
            if isinstance(inner, nn.Module):
                problems.append(Problem("loss", f"{type(inner).__name__} inside a function", "the module itself"))
        try:
            _signature(loss).bind(**arguments)
        except (TypeError, ValueError) as error:  # ValueError: a function of torch that is not written in Python
            problems.append(
                Problem("arguments", str(error), f"all arguments of the loss without a default; {_OPTIONS}")
            )
        if problems:
            raise ConfigurationError(f"term of an objective with the loss {self.loss_name}", problems)

    @property
    def loss_name(self) -> str:
        """The name of the loss function, or of the class of a loss that is a module."""
        loss = self.loss.func if isinstance(self.loss, partial) else self.loss
        return str(getattr(loss, "__name__", type(loss).__name__))

    def takes(self, argument: str) -> bool:
        """Return True if the loss takes another argument of this name."""
        try:
            _signature(self.loss).bind(**self.arguments, **{argument: ""})
        except TypeError:
            return False
        return True

    @property
    def asks_teacher(self) -> bool:
        return any(source.startswith("teacher.") for source in self.arguments.values())

    def weight_at(self, progress: float) -> float:
        """Return the weight of this loss at a moment of the training; `progress` is the finished share, 0 to 1.

        Raises a ConfigurationError if the weight is not finite.
        """
        weight = self.weight(progress) if callable(self.weight) else self.weight
        if not math.isfinite(weight):
            raise ConfigurationError("weight", [Problem(f"at progress {progress}", repr(weight), "a finite number")])
        return weight

    def forward(self, student: Outputs, teacher: Outputs, labels: Any) -> Tensor:
        """Return the unweighted loss of a batch, from the outputs of student and teacher, by key, and the labels.

        Raises a ConfigurationError if an output that this loss uses is missing, or if it uses labels and `labels` is
        None.
        """
        values, problems = {}, []
        for name, source in self.arguments.items():
            party, _, key = source.partition(".")
            if party == "labels":
                values[name] = labels
                if labels is None:
                    problems.append(Problem(name, "there are no labels", "labels"))
                continue
            outputs = student if party == "student" else teacher
            if key in outputs:
                values[name] = outputs[key] if party == "student" else _detached(outputs[key])
            else:
                problems.append(Problem(name, f"{party} has {', '.join(sorted(outputs)) or 'no outputs'}", key))
        if problems:
            raise ConfigurationError("outputs", problems)
        return self.loss(**values)


def _signature(loss: Callable[..., Tensor]) -> inspect.Signature:
    return inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)


class Objective(nn.Module):
    """A weighted sum of at least one named term. Its parameters are the parameters of losses that are modules.

        objective = Objective({
            "labels": Term(hard_targets, 0.3, student="student.logits", labels="labels"),
            "images": Term(perceptual, 0.7, student="student.image", teacher="teacher.image"),
        })
        total, terms = objective(student_outputs, teacher_outputs, labels, progress)

    Args:
        terms: losses by name.
        control: losses that train the control (the student without the teacher); None for those of `terms` that do not
            use the teacher. Needed if all of `terms` use the teacher.

    Raises:
        ConfigurationError: there are no terms, a name has a dot, or a loss of the control uses the teacher.
    """

    def __init__(self, terms: Mapping[str, Term], control: Mapping[str, Term] | None = None) -> None:
        super().__init__()
        problems = [] if terms else [Problem("terms", "none", "at least one")]
        problems += [
            Problem(f"term {name!r}", "a dot in the name", "a name without a dot") for name in terms if "." in name
        ]
        problems += [
            Problem(f"term {name!r} of the control", "uses the teacher", "a loss of labels alone")
            for name, term in (control or {}).items()
            if term.asks_teacher
        ]
        if problems:
            raise ConfigurationError("objective", problems)
        self.terms, self.control = dict(terms), control
        for name, term in terms.items():
            # The prefix avoids clashes with torch's attributes.
            self.add_module(f"term {name}", term)

    @property
    def asks_teacher(self) -> bool:
        return any(term.asks_teacher for term in self.terms.values())

    def without_teacher(self) -> "Objective | None":
        """Return the objective that trains the control; None if all losses use the teacher."""
        terms = self.control or {name: term for name, term in self.terms.items() if not term.asks_teacher}
        return Objective(terms) if terms else None

    def changed(self, change: Callable[[Term], Term]) -> "Objective":
        """Return a copy in which `change(term)` replaces each term, including those of the control."""
        terms, control = ({name: change(term) for name, term in of.items()} for of in (self.terms, self.control or {}))
        return Objective(terms, control or None)

    def require_weight(self, steps: int, where: str) -> None:
        """Check before training that at least one loss has a weight other than 0 at each step.

        `steps` is the number of training steps, and `where` names the declaration in error messages. Raises a
        ConfigurationError if all weights are 0 at a step, or if a weight is not finite.
        """
        for step in range(steps):
            if not any(term.weight_at(step / steps) for term in self.terms.values()):
                problem = Problem(f"weight of {', '.join(self.terms)}", f"0 at step {step + 1} of {steps}", "not 0")
                raise ConfigurationError(where, [problem], remedy="give a term a weight at every step")

    def check(self, student: Outputs, teacher: Outputs, labels: Any = None) -> None:
        """Compute every loss once on a batch, without gradients, to find errors before the training starts.

        `student` and `teacher` have the outputs of both models by key, and `labels` the labels of the batch. Raises a
        ConfigurationError that lists outputs that are missing or do not fit, losses that raise an error, and losses
        that are not scalars. An out-of-memory error is raised unchanged.
        """
        problems = []
        for name, term in self.terms.items():
            try:
                with torch.no_grad():
                    value = term(student, teacher, labels)
            except ConfigurationError as error:
                place = f"term {name}: {error.where}"
                problems += [Problem(f"{place}: {p.where}", p.found, p.expected) for p in error.problems]
                continue
            except (
                ArithmeticError,
                AssertionError,
                AttributeError,
                LookupError,
                RuntimeError,
                TypeError,
                ValueError,
            ) as error:  # from torch or a loss
                if is_full(error):
                    raise
                fed = ", ".join(_shown(source, student, teacher, labels) for source in term.arguments.values())
                found = f"the loss raises {type(error).__name__}: {error}".rstrip(".")
                problems.append(Problem(f"term {name}", found, f"a loss that takes {fed}"))
                continue
            if not isinstance(value, Tensor) or value.shape != ():
                shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                problems.append(Problem(f"term {name}", f"the loss returns {shape}", "a scalar tensor"))
        if problems:
            raise ConfigurationError("objective", problems)

    def forward(
        self, student: Outputs, teacher: Outputs, labels: Any, progress: float,
        shares: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """Return the weighted sum of all losses of a batch, to minimize it, and each unweighted loss by name, for logs.

        A loss with weight 0 is not computed and has no value. Waits for a GPU to check that the sum is finite.

        Args:
            student: outputs of the student by key.
            teacher: outputs of the teacher by key.
            labels: labels of the batch; None if no loss uses them.
            progress: finished share of the training, 0 to 1, which determines the weights.
            shares: factor of each loss by name, for a part of a batch whose losses add up to those of the batch.

        Raises:
            ConfigurationError: `progress` is not 0 to 1, every weight is 0, a weight is not finite, or outputs or
                labels are missing or do not fit.
            GateFailed: the weighted sum is not finite.
        """
        if not 0 <= progress <= 1:
            raise ConfigurationError("objective", [Problem("progress", repr(progress), "0 to 1")])
        values: dict[str, Tensor] = {}
        weighted: list[Tensor] = []
        for name, term in self.terms.items():
            try:
                weight = term.weight_at(progress)
                if weight != 0:
                    value = term(student, teacher, labels)
                    values[name] = value if shares is None else value * shares[name]
                    weighted.append(weight * values[name])
            except ConfigurationError as error:
                raise ConfigurationError(f"term {name}: {error.where}", error.problems, remedy=error.remedy) from None
        if not weighted:
            problem = Problem("weights", f"every weight is 0 at progress {progress}", "at least one other weight")
            raise ConfigurationError("objective", [problem])
        total = torch.stack(weighted).sum()
        values = {name: value.detach() for name, value in values.items()}
        if not torch.isfinite(total):
            bad = {name: str(value.item()) for name, value in values.items() if not torch.isfinite(value)}
            raise GateFailed(
                f"term {', '.join(bad)}" if bad else "objective",
                f"the value is {', '.join(bad.values())}" if bad else "the weighted sum overflows",
                expected="a finite value",
                remedy="lower the learning rate, and check for extreme outputs of the teacher",
            )
        return total, values


def _shown(source: str, student: Outputs, teacher: Outputs, labels: Any) -> str:
    party, _, key = source.partition(".")
    value = labels if party == "labels" else (student if party == "student" else teacher)[key]
    if isinstance(value, Tensor):
        return f"{source} {tuple(value.shape)}"
    return f"{source}, {len(value)} of them" if isinstance(value, list | tuple) else source


def _detached(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.detach()
    return [_detached(output) for output in outputs] if isinstance(outputs, list | tuple) else outputs
