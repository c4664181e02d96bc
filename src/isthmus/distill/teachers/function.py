"""Teachers that are functions of batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.teachers.teacher import BY_CLASS, LEAST, Teacher, by_key
from isthmus.features.definition import codehash
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, IsthmusError, Problem, one_of


class FunctionTeacher(Teacher):
    """A teacher that is a function from a batch to its outputs.

    The function returns a mapping of outputs, a tuple with an output per key, or a single output.

    Its fingerprint covers its code and everything that the code refers to: helpers, constants, and arrays, networks and
    estimators in its closure. A remote model, or state that cannot be read, needs a `version`, which then replaces
    everything except the code. If the function returns names of its `labels` instead of numbers, each becomes logits or
    probabilities with all mass on that class. Arguments are as in `Teacher`; the default name is the function's.

    An exception of the function becomes a DependencyError; outputs up to then stay cached.
    """

    costly = True

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
        except Exception as error:  # from a service or the user's code
            raise DependencyError(
                self.where,
                f"a call raised {type(error).__name__}: {error}",
                remedy="run the same command again: outputs so far are cached, and only missing rows are computed",
            ) from error
        return {key: self._numbers(key, value) for key, value in by_key(answers, self.keys, self.where).items()}

    def _numbers(self, key: str, answer: Any) -> Any:
        first = answer[0] if isinstance(answer, list | tuple | np.ndarray) and len(answer) else None
        if not isinstance(first, str):
            return answer
        names = np.asarray(answer)
        if key not in BY_CLASS or self.labels is None:
            found = f"names of classes, such as {str(first)!r}"
            remedy = 'to return class names, use FunctionTeacher(..., ("logits",), labels=CLASSES)'
            raise ConfigurationError(self.where, [Problem(f"output {key}", found, "numbers", remedy)])
        places = {label: place for place, label in enumerate(self.labels)}
        if unknown := [name for name in names.tolist() if name not in places]:
            found = f"{len(unknown)} of the batch's {len(names)} rows have an unknown class: {unknown[0]!r}"
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
