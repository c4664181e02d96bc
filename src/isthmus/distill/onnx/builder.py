"""Build an ONNX graph node by node, and include finished graphs as parts."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from isthmus.transforms.rowwise.core.graph import Described, assembled, needed


class Building:
    """An ONNX graph under construction. If a name exists, `add` and `constant` keep its first node or constant."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}

    def constant(self, name: str, value: Any) -> str:
        array = np.asarray(value)
        if array.dtype == object:
            tensor = helper.make_tensor(name, onnx.TensorProto.STRING, array.shape, array.ravel().tolist())
        else:
            tensor = numpy_helper.from_array(array, name)
        self._constants.setdefault(name, tensor)
        return name

    def add(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        if not any(node.name == name for node in self._nodes):
            self._nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def include(self, model: onnx.ModelProto, part: str, names: Mapping[str, str]) -> dict[str, str]:
        """Move the nodes of another model into this graph, to join models; changes `model`.

        A node `name` becomes `part/name`; Identity nodes are dropped. `names` gives, for each input of
        `model`, the tensor of this graph that feeds it. It may also name results of `model` that this graph already
        computes: their nodes are left out. Return the new name of each output of `model`.
        """
        same = dict(names)

        def renamed(name: str) -> str:
            return same.get(name) or f"{part}/{name}"

        for node in model.graph.node:
            if node.op_type == "Identity":
                same[node.output[0]] = renamed(node.input[0])
            elif not names.keys() >= set(node.output):
                node.name = renamed(node.name)
                node.input[:] = map(renamed, node.input)
                node.output[:] = map(renamed, node.output)
                self._nodes.append(node)
        for constant in model.graph.initializer:
            constant.name = renamed(constant.name)
            self._constants[constant.name] = constant
        return {output.name: renamed(output.name) for output in model.graph.output}

    def rows(self, tensor: str, count: int) -> list[str]:
        producer = self._producer(tensor)
        if producer is not None and producer.op_type == "Concat":
            return list(producer.input)
        names = [f"{tensor}/{place}" for place in range(count)] if count > 1 else [tensor]
        if count > 1 and self._producer(names[0]) is None:
            self._nodes.append(helper.make_node("Split", [tensor], names, name=names[0], axis=0, num_outputs=count))
        return names

    def split(self, tensor: str, sizes: Sequence[int], axis: int) -> list[str]:
        names = [f"{tensor}/{axis}/{place}" for place in range(len(sizes))]
        lengths = self.constant(f"sizes/{'/'.join(map(str, sizes))}", np.array(sizes, np.int64))
        self._nodes.append(helper.make_node("Split", [tensor, lengths], names, name=names[0], axis=axis))
        return names

    def constant_value(self, mask: str) -> bool | None:
        producer = self._producer(mask)
        if producer is None or producer.op_type != "Expand" or producer.input[0] not in self._constants:
            return None
        return bool(numpy_helper.to_array(self._constants[producer.input[0]]).all())

    def _producer(self, tensor: str) -> onnx.NodeProto | None:
        return next((node for node in self._nodes if tensor in node.output), None)

    def model(self, name: str, inputs: Described, outputs: Described) -> onnx.ModelProto:
        nodes = needed(self._nodes, [output.name for output in outputs])
        used = {name for node in nodes for name in node.input}
        constants = [constant for constant in self._constants.values() if constant.name in used]
        _shorten(nodes, constants, {value.name for value in (*inputs, *outputs)})
        return assembled(name, nodes, inputs, outputs, constants)


def _shorten(nodes: Sequence[onnx.NodeProto], constants: Sequence[onnx.TensorProto], public: Collection[str]) -> None:
    """Shorten, in place, all names except inputs and outputs: names are a third of a graph's bytes on a device."""
    short = {name: name for name in ("", *public)}
    for name in (constant.name for constant in constants):
        short.setdefault(name, f"c{len(short)}")
    for name in (name for node in nodes for name in node.output):
        short.setdefault(name, f"t{len(short)}")
    for constant in constants:
        constant.name = short[constant.name]
    for place, node in enumerate(nodes):
        node.name = f"n{place}"
        node.input[:] = [short[name] for name in node.input]
        node.output[:] = [short[name] for name in node.output]
