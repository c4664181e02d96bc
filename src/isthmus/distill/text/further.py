"""The inputs of a student beside its text: features and request fields, prepared as in a `Tabular`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from isthmus.distill.declaration import Tabular
from isthmus.distill.tabular.preparation import Prepare, preparation_graph
from isthmus.distill.tabular.tensors import columns, network_inputs, tensors
from isthmus.distill.tasks.samples import Columns, edges, take
from isthmus.distill.tasks.task import Material
from isthmus.distill.types import Index
from isthmus.features.errors import ConfigurationError, Problem
from isthmus.package.inputs import ModelInput
from isthmus.transforms.preparation.fit import LEARNED


class FurtherInputs:
    """The inputs of a student beside its text.

    Attributes:
        request: request transforms in the student's graph that compute some of the inputs.
        prepare: preparation of the inputs, fitted to the training part.
        fed: inputs of the graph from which it computes all inputs.
        prepared: numbers, float32 (n, width), and rows of the embedding tables, int64 (n, texts), of the training set.
    """

    def __init__(self, material: Material, inputs: Sequence[ModelInput]) -> None:
        if material.parts.boundaries is None:
            found = f"set, and the student reads {', '.join(item.name for item in inputs)} beside the text"
            expected = "None: the other inputs are prepared with what is known before the validation part"
            raise ConfigurationError(material.declaration.where, [Problem("split_by", found, expected)])
        self._table, self._inputs, request = material.student_table, inputs, material.request_inputs
        names = {item.name for item in inputs}  # a transform may also compute the text
        computed = [(each, field) for each, field in request.computed if each.full_name(field.name) in names]
        self.request = replace(request, computed=computed)
        self.fed = self.request.graph_inputs(inputs)
        preparation = material.learn(Tabular().plan(inputs), material.parts.boundaries[0])
        self.prepare = Prepare(preparation, preparation_graph(preparation))
        self.prepared = tuple(map(torch.from_numpy, self.prepare(tensors(self._table, inputs))))

    def raw(self, rows: Index) -> Columns:
        return columns(self._table.take(rows), self.fed)

    def extremes(self, row: Index, count: int) -> list[tuple[Columns, tuple[Tensor, ...]]]:
        """Return `count` rows of extreme values, for golden cases: of each row the raw and the prepared values.

        `row` is the index of a usual row, shape (1,). It is used instead if a request transform rejects all extremes.
        Rows are repeated if there are fewer than `count`.
        """
        raw: Columns = edges(self.raw(row), self.fed)
        complete, refused = self.request.complete(raw)
        if refused.all():
            raw = self.raw(row)
            complete, refused = self.request.complete(raw)
        rows: list[tuple[Columns, tuple[Tensor, ...]]] = []
        for place in np.resize(np.flatnonzero(~refused), (count, 1)):
            data = network_inputs(take(complete, place), self._inputs, 1)
            rows.append((take(raw, place), tuple(map(torch.from_numpy, self.prepare(data)))))
        return rows

    @property
    def learned(self) -> bytes:
        return msgspec.json.encode(self.prepare.preparation) + b"\n"

    def shipped(self) -> Mapping[str, tuple[bytes, str]]:
        return {LEARNED: (self.learned, "what the training part taught about the inputs, which is inside the graph")}
