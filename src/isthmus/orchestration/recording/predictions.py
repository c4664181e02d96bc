"""Read recorded predictions of one group: their requests and the stored rows that Redis returned."""

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
    """Recorded answers of one group, with the requests as a model reads them.

    Attributes:
        contract: contract that the answers were computed under.
        predictor: reader of the requests and of the model's inputs.
        bodies: request bodies; an error if a private key could not be restored.
        recorded: recorded values as arrays over the rows.
        now: rows of the history at each answer's moment, by view.
        served: rows that Redis returned, by view.
        known: whether the history still has the row of `served`, shape (rows,).
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
        """Return the model's inputs for these stored rows, either `now` or `served`."""
        return self.predictor.inputs(self.requests.fields, view_answers(rows))


def read(origins: Origins, group: pa.Table, model: DeployedModel | None = None) -> Predictions:
    """Read a group of recorded predictions, for the model that answered or another one of the same service.

    Raises:
        IsthmusError: the contract, the package or a history is gone, or no request can be read.
    """
    first = group.slice(0, 1).to_pylist()[0]
    contract = origins.contract(first["contract"])
    if contract is None:
        raise DataError("their contract", f"{first['contract'][:12]} is gone")
    graphs = lru_cache(None)(lambda name: RowGraph(contract.transforms[name]))
    predictor = Predictor(contract, model or origins.model(first["package"], first["variant"]), graphs)
    histories: dict[str, ViewHistory] = {}
    for name in first["views"]:
        history = origins.history(contract.views[name])
        if not isinstance(history, ViewHistory):
            raise history.with_traceback(None)
        histories[name] = history
    bodies = origins.bodies(group, contract, first["hashed"])
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
