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
from isthmus.package.inputs import Feeds, ModelInput, feeds
from isthmus.package.manifest import tensor_positions
from isthmus.transforms.preparation.fit import LEARNED

INPUTS = "inputs.json"


class FurtherInputs:
    """The inputs of a student beside its text.

    Attributes:
        request: request transforms in the student's graph that compute some of the inputs.
        prepare: preparation of the inputs, fitted to the training part.
        prepared: numbers, float32 (n, width), and rows of the embedding tables, int64 (n, texts), of the training set.
    """

    def __init__(self, material: Material, inputs: Sequence[ModelInput]) -> None:
        if material.parts.boundaries is None:
            found = f"set, and the student reads {', '.join(item.name for item in inputs)} beside the text"
            expected = "None: further inputs are prepared with what is known before the validation part"
            raise ConfigurationError(material.declaration.where, [Problem("split_by", found, expected)])
        self._table, self._inputs, request = material.student_table, inputs, material.request_inputs
        names = {item.name for item in inputs}  # a transform may also compute the text
        computed = [(each, field) for each, field in request.computed if each.full_name(field.name) in names]
        self.request = replace(request, computed=computed)
        self._fed = self.request.graph_inputs(inputs)
        preparation = material.learn(Tabular().plan(inputs), material.parts.boundaries[0])
        self.prepare = Prepare(preparation, preparation_graph(preparation))
        self.prepared = tuple(map(torch.from_numpy, self.prepare(tensors(self._table, inputs))))

    def feeds(self, rows: Index) -> Feeds:
        return feeds(self._fed, self._raw(rows))

    def extremes(self, row: Index, count: int) -> list[tuple[Feeds, tuple[Tensor, ...]]]:
        """Return `count` rows of extreme values: each as inputs of the graph, and prepared.

        `row` is the number of a usual row. It is repeated if a request transform rejects all extreme values.
        """
        raw: Columns = edges(self._raw(row), self._fed)
        complete, refused = self.request.complete(raw)
        if refused.all():
            raw = self._raw(row)
            complete, refused = self.request.complete(raw)
        rows = []
        for place in np.resize(np.flatnonzero(~refused), (count, 1)):
            data = network_inputs(take(complete, place), self._inputs, 1)
            rows.append((feeds(self._fed, take(raw, place)), tuple(map(torch.from_numpy, self.prepare(data)))))
        return rows

    @property
    def learned(self) -> bytes:
        return msgspec.json.encode(self.prepare.preparation) + b"\n"

    def shipped(self) -> Mapping[str, tuple[bytes, str]]:
        positions = msgspec.json.format(msgspec.json.encode(tensor_positions(self._fed))) + b"\n"
        return {
            LEARNED: (self.learned, "what the training part taught about the inputs, which is inside the graph"),
            INPUTS: (positions, "the tensor and position of each input beside the text"),
        }

    def _raw(self, rows: Index) -> Columns:
        return columns(self._table.take(rows), self._fed)
