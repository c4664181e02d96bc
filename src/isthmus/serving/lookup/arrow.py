"""Encode a lookup as an Arrow IPC stream. Imported on first use: pyarrow takes a third of a server's memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from isthmus.features.clock import Status
from isthmus.features.contract.schema import RESERVED, SEPARATOR, STATUS, Column
from isthmus.features.online.plan import ViewAnswer
from isthmus.features.types import DataType, String, UnixTimestamp
from isthmus.features.values.arrow import ARROW
from isthmus.features.values.columns import Values, from_python
from isthmus.serving.lookup.lookup import Lookup, TransformOutputs, damage
from isthmus.serving.wire.encode import LABELS

CONTRACT = "isthmus-contract"
"""Name of the contract's hash in the metadata of the Arrow schema, as in the answer's header."""

PROBLEMS = "isthmus-problems"
"""Name of the `problems` of the JSON answer, as a JSON list, in the metadata of the Arrow schema."""

_EVENT = RESERVED[0]


def stream(
    lookup: Lookup,
    types: Mapping[str, Column],
    keys: Mapping[str, Sequence[Any]],
    answers: Mapping[str, ViewAnswer],
    computed: TransformOutputs,
) -> bytes:
    """Encode the answer to a feature lookup as an Arrow IPC stream with one record batch, for Arrow clients.

    `types` has the name and type of each join key, `keys` the requested values, `answers` the stored rows by view, and
    `computed` the outputs of request transforms. The columns of keys and features are followed by two columns per view.
    `<view>__status` (dictionary-encoded) has the status of each row, with Feast's names. With the status PRESENT, a
    null feature was stored as null. `<view>__event_timestamp` is null without a row. Messages about damaged rows are in
    the metadata of the schema.
    """
    columns = {name: _array(from_python(key, types[name].dtype), types[name].dtype) for name, key in keys.items()}
    for name, (view, feature, dtype) in zip(lookup.names, lookup.features, strict=True):
        columns[name] = _array(computed[view][feature] if view in computed else answers[view].columns[feature], dtype)
    for view, answer in answers.items():
        codes = pa.Array.from_buffers(pa.int8(), len(answer.status), [None, pa.py_buffer(answer.status.tobytes())])
        columns[f"{view}{SEPARATOR}{STATUS}"] = pa.DictionaryArray.from_arrays(codes, _WORDS)
        known = Values(answer.event, answer.status < Status.NOT_FOUND)
        columns[f"{view}{SEPARATOR}{_EVENT}"] = _array(known, UnixTimestamp)
    metadata = {CONTRACT: lookup.contract.hash}
    if problems := damage(answers):
        metadata[PROBLEMS] = orjson.dumps(problems).decode()
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns), metadata=metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def _array(values: Values, dtype: DataType) -> pa.Array:
    """Convert a column to Arrow, with the same result as `features.values.arrow.to_arrow`."""
    # `pyarrow.array` would import pandas if it is installed, which takes half a second and much memory.
    valid = None if values.valid.all() else pa.py_buffer(np.packbits(values.valid, bitorder="little"))
    if dtype.element is not None:
        lists = [() if x is None else x for x in values.data]
        inner = _array(from_python([item for items in lists for item in items], dtype.element), dtype.element)
        return pa.Array.from_buffers(ARROW[dtype.name], len(lists), [valid, _ends(lists)], children=[inner])
    if dtype.numpy is None:
        texts = [b"" if x is None else x.encode() if isinstance(x, str) else x for x in values.data]
        body: list[Any] = [_ends(texts), pa.py_buffer(b"".join(texts))]
    elif dtype.name == "Bool":
        body = [pa.py_buffer(np.packbits(values.data.astype(bool), bitorder="little"))]
    else:
        body = [pa.py_buffer(np.ascontiguousarray(values.data, dtype.numpy))]
    return pa.Array.from_buffers(ARROW[dtype.name], len(values.valid), [valid, *body])


def _ends(items: Sequence[Any]) -> pa.Buffer:
    ends = np.cumsum([0, *map(len, items)], dtype=np.int64)
    return pa.py_buffer(ends.astype(np.int32, casting="same_value"))


_WORDS = _array(from_python(LABELS, String), String)
