"""The decoded inputs of a lookup."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.features.values.columns import Values
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.lookup import Lookup
from isthmus.serving.wire import decode


@dataclass(slots=True)
class LookupInputs:
    """The rows of a lookup request.

    Attributes:
        keys: values of each join key, one per row.
        request: values of each request field, one per row.
        rows: number of rows.
    """

    keys: Mapping[str, Sequence[Any]]
    request: Mapping[str, Values]
    rows: int

    @classmethod
    def of(
        cls, lookup: Lookup, keys: Mapping[str, list[Any]], fields: Mapping[str, list[Any]], limits: Limits
    ) -> "LookupInputs":
        """Check decoded columns against the lookup and convert them."""
        decode.require_keys(lookup.plan.keys, keys)
        lookup.require_no_clash(keys)
        rows = decode.rows("entities", {**fields, **keys}, limits.rows)
        limits.require_values("entities and features", rows, len(lookup.names))
        absent = [None] * rows if lookup.computes else []
        request = {
            name: decode.values(fields.get(name, absent), column, "entities") for name, column in lookup.request.items()
        }
        return cls(keys, request, rows)
