from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from isthmus.distill.cache import Outputs, cached, digest
from isthmus.features.files import publish

KEY = {"contract": "c", "inputs": [["x", "Int64"]]}


def outputs() -> Outputs:
    return Outputs(np.arange(100, dtype=np.float32), 7, 28, 1.5, 2.5)


class Teacher:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> Outputs:
        self.asked += 1
        return outputs()


def ask(cache: Path, teacher: Teacher, rows: int = 100, key: dict[str, object] = KEY) -> tuple[Outputs, list[str]]:  # type: ignore[assignment]
    notes: list[str] = []
    return cached(cache, key, rows, teacher, notes.append), notes


def test_outputs_are_made_once(tmp_path: Path) -> None:
    teacher = Teacher()
    ask(tmp_path, teacher)
    kept, notes = ask(tmp_path, teacher)
    assert teacher.asked == 1
    assert notes == [f"kept outputs {digest(KEY)[:12]}"]
    assert isinstance(kept.logits, np.memmap)
    np.testing.assert_array_equal(kept.logits, outputs().logits)
    assert (kept.parameters, kept.bytes, kept.p50_us, kept.p99_us) == (7, 28, 1.5, 2.5)
    assert sorted(file.name for file in (tmp_path / digest(KEY)).iterdir()) == ["logits.npy", "record.json"]
    assert [folder.name for folder in tmp_path.iterdir()] == [digest(KEY)]


def test_another_key_is_another_folder(tmp_path: Path) -> None:
    teacher = Teacher()
    ask(tmp_path, teacher)
    ask(tmp_path, teacher, key={**KEY, "contract": "d"})
    assert teacher.asked == 2


@pytest.mark.parametrize("damage", ["flip", "truncate", "no array", "no record", "half a record", "other rows"])
def test_damaged_outputs_are_made_again(tmp_path: Path, damage: str) -> None:
    teacher = Teacher()
    ask(tmp_path, teacher)
    array, record = tmp_path / digest(KEY) / "logits.npy", tmp_path / digest(KEY) / "record.json"
    rows = 100
    if damage == "flip":
        data = bytearray(array.read_bytes())
        data[-1] ^= 1
        array.write_bytes(data)
    elif damage == "truncate":
        array.write_bytes(array.read_bytes()[:-8])
    elif damage == "no array":
        array.unlink()
    elif damage == "no record":
        record.unlink()
    elif damage == "half a record":
        record.write_bytes(record.read_bytes()[:40])
    else:
        rows = 99
    _, notes = ask(tmp_path, teacher, rows)
    assert teacher.asked == 2
    assert "damaged and made again" in notes[0]
    if damage != "other rows":
        assert ask(tmp_path, teacher)[1] == [f"kept outputs {digest(KEY)[:12]}"]


def test_a_folder_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "file").write_text("old", encoding="utf-8")

    def fail(folder: Path) -> None:
        (folder / "file").write_text("new", encoding="utf-8")
        raise RuntimeError("full disk")

    publish(tmp_path / "kept", write)
    with pytest.raises(RuntimeError, match="full disk"):
        publish(tmp_path / "kept", fail)
    assert (tmp_path / "kept" / "file").read_text(encoding="utf-8") == "old"
    assert [folder.name for folder in tmp_path.iterdir()] == ["kept"]


def test_a_full_disk_is_told_with_the_folder_that_was_to_be(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        with pa.OSFile("/dev/full", "w") as file:
            file.write(b"x" * 100_000)

    with pytest.raises(OSError, match=r"No space left on device: '.*/set'"):
        publish(tmp_path / "set", write)
    assert list(tmp_path.iterdir()) == []
