"""Create `head.json` from the nodes of an ONNX graph (`build_head`), whose input tensors are `GraphInput`s."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from isthmus.features.request.onnxbytes import UnreadableGraph, read
from isthmus.features.request.program import INEXACT, Operation, ProgramBuilder, Session, SlotArray
from isthmus.package.featurizer.form import CASTS, LARGEST, OPERATORS, VERSION, RawInput, text_of

_ASCII = r"[\x00-\x7f]*"
_PIECES = re.compile(r"(?s)\\([^\w\s])|(\.\*)|(\.)|([^\\.+*?()|\[\]{}^$])")


class GraphInput(NamedTuple):
    """An input tensor of an ONNX graph. Its shape is (N, slots) if `rows` is true, else (slots, N)."""

    tensor: str
    element: str
    slots: Sequence[RawInput]
    rows: bool = False


def build_head(
    graph: bytes, sources: Sequence[GraphInput], outputs: Mapping[str, str], refused: str | None, session: Session
) -> bytes:
    """Convert an ONNX graph that prepares model inputs to the content of `head.json`, which other languages can run.

    `sources` are the input tensors of the graph, and `outputs` has the element type of each output tensor. `refused`
    names the tensor that is true for rows that must not be scored, None if the graph has no such rows. `session` opens
    a model in a runtime, which computes the constants of the graph. Raises UnreadableGraph if an operator is unknown or
    may give other bits in another language, or if the result is larger than 16 MiB.
    """
    steps = ProgramBuilder(session)
    form = _Form(steps)
    parts: dict[str, SlotArray] = {}
    for source in sources:
        shape = (1, len(source.slots)) if source.rows else (len(source.slots), 1)
        parts[source.tensor] = steps.open(source.element, *shape)
        form.inputs |= dict(zip(parts[source.tensor].listed(), source.slots, strict=True))
    nodes, constants = read(graph)
    parts = steps.add(nodes, constants, parts)
    results = {name: parts[name].listed() for name in outputs}
    masks = parts[refused].listed() if refused else []
    form.add([slot for slots in (*results.values(), masks) for slot in slots])
    return form.dumps({name: (outputs[name], slots) for name, slots in results.items()}, *masks)


_Place = tuple[str, Any]
"""A slot that has no number yet: its kind, and which one it is."""


class _Form:
    def __init__(self, steps: ProgramBuilder) -> None:
        self.inputs: dict[int, RawInput] = {}
        self._steps = steps
        self._places: dict[tuple[int, str], _Place] = {}
        self._elements: dict[int, str] = {}
        self._used: dict[int, RawInput] = {}
        self._constants: dict[str, dict[str, None]] = {}
        self._groups: list[tuple[tuple[str, str, Any], list[_Place]]] = []
        self._count = 0

    def add(self, goals: Sequence[int]) -> None:
        for operation, operands, out in self._steps.steps_for(goals):
            elements = _operands(operation)
            places = [self._read(slot, element) for slot, element in zip(operands, elements, strict=True)]
            self._places[out, operation.output] = self._step(operation, _attribute(operation), places)
            self._elements[out] = operation.output

    def _step(self, operation: Operation, attribute: Any, operands: Sequence[_Place]) -> _Place:
        key = operation.name, operation.element, attribute
        if not self._groups or self._groups[-1][0] != key:
            self._groups.append((key, []))
        self._groups[-1][1].extend(operands)
        self._count += 1
        return "step", self._count - 1

    def _read(self, slot: int, element: str) -> _Place:
        """Return the place of a slot. Add a cast if the slot holds another type, which Python may not distinguish."""
        if (place := self._places.get((slot, element))) is None:
            if (item := self.inputs.get(slot)) is not None:
                self._used[slot] = item
                place, own = ("input", slot), item.element
            elif slot in self._elements:
                own = self._elements[slot]
                place = self._places[slot, own]
            else:
                own, text = element, text_of(self._steps.fixed_value(slot), element)
                self._constants.setdefault(element, {})[text] = None
                place = ("constant", (element, text))
            if own != element:
                place = self._step(Operation("Cast", own, {"to": element}), element, [place])
            self._places[slot, element] = place
        return place

    def dumps(self, outputs: Mapping[str, tuple[str, Sequence[int]]], refused: int | None = None) -> bytes:
        # Reading may add casts and constants, so read before numbering.
        places = [(name, element, [self._read(slot, element) for slot in slots])
                  for name, (element, slots) in outputs.items()]  # fmt: skip
        mask = None if refused is None else self._read(refused, "bool")
        inputs = sorted(self._used)
        numbers: dict[_Place, int] = {("input", slot): number for number, slot in enumerate(inputs)}
        for element, texts in self._constants.items():
            numbers |= {("constant", (element, text)): len(numbers) + n for n, text in enumerate(texts)}
        numbers |= {("step", number): len(numbers) + number for number in range(self._count)}
        form = {
            "version": VERSION,
            "inputs": [self._used[slot] for slot in inputs],
            "constants": [[element, [*texts]] for element, texts in self._constants.items()],
            "steps": [
                [name, element, [numbers[place] for place in operands], *([] if attribute is None else [attribute])]
                for (name, element, attribute), operands in self._groups
            ],
            "outputs": [[name, element, [numbers[place] for place in slots]] for name, element, slots in places],
            "refused": None if mask in (None, ("constant", ("bool", "0"))) else numbers[mask],
        }
        data = msgspec.json.encode(form) + b"\n"
        if len(data) > LARGEST:
            raise UnreadableGraph(f"vocabularies of {len(data):,} bytes")
        return data


def _operands(operation: Operation) -> tuple[str, ...]:
    name, element = operation.name, operation.element
    if name in INEXACT:
        raise UnreadableGraph(f"{name}, whose last bit no standard defines")
    arity, elements = OPERATORS.get(name, (0, ()))
    if element not in elements or (name == "Cast" and operation.output not in CASTS[element]):
        raise UnreadableGraph(f"{name} of {element}")
    if name == "Where":
        return "bool", element, element
    return ("int64",) if name == "Gather" else (element,) * arity


def _attribute(operation: Operation) -> Any:
    attributes, element = operation.attributes, operation.element
    match operation.name:
        case "Cast":
            return attributes["to"]
        case "Gather":
            return [text_of(value, element) for value in attributes["table"]]
        case "LabelEncoder":
            keys = [key.decode() if element == "string" else str(key) for key in attributes[f"keys_{element}s"]]
            return [keys, [*map(str, attributes["values_int64s"])], str(attributes.get("default_int64", -1))]
        case "StringNormalizer":
            return attributes["case_change_action"].decode()
        case "RegexFullMatch":
            pattern = attributes["pattern"].decode()
            return "ascii" if pattern == _ASCII else parts_of(pattern)
    return None


def parts_of(pattern: str) -> list[list[str]]:
    parts, place = [[""]], len("(?s)")
    while place < len(pattern):
        if (piece := _PIECES.match(pattern, place)) is None:
            break
        escaped, anything, any_character, letter = piece.groups()
        if anything:
            parts.append([""])
        elif any_character:
            parts[-1].append("")
        else:
            parts[-1][-1] += escaped or letter
        place = piece.end()
    if not pattern.startswith("(?s)") or place != len(pattern):
        raise UnreadableGraph(f"RegexFullMatch of {pattern!r}")
    return parts
