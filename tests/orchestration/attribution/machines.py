"""A small project whose teacher and student agree: machines that fail by their load of the day and by what they do.

Loads differ from day to day, so that what is a day old is wrong.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.features.days import DAY
from isthmus.features.offline.log import Materialization, MaterializationLog
from isthmus.features.offline.store import OfflineStore
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.verify import verify
from isthmus.serving.recorder.batch import ANSWER, AnswerGroup, batches, encoded
from isthmus.serving.recorder.spool import segments
from tests.orchestration.server.served import served

START = 1_704_067_200_000_000
"""2024-01-01."""
DAYS, MACHINES, ASKED = 50, 40, 3
VIEW, MODEL = "machine_load", "failure"
MINUTE = 60_000_000

SETTINGS = """\
[project]
name = "machines"
now = 2024-02-20T00:00:00Z

[profiles.serving]
precision = "fp32"
latency_objective_ms = 1000
"""

DEFINITIONS = '''\
"""Will this machine fail? Asked in the course of a day."""

from datetime import timedelta

from pyspark.sql import DataFrame

from isthmus import (
    Distillation,
    Entity,
    FeatureService,
    Field,
    Float64,
    Int64,
    RequestSource,
    Settings,
    Source,
    Tabular,
    spine,
    transform,
)

readings = Source("readings", path="data/readings.parquet", timestamp="read_at", known="read_at")
asked = Source("asked", path="data/asked.parquet", timestamp="asked_at", known="known_at")

machine = Entity("machine", join_keys={"machine": Int64})


@transform(
    entities=[machine],
    sources=[readings],
    schema=[Field("load", Float64, "device"), Field("heat", Float64)],
    ttl=None,
)
def machine_load(readings: DataFrame) -> DataFrame:
    """What a machine reads at midnight."""
    return readings.select("machine", "read_at", "load", "heat")


job = RequestSource("job", schema=[Field("speed", Float64)])


@spine(entities=[machine], sources=[asked], request=job, label=Field("failed", Int64))
def asks(asked: DataFrame) -> DataFrame:
    """Every question."""
    return asked.selectExpr("machine", "asked_at AS event_timestamp", "known_at", "speed", "failed")


service = FeatureService("failure_inputs", features=[machine_load[["load"]], job])

failure = Distillation(
    "failure", spine=asks, teacher=service, student=service, seeds=1, gates=[],
    task=Tabular(teacher_rounds=40, hidden=(32, 16), soft_weight=0.9),
    settings=Settings(batch=128, epochs=30, learning_rate=1e-2),
)
'''


def write(root: Path) -> Path:
    """Writes isthmus.toml, definitions.py and the data into a folder."""
    (root / "data").mkdir(parents=True)
    (root / "isthmus.toml").write_text(SETTINGS)
    (root / "definitions.py").write_text(DEFINITIONS)
    chance = np.random.default_rng(0)
    load = chance.integers(0, 4, (DAYS, MACHINES))
    days, machines = (axis.ravel() for axis in np.indices(load.shape))
    readings = {
        "machine": machines, "read_at": _times(START + days * DAY), "load": load.ravel().astype(float),
        "heat": chance.random(load.size),
    }  # fmt: skip
    pq.write_table(pa.table(readings), root / "data" / "readings.parquet")
    days, machines = np.repeat(days, ASKED), np.repeat(machines, ASKED)
    # No two questions of a machine at one moment: they would have the same keys and time.
    turn = np.arange(days.size) % ASKED
    at = START + days * DAY + (60 + 440 * turn + chance.integers(0, 440, days.size)) * MINUTE
    speed = chance.integers(0, 3, days.size).astype(float)
    odds = 1.2 * (load[days, machines] - 1.5) + 0.7 * (speed - 1)
    asked = {
        "machine": machines, "asked_at": _times(at), "known_at": _times(at + 30 * MINUTE), "speed": speed,
        "failed": (chance.random(days.size) < 1 / (1 + np.exp(-odds))).astype(int),
    }  # fmt: skip
    pq.write_table(pa.table(asked), root / "data" / "asked.parquet")
    return root


def _times(micros: np.ndarray) -> pa.Array:
    return pa.array(micros, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


def made(root: Path) -> None:
    """The project with a package."""
    write(root)
    for step in (apply, build, training_set, distill, export):
        step(Project(root))


def serve(root: Path, late: int = 0, first: int = DAYS // 2) -> None:
    """Writes what the log says where each day was materialized at its first minute, and `late` days after."""
    project = Project(root)
    store = OfflineStore(project.offline)
    history = store.history(project.applied().views[VIEW])
    log = MaterializationLog(store.root)
    for day in range(first, DAYS):
        at = START + day * DAY + MINUTE
        readable = at + late * DAY
        log.append(Materialization(
            VIEW, history.view.hash, history.version, history.fingerprint, at, readable, readable, MACHINES,
        ))  # fmt: skip


STALE_DAY, DAY_SERVED = DAYS - 2, DAYS - 1
"""The day whose questions were answered with the rows of the day before, and one that was served as it should be."""


def recorded(root: Path) -> None:
    """Fills the spool of a project with predictions, for each question of two days."""
    file = root / "isthmus.toml"
    file.write_text(f"{file.read_text()}\n[server.record]\n")
    for day in (STALE_DAY, DAY_SERVED):
        # What Redis has is that of the day before the stale one, and that of the other day.
        at = START + (day + (day == DAY_SERVED)) * DAY - MINUTE
        now = pa.scalar(at, pa.int64()).cast(pa.timestamp("us")).as_py().isoformat()
        text = file.read_text()
        file.write_text(text.replace(text[text.index("now = ") :].partition("\n")[0], f"now = {now}Z"))
        project = Project(root)
        materialize(project)
        if day == STALE_DAY:
            verify(project)
            deploy(project)
        ask(project, day)


def ask(project: Project, day: int) -> None:
    """Asks every question of a day, and has it recorded for its moment: clocks of tests stand still."""
    known = {path.name for path in segments(project.spool)}
    questions = questions_of(project.root, day)
    with served(project, model=True) as http:
        for row in questions:
            body = {"entities": {"machine": [row["machine"]]}, "request": {"speed": [row["speed"]]}}
            assert http.post("/predict", json=body).status_code == 200
    times = np.array([row["asked_at"].value for row in questions]) // 1000

    def moved(group: AnswerGroup) -> AnswerGroup:
        answers = np.frombuffer(group.answers, ANSWER).copy()
        answers["at"] = times[answers["sequence"] - first]
        return msgspec.structs.replace(group, answers=answers.tobytes())

    ours = [path for path in segments(project.spool) if path.name not in known]
    first = min(int(np.frombuffer(group.answers, ANSWER)["sequence"].min()) for group in _groups(ours))
    alter(ours, moved)


def questions_of(root: Path, day: int) -> list[dict[str, Any]]:
    """The questions of a day, in order."""
    table = pq.read_table(root / "data" / "asked.parquet").to_pandas()
    begin = pa.scalar(START + day * DAY, pa.int64()).cast(pa.timestamp("us", tz="UTC")).as_py()
    end = pa.scalar(START + (day + 1) * DAY, pa.int64()).cast(pa.timestamp("us", tz="UTC")).as_py()
    own = table[(table["asked_at"] >= begin) & (table["asked_at"] < end)].sort_values("asked_at", kind="stable")
    rows: list[dict[str, Any]] = own.to_dict("records")
    return rows


def _groups(paths: Iterable[Path]) -> list[AnswerGroup]:
    return [group for path in paths for batch in batches(path.read_bytes()) for group in batch.groups]


def alter(paths: Iterable[Path], change: Callable[[AnswerGroup], AnswerGroup]) -> None:
    """Changes answers that wait in the spool."""
    for path in paths:
        changed = [
            msgspec.structs.replace(batch, groups=tuple(map(change, batch.groups)))
            for batch in batches(path.read_bytes())
        ]
        path.write_bytes(b"".join(map(encoded, changed)))
