"""What a model says to recorded predictions of another, fed by the same stored rows and the same requests."""

import numpy as np
import pyarrow as pa

from isthmus.distill.types import Array
from isthmus.features.errors import IsthmusError
from isthmus.orchestration.recording.predictions import read
from isthmus.orchestration.recording.provenance import Origins, groups, predicted
from isthmus.serving.predict.model import DeployedModel

_PLACE = "place"


def asked(origins: Origins, answers: pa.Table, model: DeployedModel) -> Array:
    """The outputs of a model for the rows of recorded predictions, one behind the other: float64 (n, width).

    NaN where nobody knows: the row that Redis gave is not in the history, the request cannot be read or lacks what this
    model reads, or the contract is gone.
    """
    count = answers["rows"].to_numpy().astype(np.int64)
    starts = np.cumsum(count) - count
    outputs = np.full((int(count.sum()), 1), np.nan)
    for group in groups(answers.append_column(_PLACE, pa.array(np.arange(len(answers))))):
        try:
            part = read(origins, group, model)
        except IsthmusError:
            continue
        rows = part.requests.rows
        found = predicted(model, part.inputs(part.served)).reshape(len(part.known), -1)
        if outputs.shape[1] != found.shape[1]:
            outputs = np.full((len(outputs), found.shape[1]), np.nan)
        places = np.repeat(starts[group[_PLACE].to_numpy()], rows)
        within = np.arange(len(found)) - np.repeat(np.cumsum(rows) - rows, rows)
        outputs[places + within] = np.where(part.known[:, None], found, np.nan)
    return outputs
