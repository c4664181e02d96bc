"""Recorded predictions of one kind, read again: their requests, and the stored rows that Redis gave for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import DataError
from isthmus.features.offline.history import ViewHistory
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.columns import Mask, Values
from isthmus.orchestration.recording.mismatches import Recorded
from isthmus.orchestration.recording.provenance import Origins, view_answers
from isthmus.orchestration.recording.requests import Requests, read_predictions
from isthmus.orchestration.recording.storedrows import StoredRows, from_history, served_rows
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.predict.predictor import Predictor


@dataclass(frozen=True)
class Predictions:
    """Answers of one group, of which a model reads what was asked.

    Attributes:
        contract: that they were given under.
        predictor: reads requests, and knows the inputs of the model.
        bodies: the requests as they came.
        requests: their rows.
        recorded: what is on record of the rows.
        now: by view what the history has at the moment of each row, and `served` what Redis gave.
        known: which of `served` are in the history, shape (rows,).
    """

    contract: Contract
    predictor: Predictor
    bodies: Sequence[bytes | LookupError]
    requests: Requests
    recorded: Recorded
    now: Mapping[str, StoredRows]
    served: Mapping[str, StoredRows]
    known: Mask

    def inputs(self, rows: Mapping[str, StoredRows]) -> Mapping[str, Values]:
        """What the model is fed with these stored rows: `now`, or `served`."""
        return self.predictor.inputs(self.requests.fields, view_answers(rows))


def read(origins: Origins, group: pa.Table, model: DeployedModel | None = None) -> Predictions:
    """Reads a group again, for the model that answered, or for another of the same service.

    Raises:
        IsthmusError: the contract, the package or a history of these answers is gone, or none of their requests can be
            read.
    """
    one = group.slice(0, 1).to_pylist()[0]
    contract = origins.contract(one["contract"])
    if contract is None:
        raise DataError("their contract", f"{one['contract'][:12]} is gone")
    graphs = lru_cache(None)(lambda name: RowGraph(contract.transforms[name]))
    predictor = Predictor(contract, model or origins.model(one["package"], one["variant"]), graphs)
    histories: dict[str, ViewHistory] = {}
    for name in one["views"]:
        history = origins.history(contract.views[name])
        if not isinstance(history, ViewHistory):
            raise history.with_traceback(None)
        histories[name] = history
    bodies = origins.bodies(group, contract, one["hashed"])
    requests = read_predictions(predictor, bodies)
    if not requests.rows.any():
        raise DataError("their requests", "cannot be read any more")
    recorded = Recorded.of(group, requests.rows)
    now, served, known = dict[str, StoredRows](), dict[str, StoredRows](), np.ones(len(recorded.answer), bool)
    for name, history in histories.items():
        now[name] = from_history(history, contract.views[name], requests.keys, recorded.at)
        served[name], own = served_rows(history, requests.keys, now[name], recorded.views[name])
        known &= own
    return Predictions(contract, predictor, bodies, requests, recorded, now, served, known)
