"""Everything that recorded answers depend on: contracts, view histories, requests and models."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.errors import DataError, IsthmusError
from isthmus.features.offline.history import ViewHistory
from isthmus.features.online.plan import ViewAnswer
from isthmus.features.profiles import ServingProfile
from isthmus.features.values.columns import Values
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import contract_of
from isthmus.orchestration.recording.requests import Keys, features_of
from isthmus.orchestration.recording.storedrows import StoredRows
from isthmus.orchestration.server.secret import known_secret
from isthmus.package.manifest import Package, open_package
from isthmus.serving.deployment.cache import folder_of
from isthmus.serving.deployment.record import unapproved
from isthmus.serving.predict.model import DeployedModel

# Rows per call of a model.
_ROWS = 1 << 14


class Origins:
    """Opens contracts, histories and models of recorded answers, each once.

    If `package` is set, it replaces the package that answered.
    """

    def __init__(self, project: Project, package: Path | None = None) -> None:
        self._project, self._package = project, package
        self.offline = project.offline_store()
        self._contract = lru_cache(None)(lambda known: contract_of(project, known))
        self._histories: dict[str, ViewHistory | IsthmusError] = {}
        self._models: dict[tuple[str, str], DeployedModel | IsthmusError] = {}

    def contract(self, known: str) -> Contract | None:
        """Return the contract with this hash, or None if neither the project nor a package has it."""
        return self._contract(known)

    def history(self, view: ViewContract) -> ViewHistory | IsthmusError:
        """Return the history of a view, or the error that prevents reading it."""
        if view.hash not in self._histories:
            try:
                self._histories[view.hash] = self.offline.history(view)
            except IsthmusError as error:
                self._histories[view.hash] = error
        return self._histories[view.hash]

    def bodies(self, part: pa.Table, contract: Contract, hashed: Sequence[str]) -> list[bytes | LookupError]:
        """Return the request bodies with private keys restored, or an error if the history lacks a key."""
        texts = part["request"].to_pylist()
        if not hashed:
            return [text.encode() for text in texts]

        def values(name: str) -> Iterable[Any]:
            distinct: set[Any] = set()
            for view in contract.views.values():
                if name in [column.name for column in view.keys]:
                    history = self.history(view)
                    if isinstance(history, ViewHistory):
                        data = ds.dataset(history.data) if isinstance(history.data, pa.Table) else history.data
                        distinct.update(key_values(pc.unique(data.to_table([name])[name])))
            return distinct

        columns = {column.name: column for view in contract.views.values() for column in view.keys}
        keys = Keys(known_secret(self._project), values)
        bodies: list[bytes | LookupError] = []
        for text in texts:
            try:
                bodies.append(keys.restore(text, [columns[name] for name in hashed]))
            except LookupError as error:
                bodies.append(error)
        return bodies

    def model(self, digest: str, variant: str) -> DeployedModel:
        """Return the model that answered.

        Raises:
            DataError: its package is gone or was changed.
        """
        known = self._models.get((digest, variant))
        if known is None:
            try:
                precision, _, threads = variant.partition("/")
                profile = msgspec.convert({"precision": precision, "threads": int(threads)}, ServingProfile)
                known = DeployedModel(unapproved(self.package(digest), profile, 0, None))
            except IsthmusError as error:
                known = error
            self._models[digest, variant] = known
        if isinstance(known, IsthmusError):
            raise known.with_traceback(None)
        return known

    def package(self, digest: str) -> Package:
        """Return the package that answered.

        Raises:
            DataError: the package is gone or was changed.
        """
        folder = self._package or folder_of(self._project.deployment_file) / digest
        if self._package is None and not folder.is_dir():
            raise DataError(
                f"package {digest[:12]}",
                "is gone",
                remedy="restore it in .isthmus/deployments, or pass another one with --package",
            )
        package = open_package(folder)
        if self._package is None and package.files.digest != digest:
            raise DataError(f"package {digest[:12]}", f"has changed: its digest is {package.files.digest[:12]} now")
        return package


def groups(answers: pa.Table) -> Iterator[pa.Table]:
    """Split answers into groups that can be computed together; each keeps the order of the table."""
    pairs = zip(answers["route"].to_pylist(), answers["request"].to_pylist(), strict=True)
    features = [features_of(text) if route == "lookup" else "" for route, text in pairs]
    parts = [answers[name] for name in ("route", "contract", "package", "variant")]
    parts += [pc.binary_join(answers[name], ",") for name in ("views", "hashes", "hashed")]
    joined = pc.binary_join_element_wise(*parts, pa.array(features, pa.string()), "\n")
    for group in pc.unique(joined):
        yield answers.filter(pc.equal(joined, group)).combine_chunks()


def view_answers(stored: Mapping[str, StoredRows]) -> dict[str, ViewAnswer]:
    """Convert stored rows to the form in which a lookup returns them."""
    answers: dict[str, ViewAnswer] = {}
    for name, rows in stored.items():
        columns: Any = rows.columns
        answers[name] = ViewAnswer(columns, rows.status.astype(np.uint8), rows.event, rows.known)
    return answers


def predict_all(model: DeployedModel, inputs: Mapping[str, Values]) -> np.ndarray[Any, Any]:
    """Return a model's outputs for many rows, computed in batches of `_ROWS`."""
    rows = len(next(iter(inputs.values())).valid)
    parts = [
        model.predict({name: values.take(slice(start, start + _ROWS)) for name, values in inputs.items()})
        for start in range(0, max(rows, 1), _ROWS)
    ]
    return np.concatenate(parts)


def key_values(values: pa.Array) -> list[Any]:
    """Return the values of a join key; times are microseconds."""
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    plain: list[Any] = values.to_pylist()
    return plain
