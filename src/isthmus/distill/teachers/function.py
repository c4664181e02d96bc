"""Functions of batches as teachers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.teachers.teacher import Teacher, named
from isthmus.features.definition import codehash


class FunctionTeacher(Teacher):
    """Anything that maps a batch to a mapping of outputs, a tuple with an output for each key, or a single output.

    Its fingerprint covers its code and what that refers to: helpers, constants, and the arrays, networks and estimators
    of its closure. A remote model, or state that cannot be read, needs a `version`, which replaces all but the code.
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
        return named(self.function(batch), self.keys, self.where)

    def _identity(self) -> Any:
        if not self.version:
            return ["function", fingerprint(self.function)]
        try:
            return ["function", codehash.digest(self.function)]
        except (OSError, SyntaxError):
            return ["function"]
