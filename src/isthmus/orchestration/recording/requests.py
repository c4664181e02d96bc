"""Parse the requests of recorded answers, and restore private join keys from their hashes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

from isthmus.features.contract.schema import Column, Contract
from isthmus.features.errors import IsthmusError
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.columns import Ints, Values, concatenated
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.lookup import Lookup, resolve, service_features
from isthmus.serving.lookup.prompt import Prompt
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.predict.tensors import TensorPredictor
from isthmus.serving.recorder.columns import hashes
from isthmus.serving.wire import decode
from isthmus.serving.wire.inference import InferRequest, TensorRequest
from isthmus.serving.wire.messages import GenerateRequest, LookupRequest, PredictRequest

_LOOKUP = msgspec.json.Decoder(LookupRequest)
_PREDICT = msgspec.json.Decoder(PredictRequest)
_INFER = msgspec.json.Decoder(InferRequest)
_GENERATE = msgspec.json.Decoder(GenerateRequest)
_MOST = 1 << 62
LIMITS = Limits(rows=_MOST, values=_MOST)


class _Tensors(msgspec.Struct):
    json: msgspec.Raw = msgspec.Raw()
    binary: bytes | None = None


_TENSORS = msgspec.json.Decoder(_Tensors)


@dataclass(frozen=True)
class Requests:
    """Parsed rows of several recorded requests, one request after another.

    `rows` has the number of rows of each request. An unreadable request has 0 rows, and `unread` maps its index to the
    reason.
    """

    keys: Mapping[str, list[Any]]
    fields: Mapping[str, Values]
    rows: Ints
    unread: Mapping[int, str]


class Keys:
    """Restores private join keys, which recorded requests contain only as hashes.

    Hashes all values that `values` returns for a join key with `secret`, and looks the recorded hashes up.
    """

    def __init__(self, secret: bytes, values: Callable[[str], Iterable[Any]]) -> None:
        self._secret, self._values = secret, values
        self._known: dict[str, dict[str, Any]] = {}

    def restore(self, body: str, columns: Iterable[Column]) -> bytes:
        request = orjson.loads(body)
        for column in columns:
            for part in ("entities", "request"):
                hashed = request.get(part, {}).get(column.name)
                if hashed is not None:
                    known = self.by_hash(column)
                    request[part][column.name] = [known[item] if item else None for item in hashed]
        return msgspec.json.encode(request)

    def by_hash(self, column: Column) -> dict[str, Any]:
        if column.name not in self._known:
            values = list(self._values(column.name))
            self._known[column.name] = dict(zip(hashes(self._secret, column, values), values, strict=True))
        return self._known[column.name]


def lookup_of(contract: Contract, body: bytes, graphs: Callable[[str], RowGraph]) -> Lookup:
    message = _LOOKUP.decode(body)
    if message.feature_service is not None:
        features = service_features(contract, message.feature_service)
    else:
        features = resolve(contract, message.features or ())
    return Lookup(contract, features, full_names=True, graphs=graphs)


def feature_group_key(body: str) -> str:
    try:
        message = _LOOKUP.decode(body)
    except msgspec.MsgspecError:
        return "?"
    return message.feature_service or ",".join(["", *(message.features or ())])


def read_requests(
    reader: Lookup | Predictor | Prompt | TensorPredictor, bodies: Sequence[bytes | LookupError], counts: Sequence[int]
) -> Requests:
    """Parse the bodies of recorded requests again and concatenate their rows, to recompute the answers.

    `reader` parses a body as the server does. A body is a LookupError if its private join keys could not be restored
    from their hashes. `counts` has the number of rows in each recorded answer. A body that cannot be parsed, or that
    has a different number of rows, raises no error: it gets no rows, and `unread` of the result has the reason. All
    lookups must request the same features. Requests of tensors get no rows.
    """
    if isinstance(reader, TensorPredictor):
        return Requests({}, {}, np.zeros(len(bodies), np.int64), {})
    read = _decoder(reader)
    keys: dict[str, list[Any]] = {name: [] for name in reader.plan.keys}
    fields: list[Mapping[str, Values]] = []
    rows, unread = np.zeros(len(bodies), np.int64), dict[int, str]()
    for place, (body, recorded) in enumerate(zip(bodies, counts, strict=True)):
        if isinstance(body, LookupError):
            unread[place] = "the history has no key with the hash in its request"
            continue
        try:
            own_keys, own_fields, count = read(body)
        except (IsthmusError, msgspec.MsgspecError) as error:
            unread[place] = unreadable(error)
            continue
        if count != recorded:
            unread[place] = unreadable(f"it has {count:,} rows, and the answer {recorded:,}")
            continue
        rows[place] = count
        for name, values in keys.items():
            values.extend(own_keys[name])
        fields.append(own_fields)
    return Requests(keys, concatenated(fields), rows, unread)


def _decoder(
    reader: Lookup | Predictor | Prompt,
) -> Callable[[bytes], tuple[Mapping[str, Sequence[Any]], Mapping[str, Values], int]]:
    if isinstance(reader, Predictor):
        return lambda body: reader.read(_PREDICT.decode(body), LIMITS)
    join_keys = {column.name: column for view in reader.plan.contract.views.values() for column in view.keys}

    def read(body: bytes) -> tuple[Mapping[str, Sequence[Any]], Mapping[str, Values], int]:
        if isinstance(reader, Prompt):
            inputs = reader.read(_GENERATE.decode(body), LIMITS)
        else:
            keys, fields = decode.entities(_LOOKUP.decode(body).entities, join_keys, reader.request, reader.optional)
            inputs = reader.inputs(keys, fields, LIMITS)
        return inputs.keys, inputs.request, inputs.rows

    return read


def prompt_of(body: bytes | LookupError) -> str:
    assert isinstance(body, bytes)  # noqa: S101 - requests without their key have no rows
    return _GENERATE.decode(body).prompt


def read_tensors(body: bytes) -> TensorRequest:
    whole = _TENSORS.decode(body)
    if whole.binary is None:
        return TensorRequest(_INFER.decode(body), memoryview(b""))
    return TensorRequest(_INFER.decode(whole.json), memoryview(whole.binary))


def sent_keys(bodies: Sequence[bytes | LookupError], rows: Ints, column: Column) -> list[Any]:
    values: list[Any] = []
    for body, count in zip(bodies, rows.tolist(), strict=True):
        raws = _PREDICT.decode(body).entities if count and isinstance(body, bytes) else {}
        own = {name: raw for name, raw in raws.items() if name == column.name}
        values += decode.keys(own, {column.name: column}).get(column.name) or [None] * count
    return values


def unreadable(why: object) -> str:
    return f"its request cannot be read any more: {why}"
