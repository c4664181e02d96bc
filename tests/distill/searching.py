"""A search of students of `tasks.Shaped`; as a script, one that can be killed."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from isthmus.distill.declaration import Search
from isthmus.distill.search.search import JOURNAL, SearchReport, search
from isthmus.distill.search.trials import SearchTrial
from isthmus.distill.settings import Settings
from isthmus.distill.types import Array
from isthmus.features.profiles import ServingProfile
from tests.distill.sampletasks import BROKEN
from tests.distill.support import material, training_set

SHORT = Settings(steps=40, batch=64, learning_rate=1e-2, evaluate_every=10, checkpoint_steps=5)
FASTEST = ServingProfile(precision="fastest", latency_objective_ms=1000, memory_mb=1000)
FP32 = replace(FASTEST, precision="fp32")
INT8 = replace(FASTEST, precision="int8")
UNITS = (1, 2, 4, 8)
AT_ONCE = {"shape": {"units": (BROKEN,)}}
"""Fails before anything is measured."""


def searched(
    folder: Path, table: pa.Table, profile: ServingProfile = FASTEST, *, trials: int | None = None,
    told: Callable[[str], None] = lambda _text: None, of: dict[str, Any] | None = None, **changes: Any,
) -> SearchReport:  # fmt: skip
    """With other values of the search in `of`, of the distillation in `changes`."""
    declared = Search(**{"shape": {"units": UNITS}, "trials": 4, "settings": SHORT, **(of or {})})
    changes = {"task": "tests.distill.sampletasks:Shaped", "search": declared, **changes}
    return search(
        material(table, **changes), folder=folder / "search", cache=folder / "cache", runs=folder / "runs",
        profile=profile, trials=trials, progress=lambda text, _done: told(text),
    )  # fmt: skip


def students(report: SearchReport) -> list[SearchTrial]:
    lines = (report.path / JOURNAL).read_bytes().splitlines()
    # In the end they are measured side by side.
    assert [{**json.loads(line), "p50_us": None} for line in lines] == [
        {**one, "p50_us": None} for one in report.data["tried"]
    ]
    return msgspec.convert(report.data["tried"], list[SearchTrial])


def front_naively(points: Array) -> Array:
    """`front` by definition, in quadratic time."""

    def beaten(point: Array) -> bool:
        return any((rival <= point).all() and (rival < point).any() for rival in points)

    return np.array([not beaten(point) for point in points], bool)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """`FOLDER TRIALS`: says what it is told."""
    folder, trials = sys.argv[1:]
    searched(Path(folder), training_set(600), trials=int(trials), told=say)


if __name__ == "__main__":
    main()
