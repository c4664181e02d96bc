"""The compact JSON format: values without a status for each, in the order of `lookup.arrow`."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from isthmus.features.online.plan import ViewAnswer
from isthmus.serving.lookup.lookup import Lookup, TransformOutputs, damage
from isthmus.serving.wire.encode import OPTIONS, json_columns, labels


def values(
    lookup: Lookup, keys: Mapping[str, Sequence[Any]], answers: Mapping[str, ViewAnswer], computed: TransformOutputs
) -> bytes:
    """Encode an answer as JSON with one list of values per column."""
    columns: list[Any] = [None] * len(lookup.names)
    for _, places, dtype, data, null in lookup.parts(answers):
        for place, column in zip(places, json_columns(dtype, data, null), strict=True):
            columns[place] = column
    for place, _, dtype, data, null in lookup.computed(computed):
        (columns[place],) = json_columns(dtype, data, null)
    metadata: dict[str, Any] = {"feature_names": [*keys, *lookup.names], "contract": lookup.contract.hash}
    if problems := damage(answers):
        metadata["problems"] = problems
    return orjson.dumps(
        {
            "metadata": metadata,
            "values": lookup.encode_keys(keys) + columns,
            "statuses": {view: labels(answer.status) for view, answer in answers.items()},
        },
        option=OPTIONS,
    )
