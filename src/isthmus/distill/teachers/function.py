"""Functions of batches as teachers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.teachers.teacher import BY_CLASS, LEAST, Teacher, named
from isthmus.features.definition import codehash
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, IsthmusError, Problem, one_of


class FunctionTeacher(Teacher):
    """Anything that maps a batch to a mapping of outputs, a tuple with an output for each key, or a single output.

    Its fingerprint covers its code and what that refers to: helpers, constants, and the arrays, networks and estimators
    of its closure. A remote model, or state that cannot be read, needs a `version`, which replaces all but the code.
    Names of its `labels`, instead of numbers, become the logits or probabilities of just these classes.
    The arguments are those of `Teacher`; its name is by default that of the function.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        keys: Sequence[str] = ("logits",),
        *,
        labels: Sequence[str] | None = None,
        version: str = "",
        name: str | None = None,
    ) -> None:
        super().__init__(name or codehash.location(function), keys, labels=labels, version=version)
        self.function = function

    def _answer(self, batch: Any) -> Mapping[str, Any]:
        try:
            answers = self.function(batch)
        except IsthmusError:
            raise
        except Exception as error:  # of a service, or of code that is not ours
            raise DependencyError(
                self.where,
                f"a call ended with {type(error).__name__}: {error}",
                remedy="run the same command again: what was answered is kept, and only the rest is asked",
            ) from error
        return {key: self._numbers(key, value) for key, value in named(answers, self.keys, self.where).items()}

    def _numbers(self, key: str, answer: Any) -> Any:
        """Return the answer as numbers: a class name becomes logits or probabilities of that class alone."""
        first = answer[0] if isinstance(answer, list | tuple | np.ndarray) and len(answer) else None
        if not isinstance(first, str):
            return answer
        names = np.asarray(answer)
        if key not in BY_CLASS or self.labels is None:
            found = f"names of classes, such as {str(first)!r}"
            remedy = 'for names of classes write FunctionTeacher(..., ("logits",), labels=CLASSES)'
            raise ConfigurationError(self.where, [Problem(f"output {key}", found, "numbers", remedy)])
        places = {label: place for place, label in enumerate(self.labels)}
        if unknown := [name for name in names.tolist() if name not in places]:
            found = f"{len(unknown)} of the batch's {len(names)} rows have another class: {unknown[0]!r}"
            raise DataError(f"{self.where}, output {key}", found, expected=one_of(self.labels))
        chosen = np.eye(len(places))[[places[name] for name in names.tolist()]]
        return np.log(np.maximum(chosen, LEAST)) if key == "logits" else chosen

    def _identity(self) -> Any:
        if not self.version:
            return ["function", fingerprint(self.function)]
        try:
            return ["function", codehash.digest(self.function)]
        except (OSError, SyntaxError):
            return ["function"]
