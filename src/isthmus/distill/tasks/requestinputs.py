"""The request transforms in a student's graph, which compute some of its inputs from raw values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from isthmus.features.contract.schema import Column, Contract, TransformContract
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.columns import Mask, Values
from isthmus.package.inputs import ModelInput


@dataclass(frozen=True)
class RequestInputs:
    """The request transforms in a student's graph: functions that compute inputs from the raw values of a request.

    `columns` are the inputs of all transforms. `computed` has the transform and the field of each computed input.
    """

    transforms: Sequence[TransformContract] = ()
    columns: Sequence[Column] = ()
    computed: Sequence[tuple[TransformContract, Column]] = ()

    @classmethod
    def of(cls, contract: Contract, service: str) -> "RequestInputs":
        transforms = contract.transforms_of(service)
        stored = dict.fromkeys(contract.stored(pair) for transform in transforms for pair in transform.stored)
        request = dict.fromkeys(column for transform in transforms for column in transform.request)
        pairs = contract.service(service).computed
        fields = [next(field for field in contract.transforms[n].fields if field.name == name) for n, name in pairs]
        computed = [(contract.transforms[name], field) for (name, _), field in zip(pairs, fields, strict=True)]
        return cls(transforms, (*stored, *request), computed)

    def graph_inputs(self, inputs: Sequence[ModelInput]) -> tuple[ModelInput, ...]:
        computed = {transform.full_name(field.name) for transform, field in self.computed}
        rows = (ModelInput(column.name, column.dtype, row=True) for column in self.columns)
        return (*(item for item in inputs if item.name not in computed), *rows)

    def complete(self, raw: Mapping[str, Values]) -> tuple[dict[str, Values], Mask]:
        columns = dict(raw)
        refused = np.zeros(len(next(iter(raw.values())).data), bool)
        for graph in self._graphs:
            result = graph.run({name: raw[name] for name in graph.transform.inputs})
            columns |= {graph.transform.full_name(name): values for name, values in result.values.items()}
            for mask in result.refused.values():
                refused |= mask
        return columns, refused

    @cached_property
    def _graphs(self) -> list[RowGraph]:
        return [RowGraph(transform) for transform in self.transforms]
