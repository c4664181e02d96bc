"""Request transforms in a training set: computed from its rows by the project's engine, as they are written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from isthmus.features.contract.contract import Contract, TransformContract
from isthmus.features.definition.spec import AtRequest
from isthmus.features.errors import DataError
from isthmus.orchestration.artifacts import TrainingSet
from isthmus.orchestration.project import Project
from isthmus.transforms import engine
from isthmus.transforms.request import compute
from isthmus.transforms.request.check import Graphs


class RequestColumns:
    """Some fields of request transforms, and the engine that computes them.

    Args:
        transforms: each with its contract, which holds only the fields that are wanted.
        contract: the whole contract.
        project: theirs, whose engine it is.
    """

    def __init__(
        self,
        transforms: Sequence[tuple[AtRequest, TransformContract]],
        contract: Contract,
        project: Project,
    ) -> None:
        self._transforms, self._contract, self._project = transforms, contract, project

    @property
    def known(self) -> dict[str, dict[str, Any]]:
        """All that decides the values: the transforms' hashes, and the fields."""
        return {
            part.name: {"hash": self._contract.transforms[part.name].hash, "fields": [one.name for one in part.fields]}
            for _, part in self._transforms
        }

    def schema(self, joined: pa.Schema) -> pa.Schema:
        """The columns of a training set, with those that are computed.

        Raises:
            DataError: a column is missing that a transform takes, or two would share a name.
        """
        return compute.schema_with(joined, [contract for _, contract in self._transforms])

    def batches(self, joined: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows in their order, with what is computed of them.

        Raises:
            DataError: the engine or a graph refused a row.
        """
        rows = iter(joined)
        # An engine that joins is done when its first batch comes, and Apache Spark has one session at a time.
        first = list(islice(rows, 1))
        settings = self._project.settings
        with engine.session(settings.engine, settings.profiles.training.threads) as spark, self._project.importing():
            yield from compute.computed(spark, self._transforms, chain(first, rows), Graphs(self._contract))


def request_columns(project: Project, contract: Contract, fields: Mapping[str, Sequence[str]]) -> RequestColumns | None:
    """What computes some fields of request transforms; None if there are none.

    Args:
        project: the project.
        contract: its contract.
        fields: request transform to the fields that are wanted.
    """
    if not fields:
        return None
    chosen = []
    for name, wanted in fields.items():
        whole = contract.transforms[name]
        part = tuple(next(field for field in whole.fields if field.name == one) for one in wanted)
        chosen.append((project.definitions.transforms[name], replace(whole, fields=part)))
    return RequestColumns(chosen, contract, project)


def recorded_columns(project: Project, made: TrainingSet) -> RequestColumns | None:
    """What computes the request transforms of a training set that is made again.

    Raises:
        DataError: one of them is gone, or computes something else now.
    """
    contract = project.definitions.contract
    for name, then in made.computed.items():
        now = contract.transforms.get(name)
        if now is None or now.hash != then["hash"]:
            found = "is gone" if now is None else "computes something else now"
            raise DataError(f"training set {made.id}", f"request transform {name} {found}",
                            remedy="bring it back, or make a new training set")  # fmt: skip
    return request_columns(project, contract, {name: then["fields"] for name, then in made.computed.items()})
