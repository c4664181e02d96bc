"""A lookup whose request has been read: what is asked of the store, and of request transforms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.features.values.columns import Values
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.lookup import Lookup
from isthmus.serving.wire import decode


@dataclass(slots=True)
class LookupInputs:
    """The rows that a lookup is for.

    Attributes:
        keys: join key to its values, one per row.
        request: request field to its values, one per row.
        rows: how many there are.
    """

    keys: Mapping[str, Sequence[Any]]
    request: Mapping[str, Values]
    rows: int

    @classmethod
    def of(
        cls, lookup: Lookup, keys: Mapping[str, list[Any]], fields: Mapping[str, list[Any]], limits: Limits
    ) -> "LookupInputs":
        """The rows of decoded columns, which must fit the lookup."""
        decode.require_keys(lookup.plan.keys, keys)
        lookup.require_no_clash(keys)
        rows = decode.rows("entities", {**fields, **keys}, limits.rows)
        limits.require_values("entities and features", rows, len(lookup.names))
        absent = [None] * rows if lookup.computes else []
        request = {
            name: decode.values(fields.get(name, absent), column, "entities") for name, column in lookup.request.items()
        }
        return cls(keys, request, rows)
