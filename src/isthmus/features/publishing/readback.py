"""Verification that Redis holds, for every key of a view, the row that was last published from the table."""

import numpy as np

from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError
from isthmus.features.offline.history import LatestRows
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.record import stamp_of
from isthmus.features.online.store import PIECE, OnlineStore
from isthmus.features.publishing.changes import key_values
from isthmus.features.values.entitykey import entity_keys
from isthmus.features.values.rows import RowCodec


def is_published(store: OnlineStore, view: ViewContract) -> bool:
    record = store.published(view)
    return record is not None and record.contract == view.hash and not record.pending


def read_back(store: OnlineStore, offline: OfflineStore, view: ViewContract) -> None:
    """Verify that Redis has every row of a view that the last materialization wrote, before servers switch to it.

    Raise DataError if a row is missing, damaged or different. A newer pushed row is accepted. Rows of keys that the
    table lacks are not checked. Call this only if `is_published` returns True.
    """
    record = store.published(view)
    assert record is not None  # noqa: S101 - `is_published`
    with offline.reading(view.table):
        state = LatestRows.of(offline.history(view, record.version), record.at)
    codec, stamp, wrong = RowCodec(view), stamp_of(view, record), 0
    for start in range(0, len(state.content), PIECE):
        part = slice(start, start + PIECE)
        rows = store.rows(view, entity_keys(store.contract.project, view.keys, key_values(view, state.keys[part])))
        block = codec.decode(rows)
        event, known = (block.event, block.known) if stamp is None else stamp.apply(block.event, block.known)
        same = (event == state.event[part]) & (known == state.known[part])
        same &= block.columns.packed["content"].astype(np.int64) == state.content[part]
        right = block.present & codec.intact(rows, block) & (same | (known > record.horizon))
        wrong += int(np.count_nonzero(~right))
    if wrong:
        raise DataError(
            f"online rows of view {view.name}", f"{wrong:,} of {len(state.content):,} differ from the table",
            remedy="run `isthmus materialize --full`",
        )  # fmt: skip
