"""The head of a student's graph: request transforms, computed of what the graph is fed.

The network sees columns as the training set has them. Those that request transforms give are not fed but computed,
inside the graph, of columns that are: so there is one file, and raw values go in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from isthmus.features.contract.contract import Column, Contract, TransformContract
from isthmus.features.package.manifest import ModelInput
from isthmus.features.request.graph import RowGraph
from isthmus.features.request.layout import Mask
from isthmus.features.values.columns import Values


@dataclass(frozen=True)
class RequestInputs:
    """Request transforms and the columns that they take.

    Attributes:
        transforms: the transforms, each once.
        taken: what they take, each column once.
        computed: of each input of the network that is computed the transform and the field, in order.
    """

    transforms: Sequence[TransformContract] = ()
    taken: Sequence[Column] = ()
    computed: Sequence[tuple[TransformContract, Column]] = ()

    @classmethod
    def of(cls, contract: Contract, service: str) -> "RequestInputs":
        """The head of a student that reads a service."""
        transforms = contract.used(service)
        stored = dict.fromkeys(contract.stored(pair) for transform in transforms for pair in transform.stored)
        request = dict.fromkeys(column for transform in transforms for column in transform.request)
        pairs = contract.service(service).computed
        fields = [next(field for field in contract.transforms[n].fields if field.name == name) for n, name in pairs]
        computed = [(contract.transforms[name], field) for (name, _), field in zip(pairs, fields, strict=True)]
        return cls(transforms, (*stored, *request), computed)

    def fed(self, inputs: Sequence[ModelInput]) -> tuple[ModelInput, ...]:
        """What the graph is fed, given what its network reads: that which is not computed, and what transforms take."""
        made = {transform.full_name(field.name) for transform, field in self.computed}
        rows = (ModelInput(column.name, column.dtype, row=True) for column in self.taken)
        return (*(item for item in inputs if item.name not in made), *rows)

    def complete(self, given: Mapping[str, Values]) -> tuple[dict[str, Values], Mask]:
        """The columns that the network sees, made of those that the graph is fed, and the rows that are refused."""
        columns = dict(given)
        refused = np.zeros(len(next(iter(given.values())).data), bool)
        for graph in self._graphs:
            found = graph.run({name: given[name] for name in graph.transform.inputs})
            columns |= {graph.transform.full_name(name): values for name, values in found.values.items()}
            for mask in found.refused.values():
                refused |= mask
        return columns, refused

    @cached_property
    def _graphs(self) -> list[RowGraph]:
        return [RowGraph(transform) for transform in self.transforms]
