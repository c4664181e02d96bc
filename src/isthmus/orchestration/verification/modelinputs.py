"""What a package's graph is fed: by offline values, and by what the API serves; and what the API predicts of that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.onnx.runtime import predict
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.types import spread
from isthmus.features.contract.contract import Contract
from isthmus.features.offline.history import ViewHistory
from isthmus.features.package.manifest import Feeds, Manifest, ModelInput, Variant, feeds
from isthmus.features.package.replay import open_session
from isthmus.features.pointintime.join import point_in_time
from isthmus.features.request.layout import VALID, Layout, input_name
from isthmus.features.types import DataType, Float32, String
from isthmus.features.values.columns import Values, from_arrow
from isthmus.features.values.rows import Bool
from isthmus.features.verdict import FeatureVerdict, compare
from isthmus.orchestration.verification.client import Client

Newer = Callable[[ViewHistory, pa.Table], Bool]
"""Of some keys of a view, those whose row was pushed after everything that the table holds."""


@dataclass(frozen=True)
class PackageVerdict:
    """What was compared of a package at the project's present.

    Attributes:
        inputs: input to the comparison of what the graph is fed.
        predicted: what the API predicts, beside the file that it runs, fed with offline values.
    """

    inputs: dict[str, FeatureVerdict]
    predicted: FeatureVerdict


def compare_inputs(
    package: Path,
    manifest: Manifest,
    variant: Variant,
    contract: Contract,
    examples: pa.Table,
    keys: Sequence[str],
    histories: Sequence[ViewHistory],
    api: Client,
    *,
    at: int,
    rows: int,
    newer: Newer,
) -> PackageVerdict:
    """Compares a package's inputs, and its predictions through the API, for moments like those of its training set.

    Keys and request fields are those of rows of the training set; stored features are those of the present.

    Args:
        package: its folder.
        manifest: its manifest.
        variant: the model file that the API runs.
        contract: the project's contract.
        examples: the training set.
        keys: names of the join keys.
        histories: the views that its service reads.
        api: a server with the package deployed.
        at: the present, in microseconds.
        rows: how many rows to compare.
        newer: see `Newer`.
    """
    service = manifest.service
    request = [column for column in contract.raw_inputs(service) if column.available == "request"]
    some = examples.select(list(dict.fromkeys((*keys, *(column.name for column in request)))))
    for name in keys:
        # A null key is no key of any row, and the API takes none.
        some = some.filter(pc.is_valid(some[name]))
    some = some.take(spread(len(some), rows)) if len(some) else some
    moment = pa.array(np.full(len(some), at), pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    offline = point_in_time(some.append_column("event_timestamp", moment), histories)
    for history in histories:
        here = ~newer(history, some)
        some, offline = some.filter(pa.array(here)), offline.filter(pa.array(here))
    joined = {column.name: column for history in histories for column in history.view.keys}
    asked = {name: (one.dtype, from_arrow(some[name], one.dtype)) for name, one in joined.items()}
    served = some
    if joined:
        plain = {name: values.tolist(dtype) for name, (dtype, values) in asked.items()}
        answer = api.lookup(contract.read(service), plain, len(some))
        for name in answer.column_names:
            if name not in served.column_names:
                served = served.append_column(name, answer[name])
    inputs = manifest.model_inputs
    sides = [feeds(inputs, columns(side, inputs)) for side in (offline, served)]
    names = [str(row) for row in some.select(list(keys)).to_pylist()]
    times = [at] * len(names)
    compared = {
        item.name: compare(names, one, other, dtype, times=times)
        for (item, dtype, one), (_, _, other) in zip(*(_tensors(inputs, side) for side in sides), strict=True)
    }
    expected = predict(open_session(package, manifest, variant, 1), sides[0]) if names else np.empty(0, np.float32)
    # Where a request transform is not defined the model has no answer, and the API refuses.
    answered = np.isfinite(expected)
    needed = {item.name for item in inputs}
    fields = {one.name: (one.dtype, from_arrow(some[one.name], one.dtype)) for one in request if one.name in needed}
    parts = [{name: (dtype, values.take(answered)) for name, (dtype, values) in part.items()}
             for part in (asked, fields)]  # fmt: skip
    told = [name for name, there in zip(names, answered.tolist(), strict=True) if there]
    refused = api.refused()
    if refused is not None:
        # No prediction is none that is equal.
        found = Values(np.zeros(len(told), np.float32), np.zeros(len(told), bool))
    else:
        found = api.predict(parts[0], parts[1], len(told))
    right = Values(expected[answered], np.ones(len(told), bool))
    predicted = compare(told, right, found, Float32, variant.tolerance, times[: len(told)])
    examples = [replace(one, online=refused) for one in predicted.examples] if refused else predicted.examples
    return PackageVerdict(compared, replace(predicted, examples=examples))


def _tensors(inputs: Sequence[ModelInput], fed: Feeds) -> list[tuple[ModelInput, DataType, Values]]:
    """What a graph is fed, an input at a time, in the type of its tensor."""
    rows = Layout.of({item.name: item.dtype for item in inputs if item.row})
    taken = {
        name: fed[input_name(element)][n] for element, names in rows.inputs.items() for n, name in enumerate(names)
    }
    there = {name: fed[input_name(VALID)][n] for n, name in enumerate(rows.masks)}
    found = []
    numbers = categories = 0
    for item in inputs:
        if item.row:
            found.append((item, item.dtype, Values(taken[item.name], there[item.name])))
            continue
        if item.is_number:
            data, dtype = fed["numeric"][:, numbers], Float32
            numbers += 1
        else:
            data, dtype = fed["categories"][:, categories], String
            categories += 1
        found.append((item, dtype, Values(data, np.ones(len(data), bool))))
    return found
