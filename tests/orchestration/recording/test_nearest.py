import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from isthmus.orchestration.recording.nearest import nearest

Rows = list[tuple[str | None, int, int]]
ROWS = st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.sampled_from([0, 1]), st.integers(0, 12)), max_size=8)


def nearest_naively(left: Rows, right: Rows, tolerance: int) -> list[int]:
    """The oracle: every pair."""

    def of(row: int) -> int | None:
        name, number, at = left[row]
        near = [
            (abs(at - time), time, place)
            for place, (other, count, time) in enumerate(right)
            if name is not None and (other, count) == (name, number) and abs(at - time) <= tolerance
        ]
        return min(near)[2] if near else None

    found = {row: of(row) for row in range(len(left))}
    result = []
    for row, place in found.items():
        rivals = [] if place is None else [(abs(left[n][2] - right[place][2]), n) for n in found if found[n] == place]
        result.append(place if place is not None and min(rivals)[1] == row else -1)
    return result


def _table(rows: Rows) -> pa.Table:
    names, numbers = ([row[part] for row in rows] for part in (0, 1))
    return pa.table({"name": pa.array(names, pa.string()), "number": pa.array(numbers, pa.int64())})


@given(ROWS, ROWS, st.integers(0, 4))
def test_the_nearest_rows_of_the_same_keys(left: Rows, right: Rows, tolerance: int) -> None:
    # Rows of the same keys and time are the same to whoever asks for the nearest.
    right = list(dict.fromkeys(right))
    times = [np.array([row[2] for row in rows], np.int64) for rows in (left, right)]
    found = nearest(_table(left), times[0], _table(right), times[1], tolerance)
    assert found.tolist() == nearest_naively(left, right, tolerance)
