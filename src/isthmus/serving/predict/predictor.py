"""`Predictor`: predicts from join keys, with the stored features, and from request fields."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import orjson

from isthmus.features.contract.diff import require_service
from isthmus.features.contract.schema import Column, Contract, optional_fields
from isthmus.features.errors import RequestError, one_of
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.profiles import BATCH_ROWS
from isthmus.features.request.graph import RowGraph
from isthmus.features.types import Float32
from isthmus.features.values.columns import Values
from isthmus.serving.limits import Limits
from isthmus.serving.predict.batches import Batches, Outputs
from isthmus.serving.predict.model import DeployedModel, unanswered
from isthmus.serving.wire import decode
from isthmus.serving.wire.encode import OPTIONS, json_columns, labels
from isthmus.serving.wire.inference import TensorRequest
from isthmus.serving.wire.messages import PredictRequest

Raws = Mapping[str, msgspec.Raw]

_KEYS: Mapping[str, Any] = {"Bool": True, "Int32": 1, "Int64": 1, "UnixTimestamp": 0, "Bytes": b""}
"""Example value of a join key by type; a string key shows its name in angle brackets."""


class Predictor:
    """A model with the views and request fields it reads. Raises a ContractMismatch if they changed since its export.

    `graphs` returns a request transform by name. Rows of `earlier` contracts may still be in Redis. `batch` is the
    number of rows of several requests that are predicted together.
    """

    def __init__(
        self,
        contract: Contract,
        model: DeployedModel,
        graphs: Callable[[str], RowGraph],
        earlier: Sequence[Contract] = (),
        batch: int = BATCH_ROWS,
    ) -> None:
        deployment = model.deployment
        require_service(f"model {deployment.model}", model.contract, contract, deployment.service)
        self.contract, self.model = contract, model
        self._join_keys = {column.name: column for view in contract.views.values() for column in view.keys}
        texts = [item.name for item in model.inputs if item.text]
        self.batches = Batches(model.predict, model.seconds, batch, texts)
        self._used, self._graphs = contract.transforms_of(deployment.service), graphs
        needed = {item.name for item in model.inputs}
        self._features = [
            (view, feature, full)
            for view, feature in contract.stored_features(deployment.service)
            if (full := contract.views[view].full_name(feature)) in needed
        ]
        self.plan = LookupPlan(contract, [view for view, _, _ in self._features], earlier)
        self.bits: Mapping[str, bytes] = self.plan.bits((view, feature) for view, feature, _ in self._features)
        self._fields = {
            column.name: column for column in contract.raw_inputs(deployment.service) if column.available == "request"
        }
        self._needed = [name for name in self._fields if name in needed]
        read = {column.name for column in contract.service(deployment.service).request}
        self._optional = optional_fields(self._used) - read

    def read(
        self, message: PredictRequest | TensorRequest, limits: Limits
    ) -> tuple[dict[str, list[Any]], dict[str, Values], int]:
        """Decode a prediction request; return its join keys, its request fields, and the number of rows.

        A value that is both a join key and a request field may be in `entities`, in `request`, or in both if equal.
        Raises RequestError for a TensorRequest, for missing or unknown columns, and for values that do not fit. Raises
        TooLargeError for too many rows or values.
        """
        if isinstance(message, TensorRequest):
            raise RequestError(f"model {self.model.deployment.model}", "takes rows of features, not tensors",
                               expected="join keys and request fields", remedy="use /predict")  # fmt: skip
        entities: Raws = message.entities
        request: Raws = message.request
        for name in request:
            if name not in self._fields:
                expected = one_of(self._fields) if self._fields else "no request: the model has only join keys"
                raise RequestError(f"request.{name}", "is not a request field of the model", expected=expected)
        for name in entities:
            if name not in self._join_keys and name in self._fields:
                raise RequestError(f"entities.{name}", "is not a join key, but a request field of the model",
                                   remedy="put it into `request`")  # fmt: skip
        entities = {**{name: request[name] for name in self.plan.keys if name in request}, **entities}
        request = {**{name: entities[name] for name in self._needed if name in entities}, **request}
        keys = decode.keys(entities, self._join_keys)
        fields = {name: decode.decode_field(raw, self._fields[name]) for name, raw in request.items()}
        decode.require_keys(self.plan.keys, keys)
        for name in self._needed:
            if name not in fields and name not in self._optional:
                raise RequestError(f"request.{name}", "is missing", expected=f"{self._fields[name].dtype}, one per row")
        rows = decode.rows("entities and request", {**fields, **keys}, limits.rows)
        limits.require_values("entities and request", rows, len(self._features) + len(self._needed))
        for name in fields.keys() & keys.keys():
            if fields[name] != keys[name]:
                raise RequestError(f"request.{name}", f"differs from entities.{name}", expected="one of the two")
        absent: list[Any] = [None] * rows
        needed = {name: decode.values(fields.get(name, absent), self._fields[name]) for name in self._needed}
        return keys, needed, rows

    @cached_property
    def example(self) -> dict[str, dict[str, list[Any]]]:
        row = self.model.row
        keys = {name: [self._key(row.get(name), column)] for name, column in self.plan.keys.items()}
        needed = [name for name in self._needed if name not in self._optional and name not in keys]
        body = {"entities": keys, "request": {name: [row.get(name)] for name in needed}}
        # Encodes bytes as Base64.
        return {part: msgspec.to_builtins(columns) for part, columns in body.items() if columns}

    def _key(self, value: Any, column: Column) -> Any:
        return _KEYS.get(column.dtype.name, f"<{column.name}>") if value is None else value

    def inputs(self, fields: Mapping[str, Values], answers: Mapping[str, ViewAnswer]) -> dict[str, Values]:
        stored = {full: answers[view].columns[feature] for view, feature, full in self._features}
        return {**stored, **fields}

    def require(self, output: Outputs, columns: Mapping[str, Values]) -> None:
        """Check a model's output; raise RequestError if a value is NaN because a request transform fails for its row.

        Call it after a prediction. `columns` has the inputs of the model by name. An output that is NaN for another
        reason is accepted, and `encode` writes it as null or "NaN".
        """
        if unanswered(output).any():
            for transform in self._used:
                inputs = {name: columns[name] for name in transform.inputs}
                self._graphs(transform.name).require(inputs, self._graphs, self._place)

    def _place(self, field: str) -> str:
        return f"entities.{field}" if field in self.plan.keys else f"request.{field}"

    def encode(self, output: Outputs, answers: Mapping[str, ViewAnswer]) -> bytes:
        deployment = self.model.deployment
        return orjson.dumps(
            {
                "model": deployment.model,
                "contract": deployment.contract,
                "package": deployment.digest,
                **(
                    self._named(output)
                    if self.model.classes
                    else {"predictions": json_columns(Float32, output[None])[0]}
                ),
                "statuses": {view: labels(answer.status) for view, answer in answers.items()},
            },
            option=OPTIONS,
        )

    def _named(self, output: Outputs) -> dict[str, Any]:
        classes, missing = self.model.classes, unanswered(output).tolist()
        if self.model.several:
            names: list[Any] = [[classes[place] for place in np.flatnonzero(row > 0.5)] for row in output]
        else:
            names = [classes[place] for place in output.argmax(axis=1).tolist()]
        names = [None if none else name for name, none in zip(names, missing, strict=True)]
        return {"predictions": names, "classes": classes, "probabilities": json_columns(Float32, output)}
