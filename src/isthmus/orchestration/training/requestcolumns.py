"""Request transforms in a training set, computed by the project's engine while the rows are read."""

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
from isthmus.transforms.request.compute import Graphs


@dataclass(frozen=True)
class RequestColumns:
    """Request transforms (functions of a request) whose fields are added to a training set while it is read.

    `transforms` has declaration and contract of each one. The contract is limited to the requested fields.
    """

    transforms: Sequence[tuple[AtRequest, TransformContract]]
    contract: Contract
    project: Project

    @property
    def identity(self) -> dict[str, dict[str, Any]]:
        hashes = {name: transform.hash for name, transform in self.contract.transforms.items()}
        return {part.name: {"hash": hashes[part.name], "fields": [field.name for field in part.fields]}
                for _, part in self.transforms}  # fmt: skip

    def schema(self, joined: pa.Schema) -> pa.Schema:
        return compute.schema_with(joined, [contract for _, contract in self.transforms])

    def batches(self, joined: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = iter(joined)
        # Read one batch first: then a join by the engine is done, and Spark allows only one session at a time.
        first = list(islice(rows, 1))
        settings = self.project.settings
        with engine.session(settings.engine, settings.profiles.training.threads) as spark, self.project.importing():
            yield from compute.append_fields(spark, self.transforms, chain(first, rows), Graphs(self.contract))


def request_columns(project: Project, contract: Contract, fields: Mapping[str, Sequence[str]]) -> RequestColumns | None:
    if not fields:
        return None
    transforms = []
    for name, field_names in fields.items():
        transform = contract.transforms[name]
        columns = {column.name: column for column in transform.fields}
        part = replace(transform, fields=tuple(columns[field] for field in field_names))
        transforms.append((project.definitions.transforms[name], part))
    return RequestColumns(transforms, contract, project)
