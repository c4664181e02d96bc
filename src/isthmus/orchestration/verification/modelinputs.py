"""Verification of a package's inputs, from offline and from served values, and of the API's predictions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.distill.declaration import Distillation
from isthmus.distill.onnx.runtime import predict
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.types import Index, evenly_spaced
from isthmus.features.contract.schema import Column
from isthmus.features.offline.history import ViewHistory
from isthmus.features.pointintime.join import point_in_time
from isthmus.features.request.layout import VALID, input_name
from isthmus.features.types import Float32, String
from isthmus.features.values.arrow import from_arrow
from isthmus.features.values.columns import Values, objects
from isthmus.orchestration.artifacts import Artifacts, serving_profile
from isthmus.orchestration.project import Project
from isthmus.orchestration.verification.client import Client, TypedValues
from isthmus.orchestration.verification.sides import (
    SINGLES,
    ComparedRows,
    OnlineSide,
    questions_at,
    sample_of,
    sample_with_keys,
)
from isthmus.package.inputs import Feeds, ModelInput, feeds
from isthmus.package.manifest import Package, tensor_positions
from isthmus.package.replay import open_session
from isthmus.package.texts import MASK
from isthmus.package.verdict import FeatureVerdict, Verdict

# Name of the server's predictions among the package's files.
PREDICT = "/predict"

Numbers = np.ndarray[Any, np.dtype[np.float32]]


def compare_package(  # noqa: PLR0913 - both sides, and where the results go
    project: Project, declared: Distillation, package: Package, histories: Sequence[ViewHistory], online: OnlineSide,
    count: int, verdict: Verdict,
) -> None:  # fmt: skip
    """Compare a package's inputs from offline tables with its inputs from the server, and also the predictions.

    The server's predictions are compared with those that the package makes here from the offline inputs. Adds the
    results to `verdict`. `histories` are the tables, and `online` has the server and Redis. Takes keys and request
    fields from up to `count` rows of the package's training set. Skips a row if the row of its key in Redis became
    known after every row of the offline table. If the server rejects the package, every prediction counts as different.
    """
    contract, manifest = project.applied(), package.manifest
    variant = manifest.variant(serving_profile(project, package.files.folder).precision)
    inputs, features = package.model_inputs, contract.stored_features(manifest.service)
    histories = [history for history in histories if history.view.name in {view for view, _ in features}]
    request = [column for column in contract.raw_inputs(manifest.service) if column.available == "request"]
    keys = contract.spines[declared.spine.name].key_names
    examples = Artifacts(project, declared).training_set(manifest.training_set).table()
    questions = sample_with_keys(examples, keys, count).select(
        list(dict.fromkeys((*keys, *(column.name for column in request))))
    )
    sample = sample_of(questions, examples, keys)
    offline = point_in_time(questions_at(questions, online.at), histories)
    for history in histories:
        comparable = pa.array(~online.newer_than_table(history, questions))
        questions, offline = questions.filter(comparable), offline.filter(comparable)
    entities = _typed(questions, (column for history in histories for column in history.view.keys))
    served = questions
    if entities:
        join_keys = {name: values.tolist(dtype) for name, (dtype, values) in entities.items()}
        answer = online.api.lookup(features, join_keys, len(questions))
        for name in answer.column_names:
            if name not in served.column_names:
                served = served.append_column(name, answer[name])
    offline_feeds, online_feeds = (feeds(inputs, columns(side, inputs)) for side in (offline, served))
    rows = ComparedRows.of(questions, keys, [online.at] * len(questions))
    online_tensors = input_values(inputs, online_feeds)
    for name, (dtype, values) in input_values(inputs, offline_feeds).items():
        verdict.inputs[name] = rows.compare(values, online_tensors[name][1], dtype)
    expected = np.empty(0, np.float32)
    if len(rows):
        expected = predict(open_session(package, variant, 1), offline_feeds)
    names = {item.name for item in inputs}
    fields = _typed(questions, (column for column in request if column.name in names))
    predicted = _compare_predictions(rows, expected, (entities, fields), online.api, variant.tolerance)
    verdict.files[PREDICT], verdict.singly[f"file {PREDICT}"] = predicted
    if sample.rows < sample.of:
        verdict.samples["rows asked of the API"] = sample


def _compare_predictions(
    rows: ComparedRows,
    expected: Numbers,
    requests: tuple[Mapping[str, TypedValues], Mapping[str, TypedValues]],
    api: Client,
    tolerance: float,
) -> tuple[FeatureVerdict, FeatureVerdict]:
    # If a request transform is not defined for a row, the model has no answer and the API refuses the row.
    answered = np.flatnonzero(np.isfinite(expected).all(axis=tuple(range(1, expected.ndim))))
    refusal = api.rejection_reason()

    def compared(client: Client, places: Index) -> FeatureVerdict:
        entities, request = (
            {name: (dtype, values.take(places)) for name, (dtype, values) in part.items()} for part in requests
        )
        some, count = rows.take(places), len(places)
        if refusal is None:
            sides = largest_differences(expected[places], client.predict(entities, request, count))
            offline, online = (Values(side, np.ones(count, bool)) for side in sides)
            return some.compare(offline, online, Float32, tolerance)
        # A server that refuses the package predicts nothing, so every row differs.
        first, _ = largest_differences(expected[places], expected[places])
        offline, nothing = Values(first, np.ones(count, bool)), Values(np.zeros_like(first), np.zeros(count, bool))
        verdict = some.compare(offline, nothing, Float32, tolerance)
        return replace(verdict, examples=[replace(example, online=refusal) for example in verdict.examples])

    return compared(api, answered), compared(api.one_row_per_request(), answered[evenly_spaced(len(answered), SINGLES)])


def largest_differences(expected: Numbers, answers: Numbers) -> tuple[Numbers, Numbers]:
    if expected.shape != answers.shape:
        answers = np.full(expected.shape, np.nan, np.float32)
    rows = [side.reshape(len(expected), expected.shape[-1] if expected.ndim > 1 else 1) for side in (expected, answers)]
    place = np.arange(len(expected)), np.nan_to_num(np.abs(rows[0] - rows[1]), nan=np.inf).argmax(axis=1)
    return rows[0][place], rows[1][place]


def _typed(table: pa.Table, columns: Iterable[Column]) -> dict[str, TypedValues]:
    return {column.name: (column.dtype, from_arrow(table[column.name], column.dtype)) for column in columns}


def input_values(inputs: Sequence[ModelInput], fed: Feeds) -> dict[str, TypedValues]:
    masks = iter(fed[input_name(VALID)].astype(bool) if input_name(VALID) in fed else ())
    tensors: dict[str, TypedValues] = {}
    texts = {item.name for item in inputs if item.text}
    for item, place in zip(inputs, tensor_positions(inputs), strict=True):
        tensor = fed[place.tensor]
        # A request transform may also read the text.
        name = f"{item.name} in {place.tensor}" if item.name in texts and not item.text else item.name
        if item.text:  # tokens, since sides may be padded to different lengths
            tokens = [str(row[mask == 1].tolist()) for row, mask in zip(tensor, fed[MASK], strict=True)]
            tensors[name] = String, Values(objects(tokens, len(tokens)), np.ones(len(tokens), bool))
        elif item.row:  # a request transform in the graph reads it with its own type
            tensors[name] = item.dtype, Values(tensor[place.position], next(masks))
        elif item.size is not None:
            arrays = objects([*tensor[:, place.position : place.position + item.size]], len(tensor))
            tensors[name] = item.dtype, Values(arrays, np.ones(len(arrays), bool))
        else:
            data = tensor[:, place.position]
            tensors[name] = Float32 if item.is_number else String, Values(data, np.ones(len(data), bool))
    return tensors
