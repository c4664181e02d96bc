"""The interface of a teacher: it computes outputs for batches, deterministically, and is never trained."""

import copy
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.features.errors import ConfigurationError, DataError, Problem

BY_CLASS = ("logits", "probabilities")
"""Outputs whose last dimension is the classes."""

ANSWERED = "answered"
"""Output of a teacher that may abstain: 1 for a row that it answers, else 0."""

LEAST = np.finfo(np.float32).tiny
"""Probability to use for an impossible class, so that its logarithm is finite."""

ReadOutputs = Callable[[Any], Mapping[str, Any]]
"""Returns the outputs of a teacher for a batch as arrays, float32 (rows, ...), by key."""

_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


class Teacher(ABC):
    """A frozen model that computes outputs for batches, from which a student learns.

    It is not a `torch.nn.Module`: a student that has it as an attribute does not include its parameters, and no
    optimizer trains them.

    Args:
        name: name for messages.
        keys: outputs to use, at least one.
        labels: class names in the order of the teacher's logits; None if unknown.
        version: text that changes the fingerprint; change it when outputs change in a way that the fingerprint misses.

    Raises:
        ConfigurationError: keys are not valid names, or keys or labels are not unique.
    """

    costly = False
    """True if a call may cost money or much time: calls are announced, and only made if they are needed."""
    shareable = False
    """True if each of several processes may compute a share of the outputs, because nothing is fitted first."""

    def __init__(
        self, name: str, keys: Sequence[str], *, labels: Sequence[str] | None = None, version: str = ""
    ) -> None:
        self.name, self.keys, self.version = name, tuple(keys), version
        self.labels = None if labels is None else tuple(labels)
        self._order: tuple[int, ...] | None = None
        problems = [] if self.keys else [Problem("keys", "none", "at least one")]
        problems += [
            Problem("keys", repr(key), "a letter, then letters, digits, _, . and -")
            for key in self.keys
            if not _KEY.fullmatch(key)
        ]
        for place, names in (("keys", self.keys), ("labels", self.labels or ())):
            twice = sorted({item for item in names if names.count(item) > 1})
            problems += [Problem(place, f"{item!r} twice", "each once") for item in twice]
        if problems:
            raise ConfigurationError(self.where, problems)

    @property
    def runtime(self) -> str:
        """Name of the library that computes the teacher's outputs, for reports; "Python" by default."""
        return "Python"

    @property
    def where(self) -> str:
        return f"teacher {self.name}"

    def ask(self, batch: Any, *, rows: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Compute and check the teacher's outputs for a batch: float32 (rows, ...) by key, without gradients.

        The outputs are on the teacher's device. `batch` has the form that the kind of teacher takes. `rows` has the
        batch's row numbers, only for error messages; by default the positions in the batch.

        Raises:
            ConfigurationError: the teacher is in training mode or was changed, or lacks an output in `keys`.
            DataError: an output is not finite, or has the wrong number of rows.
            DependencyError: the function of a `FunctionTeacher` fails.
        """
        self.hold()
        with torch.inference_mode():
            outputs = self._answer(batch)
        self._require_outputs(sorted(outputs))
        # Copy outside of inference mode, so that a loss may save these tensors for its gradient.
        answers = {key: tensor(outputs[key], self.where, key).to(torch.float32, copy=True) for key in self.keys}
        if self._order is not None:
            answers = {key: self._ordered(key, t) if key in BY_CLASS else t for key, t in answers.items()}
        self._refuse_unusable(answers, count(batch), rows)
        return answers

    def fingerprint(self) -> str:
        """Return a SHA-256 that changes when the teacher's outputs may change, to identify cached outputs.

        Each call reads all weights. Covers the versions of the libraries that compute, but not device and batch size,
        which change only the last bits of an output.
        """
        form = {"keys": self.keys, "order": self._order, "version": self.version, "is": self._identity()}
        return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()

    def parameters(self) -> Iterator[Tensor]:
        """Yield the teacher's weights, for example to check that training leaves them unchanged.

        Yield nothing if the teacher has no known weights. Raise a ConfigurationError if it is in training mode,
        requires a gradient, or was changed.
        """
        self.hold()
        yield from self._weights()

    def size(self) -> tuple[int, int] | None:
        """Return the teacher's number of parameters and their bytes, for reports; None if it has no known weights."""
        weights = list(self._weights())
        return (sum(t.numel() for t in weights), sum(t.nbytes for t in weights)) if weights else None

    @property
    def parts(self) -> "Sequence[Teacher | None]":
        """Teachers from whose outputs this teacher computes its own; each is cached alone, unless it is None."""
        return ()

    def reading(self, parts: "Sequence[ReadOutputs | None]") -> "Teacher":  # noqa: ARG002 - for subclasses
        """Return a copy of the teacher that reads the outputs of its `parts`, and asks those without a reader."""
        return self

    def hold(self) -> None:
        """Check that the teacher is still frozen, before its outputs or weights are used.

        Raise a ConfigurationError if it is in training mode, requires a gradient, or was changed since it was created.
        """
        problems, remedy = self._thawed()
        if problems:
            raise ConfigurationError(self.where, problems, remedy=remedy)

    def relabelled(self, labels: Sequence[str]) -> "Teacher":
        """Return a copy of the teacher whose "logits" and "probabilities" have the classes in the order of `labels`.

        `labels` are the student's class names. Return the teacher itself if its classes already have this order. Raise
        a ConfigurationError if the teacher's class names are unknown, or are not the same names as in `labels`.
        """
        if self.labels is None:
            raise ConfigurationError(self.where, [Problem("labels", "unknown", "labels= passed to the teacher")])
        if problem := misfit(self.labels, labels):
            raise ConfigurationError(self.where, [problem])
        if tuple(labels) == self.labels:
            return self
        places = [self.labels.index(label) for label in labels]
        teacher = copy.copy(self)
        teacher.labels = tuple(labels)
        teacher._order = tuple(places if self._order is None else (self._order[place] for place in places))
        return teacher

    @abstractmethod
    def _answer(self, batch: Any) -> Mapping[str, Any]:
        """Return outputs by key; called in inference mode."""

    @abstractmethod
    def _identity(self) -> Any:
        """Return plain data that determines the outputs."""

    def _thawed(self) -> tuple[list[Problem], str]:
        """Return a problem for each part that is not frozen, and the remedy."""
        return [], ""

    def _weights(self) -> Iterator[Tensor]:
        yield from ()

    def _require_outputs(self, outputs: Sequence[str]) -> None:
        shown = ", ".join(outputs) or "nothing"
        absent = [Problem(f"output {key}", f"it gives {shown}", key) for key in self.keys if key not in outputs]
        if absent:
            raise ConfigurationError(self.where, absent)

    def _ordered(self, key: str, answer: Tensor) -> Tensor:
        order = list(self._order or ())
        if answer.ndim < 2 or answer.shape[-1] != len(order):
            expected = f"(rows, ..., {len(order)}), as many as labels"
            raise ConfigurationError(self.where, [Problem(f"output {key}", f"shape {tuple(answer.shape)}", expected)])
        return answer[..., order]

    def _refuse_unusable(self, answers: Mapping[str, Tensor], wanted: int | None, rows: Sequence[int] | None) -> None:
        for key, answer in answers.items():
            if answer.ndim == 0 or len(answer) != (len(answer) if wanted is None else wanted):
                expected = f"a row for each of the batch's{'' if wanted is None else f' {wanted}'}"
                raise DataError(f"{self.where}, output {key}", f"shape {tuple(answer.shape)}", expected=expected)
            wanted = len(answer)
        bad: list[tuple[int, str, float]] = []
        for key, answer in answers.items():
            finite = torch.isfinite(answer)
            if not finite.all():
                place = (~finite).nonzero()[0]
                bad.append((int(place[0]), key, float(answer[tuple(place)])))
        if bad:
            row, key, value = min(bad, key=lambda item: item[0])
            name = f"row {rows[row]}" if rows is not None else f"row {row} of the batch"
            remedy = "check this row's inputs, and whether the teacher overflows in half precision"
            where = f"{self.where}, output {key}"
            silent = answers[key].isnan().flatten(1).all(1) if answers[key].ndim > 1 else answers[key].isnan()
            if silent[row]:
                name = f"{int(silent.sum())} of the batch's {len(silent)} rows have no output: {name}"
                remedy = _ABSTAINS.format(key=key)
            raise DataError(where, f"{name} is {value}", expected="finite values", remedy=remedy)


_ABSTAINS = (
    'if the teacher abstains on these rows, return {{"{key}": numpy.nan_to_num(answers), "answered": '
    'numpy.isfinite(answers).all(-1)}} with keys=("{key}", "answered"), and mask the term: pass '
    'mask="teacher.answered" to its loss, which uses mask.bool(); these rows are then learned from labels alone'
)


def misfit(labels: Sequence[str], expected: Sequence[str]) -> Problem | None:
    if sorted(labels) == sorted(expected):
        return None
    more, less = sorted(set(labels) - set(expected)), sorted(set(expected) - set(labels))
    parts = [
        f"{word} {', '.join(map(repr, names[:8]))}{' …' if len(names) > 8 else ''}"
        for word, names in (("without", less), ("with", more))
        if names
    ]
    difference = f"{len(labels)} labels {' and '.join(parts)}" if parts else f"{len(labels)} labels"
    shown = ", ".join(map(repr, expected[:8])) + (" …" if len(expected) > 8 else "")
    return Problem("labels", difference, f"the student's {len(expected)}: {shown}")


def tensor(value: Any, where: str, key: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.from_numpy(np.ascontiguousarray(value))
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise ConfigurationError(where, [Problem(f"output {key}", f"a {kind}: {error}", "an array")]) from None


def by_key(outputs: Any, keys: Sequence[str], where: str) -> Mapping[str, Any]:
    """Return the outputs of a student or a network by key, whatever its `forward` returns.

    A mapping is returned unchanged. A tuple or a single output gets `keys`, in order. `where` names the network in the
    error. Raise a ConfigurationError if the number of outputs differs from the number of keys.
    """
    if isinstance(outputs, Mapping):
        return outputs
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    if len(values) != len(keys):
        found = f"{len(values)} output{'s' if len(values) != 1 else ''} without names"
        raise ConfigurationError(where, [Problem("outputs", found, f"one for each of {', '.join(keys)}, or a mapping")])
    return dict(zip(keys, values, strict=True))


def count(batch: Any) -> int | None:
    if isinstance(batch, Mapping | tuple):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        counts = {number for part in parts if (number := count(part)) is not None}
        return counts.pop() if len(counts) == 1 else None
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(batch) if isinstance(batch, list) else None
