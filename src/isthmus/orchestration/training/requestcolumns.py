"""Request transforms in a training set: computed from its rows by the project's engine, as they are written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from isthmus.features.contract.schema import Contract, TransformContract
from isthmus.features.definition.spec import AtRequest
from isthmus.orchestration.project import Project
from isthmus.transforms import engine
from isthmus.transforms.request import compute
from isthmus.transforms.request.check import Graphs


@dataclass(frozen=True)
class RequestColumns:
    """Request transforms, each with its contract, narrowed to the wanted fields; the project's engine computes them."""

    transforms: Sequence[tuple[AtRequest, TransformContract]]
    contract: Contract
    project: Project

    @property
    def identity(self) -> dict[str, dict[str, Any]]:
        """All that decides the values: the transforms' hashes, and the fields."""
        hashes = {name: transform.hash for name, transform in self.contract.transforms.items()}
        return {part.name: {"hash": hashes[part.name], "fields": [field.name for field in part.fields]}
                for _, part in self.transforms}  # fmt: skip

    def schema(self, joined: pa.Schema) -> pa.Schema:
        """The columns with the computed ones; DataError if an input is missing, or two columns would share a name."""
        return compute.schema_with(joined, [contract for _, contract in self.transforms])

    def batches(self, joined: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows in their order, with the computed columns; DataError if the engine or a graph refuses a row."""
        rows = iter(joined)
        # An engine that joins is done when its first batch comes, and Apache Spark has one session at a time.
        first = list(islice(rows, 1))
        settings = self.project.settings
        with engine.session(settings.engine, settings.profiles.training.threads) as spark, self.project.importing():
            yield from compute.computed(spark, self.transforms, chain(first, rows), Graphs(self.contract))


def request_columns(project: Project, contract: Contract, fields: Mapping[str, Sequence[str]]) -> RequestColumns | None:
    """The columns of request transforms, by the wanted fields of each; None if there are none."""
    if not fields:
        return None
    transforms = []
    for name, wanted in fields.items():
        transform = contract.transforms[name]
        columns = {column.name: column for column in transform.fields}
        part = replace(transform, fields=tuple(columns[field] for field in wanted))
        transforms.append((project.definitions.transforms[name], part))
    return RequestColumns(transforms, contract, project)
