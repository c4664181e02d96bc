"""What every teacher is: something that answers batches, always the same way, and never learns."""

import copy
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.features.errors import ConfigurationError, DataError, Problem

BY_CLASS = ("logits", "probabilities")
"""Outputs whose last size is the classes."""

_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


class Teacher(ABC):
    """Something that answers batches.

    It is no `torch.nn.Module`: inside a student it is no submodule, and no optimizer finds its parameters there.

    Args:
        name: of it, for messages.
        keys: the outputs that are asked for, at least one.
        labels: what its classes are called, in the order of its logits; None where nobody has said.
        version: changes the fingerprint where it cannot see a change by itself.

    Raises:
        ConfigurationError: keys or labels are no names, or not unique.
    """

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
            twice = sorted({given for given in names if names.count(given) > 1})
            problems += [Problem(place, f"{given!r} twice", "each once") for given in twice]
        if problems:
            raise ConfigurationError(self.where, problems)

    @property
    def runtime(self) -> str:
        """What computes its answers, for reports."""
        return "Python"

    @property
    def where(self) -> str:
        """The teacher, for messages."""
        return f"teacher {self.name}"

    def ask(self, batch: Any, *, rows: Sequence[int] | None = None) -> dict[str, Tensor]:
        """What it says of a batch: float32 (rows, ...) by key, where the teacher computes, without gradients.

        Args:
            batch: whatever this teacher takes; a network's tensors are moved to where the network is.
            rows: how the batch's rows are called in messages; by default by their place in the batch.

        Raises:
            ConfigurationError: it is not frozen any more, or does not give an output that is asked for.
            DataError: an output is not finite, or has not a row for each of the batch's.
        """
        self.hold()
        with torch.inference_mode():
            given = self._answer(batch)
        shown = ", ".join(sorted(given)) or "nothing"
        absent = [Problem(f"output {key}", f"it gives {shown}", key) for key in self.keys if key not in given]
        if absent:
            raise ConfigurationError(self.where, absent)
        # Copied outside of inference mode: a loss may keep what it is given for its gradient.
        answers = {key: tensor(given[key], self.where, key).to(torch.float32, copy=True) for key in self.keys}
        if self._order is not None:
            answers = {key: self._ordered(key, t) if key in BY_CLASS else t for key, t in answers.items()}
        self._refuse_unusable(answers, count(batch), rows)
        return answers

    def fingerprint(self) -> str:
        """SHA-256 that changes when the answers may: reads all weights, every time it is called.

        It covers the versions of the libraries that compute, and not the device, nor how many rows are asked at once:
        these change the last bits of an answer.
        """
        form = {"keys": self.keys, "order": self._order, "version": self.version, "is": self._identity()}
        return hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()

    def parameters(self) -> Iterator[Tensor]:
        """Its weights, none of which wants a gradient.

        Raises:
            ConfigurationError: one does.
        """
        self.hold()
        yield from self._weights()

    def size(self) -> tuple[int, int] | None:
        """Its parameters, and how many bytes they are; None where they cannot be counted."""
        weights = list(self._weights())
        return (sum(t.numel() for t in weights), sum(t.nbytes for t in weights)) if weights else None

    def hold(self) -> None:
        """Refuses to go on if somebody has made it learn.

        Raises:
            ConfigurationError: with what is not frozen.
        """
        problems, remedy = self._thawed()
        if problems:
            raise ConfigurationError(self.where, problems, remedy=remedy)

    def relabelled(self, labels: Sequence[str]) -> "Teacher":
        """The same teacher with its classes in another order.

        Raises:
            ConfigurationError: these are not its labels, or nobody has said what its labels are.
        """
        if self.labels is None:
            raise ConfigurationError(self.where, [Problem("labels", "none are known", "labels= of the teacher")])
        if problem := misfit(self.labels, labels):
            raise ConfigurationError(self.where, [problem])
        if tuple(labels) == self.labels:
            return self
        places = [self.labels.index(label) for label in labels]
        other = copy.copy(self)
        other.labels = tuple(labels)
        other._order = tuple(places if self._order is None else (self._order[place] for place in places))
        return other

    @abstractmethod
    def _answer(self, batch: Any) -> Mapping[str, Any]:
        """Outputs by key, in inference mode."""

    @abstractmethod
    def _identity(self) -> Any:
        """What the answers depend on, as plain data."""

    def _thawed(self) -> tuple[list[Problem], str]:
        """What is not frozen, and the remedy."""
        return [], ""

    def _weights(self) -> Iterator[Tensor]:
        yield from ()

    def _ordered(self, key: str, answer: Tensor) -> Tensor:
        order = list(self._order or ())
        if answer.ndim < 2 or answer.shape[-1] != len(order):
            expected = f"(rows, ..., {len(order)}), one for each label"
            raise ConfigurationError(self.where, [Problem(f"output {key}", f"shape {tuple(answer.shape)}", expected)])
        return answer[..., order]

    def _refuse_unusable(self, answers: Mapping[str, Tensor], expected: int | None, rows: Sequence[int] | None) -> None:
        wanted = expected
        for key, answer in answers.items():
            if answer.ndim == 0 or len(answer) != (len(answer) if wanted is None else wanted):
                raise DataError(
                    f"{self.where}, output {key}",
                    f"shape {tuple(answer.shape)}",
                    expected=f"a row for each of the batch's{'' if wanted is None else f' {wanted}'}",
                )
            wanted = len(answer)
        first: tuple[int, str, float] | None = None
        for key, answer in answers.items():
            finite = torch.isfinite(answer)
            if not finite.all():
                row = int((~finite).flatten(1).any(1).nonzero()[0] if answer.ndim > 1 else (~finite).nonzero()[0])
                value = float(answer[row][~finite[row]].flatten()[0])
                if first is None or row < first[0]:
                    first = row, key, value
        if first is not None:
            row, key, value = first
            name = f"row {rows[row]}" if rows is not None else f"row {row} of the batch"
            raise DataError(
                f"{self.where}, output {key}",
                f"{name} is {value}",
                expected="finite values",
                remedy="look at this row's inputs, and whether the teacher overflows in half precision",
            )


def misfit(found: Sequence[str], expected: Sequence[str]) -> Problem | None:
    """What is wrong with labels that must be the expected ones, in any order."""
    if sorted(found) == sorted(expected):
        return None
    more, less = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    parts = [
        f"{word} {', '.join(map(repr, names[:8]))}{' …' if len(names) > 8 else ''}"
        for word, names in (("without", less), ("with", more))
        if names
    ]
    said = f"{len(found)} labels {' and '.join(parts)}" if parts else f"{len(found)} labels"
    shown = ", ".join(map(repr, expected[:8])) + (" …" if len(expected) > 8 else "")
    return Problem("labels", said, f"the student's {len(expected)}: {shown}")


def tensor(value: Any, where: str, key: str) -> Tensor:
    """An output as a tensor.

    Raises:
        ConfigurationError: it is no array of numbers.
    """
    if isinstance(value, Tensor):
        return value
    try:
        return torch.from_numpy(np.ascontiguousarray(value))
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise ConfigurationError(where, [Problem(f"output {key}", f"a {kind}: {error}", "an array")]) from None


def named(given: Any, keys: Sequence[str], where: str) -> Mapping[str, Any]:
    """Outputs by key: those of a mapping as they are, a single one or a tuple by the keys that are asked for.

    Raises:
        ConfigurationError: there are not as many outputs as keys.
    """
    if isinstance(given, Mapping):
        return given
    outputs = given if isinstance(given, tuple) else (given,)
    if len(outputs) != len(keys):
        found = f"{len(outputs)} output{'s' if len(outputs) != 1 else ''} without names"
        raise ConfigurationError(where, [Problem("outputs", found, f"one for each of {', '.join(keys)}, or a mapping")])
    return dict(zip(keys, outputs, strict=True))


def count(batch: Any) -> int | None:
    """How many rows a batch has; None where it does not say, or its parts do not agree."""
    if isinstance(batch, Mapping | tuple):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        counts = {number for part in parts if (number := count(part)) is not None}
        return counts.pop() if len(counts) == 1 else None
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(batch) if isinstance(batch, list) else None
