"""How far what a package was asked for lately, and what it said, are from its training set."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from isthmus.distill.declaration import Distillation
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.types import Array, in_batches
from isthmus.features.contract.contract import Column
from isthmus.features.days import DAY
from isthmus.features.errors import DataError
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.plan import ViewAnswer
from isthmus.features.package.manifest import open_package
from isthmus.features.production import InputDrift
from isthmus.features.profiles import ServingProfile
from isthmus.features.quality.drift import drift, windows
from isthmus.features.quality.statistics import SAMPLE, FeatureStatistics, measure
from isthmus.features.request.graph import RowGraph
from isthmus.features.types import Float64
from isthmus.features.values.arrow import micros, to_arrow
from isthmus.features.values.columns import Values
from isthmus.orchestration.api.secret import secret
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.production.answers import Answered
from isthmus.orchestration.production.labels import EVENT
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import contract_of
from isthmus.orchestration.recording.requests import Keys, read_predictions
from isthmus.orchestration.recording.stored import from_history
from isthmus.serving.deployment.deployment import unapproved
from isthmus.serving.predict.model import Model
from isthmus.serving.predict.predictor import Predictor

WINDOW = 7 * DAY
"""The answers that are compared: those of the last week that has any."""
SCORE = "score"
_ROWS = 1 << 14


def served_drift(
    project: Project, declared: Distillation, folder: Path, answered: Answered,
    keys: Callable[[str], Sequence[Any]],
) -> tuple[int, tuple[InputDrift, ...]]:  # fmt: skip
    """The moment from which answers were compared, and the drift of each raw input of the model and of its scores.

    Inputs are joined from the history at the moments of the answers, as `isthmus replay` does. They are compared with
    the training set of the package, and with parts of it as long as the answers span.

    Raises:
        DataError: the training set, the contract or a table is gone.
    """
    since = int(answered.at.max()) - WINDOW
    part = answered.part
    at = micros(part["at"])
    last = {name: part[name][int(at.argmax())].as_py() for name in ("contract", "variant")}
    recent = np.flatnonzero(at >= since)
    recent = recent[[part["contract"][place].as_py() == last["contract"] for place in recent.tolist()]]
    part = part.take(pa.array(_spread(recent)))
    contract = contract_of(project, last["contract"])
    if contract is None:
        raise DataError(f"contract {last['contract'][:12]}", "is gone", remedy="deploy a package of today's contract")
    precision, _, threads = last["variant"].partition("/")
    profile = msgspec.convert({"precision": precision, "threads": int(threads)}, ServingProfile)
    package = open_package(folder)
    model = Model(unapproved(package, profile, 0, None))
    predictor = Predictor(contract, model, lru_cache(None)(lambda name: RowGraph(contract.transforms[name])))
    private = Keys(secret(project) if any(map(bool, part["hashed"].to_pylist())) else b"", keys)
    by_key = {column.name: column for view in contract.views.values() for column in view.keys}
    bodies: list[bytes | LookupError] = []
    for body, hashed in zip(part["request"].to_pylist(), part["hashed"].to_pylist(), strict=True):
        try:
            bodies.append(private.found(body, [by_key[name] for name in hashed]) if hashed else body.encode())
        except LookupError as error:
            bodies.append(error)
    requests = read_predictions(predictor, bodies)
    moments = micros(part["at"])[np.repeat(np.arange(len(part)), requests.rows)]
    offline, stored = OfflineStore(project.offline, project.storage_options), {}
    for view in predictor.plan.views:
        rows = from_history(offline.history(view), view, requests.keys, moments)
        answer: Any = rows.columns
        stored[view.name] = ViewAnswer(answer, rows.status.astype(np.uint8), rows.event, rows.known)
    inputs = predictor.inputs(requests.fields, stored)
    names = {item.name: Column(item.name, item.dtype) for item in model.inputs}
    scored = {**names, SCORE: Column(SCORE, Float64)} if SCORE not in names else names
    now = _table(names, inputs, _score(answered.outputs[answered.at >= since]), scored)
    examples = Artifacts(project, declared).training_set(package.manifest.training_set).table()
    examples = examples.take(pa.array(_spread(np.arange(len(examples)))))
    learned = columns(examples, model.inputs)
    before = _table(names, learned, _score(_predicted(model, learned)), scored)
    before = {name: table.append_column(EVENT, examples[EVENT]) for name, table in before.items()}
    until, length = int(micros(examples[EVENT]).max()), max(int(moments.max() - moments.min()), DAY)
    return since, tuple(_drift(column, now[column.name], before[column.name], until, length)
                        for column in scored.values())  # fmt: skip


def _drift(column: Column, now: pa.Table, before: pa.Table, until: int, length: int) -> InputDrift:
    sides = [_measured(column, table) for table in (before, now)]
    usual = windows([column], before, until, length)[column.name]
    found = drift(sides[0], sides[1], None, usual)
    return InputDrift(
        name=column.name, rows=found.rows, psi=found.psi, ks=found.ks, wasserstein=found.wasserstein,
        exceeded=found.exceeded,
    )  # fmt: skip


def _measured(column: Column, table: pa.Table) -> FeatureStatistics:
    return measure([column], table.select([column.name]).combine_chunks().to_batches())[1][column.name]


def _table(
    names: Mapping[str, Column], inputs: Mapping[str, Values], scores: Array, scored: Mapping[str, Column]
) -> dict[str, pa.Table]:
    """A table of each column, since requests may be fewer than scores."""
    tables = {name: pa.table({name: to_arrow(inputs[name], column.dtype)}) for name, column in names.items()}
    return {name: tables[name] if name in tables else pa.table({name: pa.array(scores)}) for name in scored}


def _score(outputs: Array) -> Array:
    """The number of a row; of classes the probability of the likeliest."""
    flat = outputs.reshape(len(outputs), -1).astype(np.float64)
    best: Array = flat[:, 0] if flat.shape[1] == 1 else flat.max(1)
    return best


def _predicted(model: Model, inputs: Mapping[str, Values]) -> Array:
    count = len(next(iter(inputs.values())).valid)
    parts = [
        model.predict({name: values.take(rows) for name, values in inputs.items()})
        for rows in in_batches(np.arange(count), _ROWS)
    ]
    return np.concatenate(parts)


def _spread(places: Any) -> Any:
    """At most `SAMPLE` of them, evenly over all."""
    if len(places) <= SAMPLE:
        return places
    return places[np.linspace(0, len(places) - 1, SAMPLE).astype(np.int64)]
