"""The format of `head.json`: steps from raw inputs to the inputs of a numeric core. Reading it validates everything."""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Literal

import msgspec

from isthmus.features.errors import PackageError
from isthmus.features.types import INPUTS, TYPES

HEAD = "head.json"
VERSION = 1
LARGEST = 1 << 24
"""Maximum bytes of a file."""
MOST = 1 << 20
"""Maximum number of slots."""

REALS, WHOLES = ("float", "double"), ("int32", "int64")
NUMBERS = (*REALS, *WHOLES)
ELEMENTS = (*NUMBERS, "bool", "string")

_OPERATORS: dict[tuple[str, ...], tuple[int, tuple[str, ...]]] = {
    ("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"): (2, NUMBERS),
    ("Abs", "Neg"): (1, NUMBERS),
    ("Floor", "Ceil", "Round", "Sqrt", "Sign", "IsNaN", "IsInf"): (1, REALS),
    ("BitwiseAnd", "BitwiseOr", "BitwiseXor"): (2, WHOLES),
    ("BitwiseNot",): (1, WHOLES),
    ("And", "Or"): (2, ("bool",)),
    ("Not",): (1, ("bool",)),
    ("Equal",): (2, ELEMENTS),
    ("StringConcat",): (2, ("string",)),
    ("StringNormalizer", "RegexFullMatch"): (1, ("string",)),
    ("LabelEncoder",): (1, ("string", "int64")),
    ("Gather",): (1, ELEMENTS),
    ("Cast",): (1, (*NUMBERS, "bool")),
    ("Where",): (3, (*NUMBERS, "string")),
}
OPERATORS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    name: operator for names, operator in _OPERATORS.items() for name in names
}
"""Number of operands and accepted element types of each operator."""
CASTS: Mapping[str, tuple[str, ...]] = {
    "bool": NUMBERS, "int32": (*REALS, "int64", "string"), "int64": (*REALS, "int32", "string"),
    "float": ("double", *WHOLES), "double": ("float", *WHOLES),
}  # fmt: skip
"""Element types that can be cast to each element type."""
_PREDICATES = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "IsNaN", "IsInf", "RegexFullMatch")

_DIGITS = frozenset("0123456789abcdef")

Role = Literal["number", "text", "value", "valid"]


class RawInput(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A raw input of a model in `head.json`, and the form in which it fills a slot (a numbered value).

    `dtype` is Feast's name of the value's type. `role` is "number" for a float, with NaN for null; "text" with "" for
    null; "value" for the value in its own type, with zero, false or "" for null; "valid" for true if the value is not
    null.
    """

    name: str
    dtype: str
    role: Role

    @property
    def element(self) -> str:
        return {"number": "float", "text": "string", "valid": "bool"}.get(self.role, TYPES[self.dtype].tensor)


class Constants(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Constants in `head.json`: slots (numbered values) that are the same for every row, as text of an element type."""

    element: str
    values: tuple[str, ...]


class StepGroup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Steps in `head.json` of one operator, on operands of one element type.

    `slots` has the operands of each step, step after step, as numbers of earlier values. Each step fills the next slot.
    `attribute` depends on the operator. "Cast": element type of the result. "LabelEncoder": keys, values, and the value
    for unknown keys. "Gather": values. "StringNormalizer": "LOWER" or "UPPER". "RegexFullMatch": "ascii", or parts of a
    text with any text between them, each a list of pieces with any one character between them.
    """

    operator: str
    element: str
    slots: tuple[int, ...]
    attribute: Any = None

    @property
    def output(self) -> str:
        if self.operator in _PREDICATES:
            return "bool"
        output: str = {"Cast": self.attribute, "LabelEncoder": "int64"}.get(self.operator, self.element)
        return output

    @property
    def operands(self) -> tuple[str, ...]:
        if self.operator == "Where":
            return ("bool", self.element, self.element)
        return ("int64",) if self.operator == "Gather" else (self.element,) * OPERATORS[self.operator][0]

    @property
    def steps(self) -> Iterator[tuple[int, ...]]:
        return zip(*[iter(self.slots)] * len(self.operands), strict=True)


class Output(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An output tensor of `head.json`, of shape (N, slots)."""

    name: str
    element: str
    slots: tuple[int, ...]


class HeadForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `head.json`. Slots (values of a row) are numbered through inputs, constants and steps, in this order.

    A row is refused if the slot `refused` is true; None if every row is accepted.
    """

    version: int
    inputs: tuple[RawInput, ...]
    constants: tuple[Constants, ...]
    steps: tuple[StepGroup, ...]
    outputs: tuple[Output, ...]
    refused: int | None


class _Version(msgspec.Struct):
    version: int


def text_of(value: Any, element: str) -> str:
    if element in REALS:
        return struct.pack(f">{element[0]}", value).hex()
    return str(value) if element == "string" else str(int(value))


def value_of(text: str, element: str) -> Any:
    if element == "string":
        return text
    if element in REALS:
        value = struct.unpack(f">{element[0]}", bytes.fromhex(text) if _DIGITS.issuperset(text) else b"")[0]
    else:
        value = int(text)
        bits = {"bool": 1, "int32": 31, "int64": 63}[element]
        if text != str(value) or not (0 if element == "bool" else -(1 << bits)) <= value < 1 << bits:
            raise ValueError(f"{text!r} is not a valid {element}")
        value = bool(value) if element == "bool" else value
    return value


def read_form(data: bytes, where: str = HEAD) -> HeadForm:
    if len(data) > LARGEST:
        raise PackageError(where, f"{len(data):,} bytes", expected=f"at most {LARGEST:,}")
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != VERSION:
            remedy = "use the release of Isthmus that wrote the package, or export the model again"
            raise PackageError(where, f"version {version}", expected=str(VERSION), remedy=remedy)
        form = msgspec.json.decode(data, type=HeadForm)
    except (ValueError, RecursionError) as error:
        raise PackageError(where, str(error), expected="a head") from error
    _require_sound(form, where)
    return form


def _require_sound(form: HeadForm, where: str) -> None:
    types: list[str] = []

    def require(holds: bool, problem: str, expected: str) -> None:
        if not holds:
            raise PackageError(where, problem, expected=expected)

    def require_slots(slots: Sequence[int], elements: Iterable[str], subject: str) -> None:
        for slot, element in zip(slots, elements, strict=True):
            require(0 <= slot < len(types), f"{subject} reads slot {slot} of {len(types):,}", "a slot that has a value")
            require(types[slot] == element, f"{subject} reads slot {slot}, which holds {types[slot]}", element)

    for item in form.inputs:
        is_text = {"number": False, "text": True}.get(item.role, item.dtype == "String")
        usable = TYPES.get(item.dtype) in INPUTS and is_text == (item.dtype == "String")
        require(usable, f"input {item.name} is a {item.role} of {item.dtype}", "a type that models read in this role")
        types.append(item.element)
    for part in form.constants:
        require(_are_values(part.values, part.element), f"constants that are not {part.element}", "values of a type")
        types += [part.element] * len(part.values)
    for group in form.steps:
        subject = f"{group.operator} of {group.element}"
        arity, elements = OPERATORS.get(group.operator, (0, ()))
        require(group.element in elements, subject, "an operator and a type of this version")
        require(_fits(group), f"{subject} with {str(group.attribute)[:60]}", "the attribute of this operator")
        require(len(group.slots) % arity == 0, f"{len(group.slots)} operands of {subject}", f"{arity} per step")
        require(len(types) + len(group.slots) // arity <= MOST, f"more than {MOST:,} slots", "fewer")
        for operands in group.steps:
            require_slots(operands, group.operands, subject)
            types.append(group.output)
    for output in form.outputs:
        require_slots(output.slots, repeat(output.element, len(output.slots)), f"output {output.name}")
    names = [output.name for output in form.outputs]
    require(len({*names}) == len(names), f"outputs {', '.join(names)}", "names that differ")
    if form.refused is not None:
        require_slots([form.refused], ["bool"], "refused")


def _are_values(texts: Any, element: str) -> bool:
    if element not in ELEMENTS or not isinstance(texts, list | tuple):
        return False
    try:
        return all(isinstance(text, str) and value_of(text, element) is not None for text in texts)
    except (ValueError, struct.error):
        return False


def _fits(group: StepGroup) -> bool:
    attribute = group.attribute
    match group.operator:
        case "Cast":
            return attribute in CASTS[group.element]
        case "StringNormalizer":
            return attribute in ("LOWER", "UPPER")
        case "Gather":
            return _are_values(attribute, group.element)
        case "LabelEncoder":
            match attribute:
                case [keys, [*values], default]:
                    are_values = _are_values(keys, group.element) and _are_values([*values, default], "int64")
                    return are_values and len(keys) == len(values)
            return False
        case "RegexFullMatch":
            parts = attribute if isinstance(attribute, list) else []
            return attribute == "ascii" or bool(parts and all(part and _are_values(part, "string") for part in parts))
    return attribute is None
