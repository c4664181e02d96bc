"""Execute `head.json` in Python (`Head`), row by row, as the server computes a request transform for a single row."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import getitem
from typing import Any, NamedTuple

import numpy as np

from isthmus.features.errors import DataError, PackageError
from isthmus.features.request.kernels import Applied, function
from isthmus.features.request.onnxbytes import NUMPY
from isthmus.features.request.program import follow
from isthmus.features.types import TYPES
from isthmus.features.values.columns import Mask, Values
from isthmus.package.featurizer.form import HEAD, HeadForm, RawInput, StepGroup, read_form, value_of

Parts = Sequence[Sequence[str]]
"""Parts of a pattern: any text between parts, any one character between the pieces of a part."""


class CoreFeeds(NamedTuple):
    """The inputs of a model's numeric core for n rows: tensors (n, …) by name, and the mask of refused rows (n,)."""

    tensors: dict[str, np.ndarray[Any, Any]]
    refused: Mask


class Head:
    """Runs `head.json`, which computes the inputs of a model's numeric core from raw inputs. Thread-safe."""

    def __init__(self, form: HeadForm, where: str = HEAD) -> None:
        self.form, self._where = form, where
        self._slots: list[Any] = [None] * len(form.inputs)
        for part in form.constants:
            self._slots += [value_of(text, part.element) for text in part.values]
        steps = [(_function(group), operands) for group in form.steps for operands in group.steps]
        constants: list[Any] = []
        self._program: list[tuple[Any, ...]] = []
        for out, (apply, operands) in enumerate(steps, len(self._slots)):
            if apply is None:
                condition, yes, no = operands
                self._program.append((None, out, condition, (((), no), ((), yes))))
                continue
            call, constant = apply
            second = operands[-1] if constant is None else len(self._slots) + len(steps) + len(constants)
            constants += [] if constant is None else [constant]
            self._program.append((call, out, operands[0], second))
        self._slots += [None] * len(steps) + constants

    @classmethod
    def loads(cls, data: bytes, where: str = HEAD) -> "Head":
        """Read the content of `head.json`, the file of a package with the steps that prepare model inputs.

        `where` names the file in errors. Raises PackageError if the content is invalid or of another version.
        """
        return cls(read_form(data, where), where)

    def feeds(self, columns: Mapping[str, Values]) -> CoreFeeds:
        """Compute the inputs of the model's numeric core from the raw inputs of n rows.

        The core is the part of the model that a runtime executes after these steps. `columns` has n values for every
        raw input by name; other columns are ignored. Returns a tensor per input of the core, and a mask of the rows
        that a request transform rejects, which must not be scored. Raises a DataError if a column is missing, and a
        PackageError if a step fails, such as a division by zero in an invalid file.
        """
        if missing := [item.name for item in self.form.inputs if item.name not in columns]:
            raise DataError(self._where, f"no column {missing[0]}", expected="a column for every input")
        inputs = [_column(columns[item.name], item) for item in self.form.inputs]
        results: list[list[list[Any]]] = [[] for _ in self.form.outputs]
        refused = []
        for values in zip(*inputs, strict=True):
            slots = [*values, *self._slots[len(values) :]]
            try:
                follow(self._program, slots)
            except (ArithmeticError, IndexError) as error:
                raise PackageError(self._where, f"a step cannot be computed ({error})", expected="a head") from error
            for rows, output in zip(results, self.form.outputs, strict=True):
                rows.append([slots[slot] for slot in output.slots])
            refused.append(self.form.refused is not None and slots[self.form.refused])
        tensors = {
            output.name: np.array(rows, NUMPY[output.element]).reshape(len(refused), len(output.slots))
            for rows, output in zip(results, self.form.outputs, strict=True)
        }
        return CoreFeeds(tensors, np.array(refused, bool))


def _function(group: StepGroup) -> Applied | None:
    attribute = group.attribute
    match group.operator:
        case "Where":
            return None
        case "Gather":
            table = [value_of(text, group.element) for text in attribute]
            return (lambda place, _: getitem(table, place)), None
        case "RegexFullMatch":
            return (lambda text, _: text.isascii()) if attribute == "ascii" else matcher(attribute), None
        case "Cast" if (group.element, attribute) in (("float", "double"), ("int32", "int64")):
            return (lambda value, _: value), None
    known = function(group.operator, group.element, _attributes(group))
    assert known is not None  # noqa: S101 - a valid form has only known operators
    return known


def _attributes(group: StepGroup) -> dict[str, Any]:
    match group.operator:
        case "Cast":
            return {"to": group.attribute}
        case "Mod":
            return {"fmod": int(group.element in ("float", "double"))}
        case "StringNormalizer":
            return {"case_change_action": group.attribute.encode(), "locale": b"C"}
        case "LabelEncoder":
            keys, values, default = group.attribute
            coded = [key.encode() if group.element == "string" else int(key) for key in keys]
            return {
                f"keys_{group.element}s": coded,
                "values_int64s": [*map(int, values)],
                "default_int64": int(default),
            }
    return {}


def matcher(parts: Parts) -> Callable[[str, Any], bool]:
    """Return a function that tells if its first argument matches a LIKE pattern as a whole.

    `parts` are the pattern split at `%` (any text), each split again at `_` (any one character). The second argument of
    the function is ignored.
    """
    begin, *middle = ([*chain.from_iterable((None, *piece) for piece in pieces)][1:] for pieces in parts)
    end = middle.pop() if middle else None

    def is_at(text: str, place: int, part: Sequence[str | None]) -> bool:
        return all(letter is None or letter == text[place + n] for n, letter in enumerate(part))

    def matches(text: str, _: Any) -> bool:
        place, last = len(begin), len(text) - len(end or ())
        if place > last or not is_at(text, 0, begin) or not is_at(text, last, end or ()):
            return False
        for part in middle:
            while place + len(part) <= last and not is_at(text, place, part):
                place += 1
            place += len(part)
        return place == last if end is None else place <= last

    return matches


def _column(values: Values, item: RawInput) -> list[Any]:
    if item.role == "valid":
        return list(values.valid.tolist())
    dtype = TYPES[item.dtype]
    if item.role == "number":
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite, as in the tensor
            return list(np.where(values.valid, values.data.astype(np.float32), np.float32(np.nan)).tolist())
    null: Any = "" if dtype.numpy is None else 0
    data = np.where(values.valid, values.data, null).tolist()
    return [bool(value) for value in data] if dtype.tensor == "bool" else list(data)
