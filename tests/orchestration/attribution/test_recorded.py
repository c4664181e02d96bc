"""Recorded predictions in place of rows of a training set, and a single one explained."""

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from isthmus.distill.gates import STAGES
from isthmus.features.errors import DataError, RequestError
from isthmus.orchestration.attribution.attribute import attribute, day_range
from isthmus.orchestration.attribution.explain import explain
from isthmus.orchestration.attribution.recorded import ID
from isthmus.orchestration.attribution.report import Attribution
from isthmus.orchestration.attribution.stages import DISTILLATION, RUNTIME, SKEW, STALENESS
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import collect
from isthmus.orchestration.recording.table import RecordedAnswers
from isthmus.orchestration.training.set import training_set
from isthmus.serving.recorder.batch import AnswerGroup
from isthmus.serving.recorder.spool import segments
from tests.commandline import run
from tests.orchestration.attribution import machines

STALE, GOOD = day_range("2024-02-18", "2024-02-19"), day_range("2024-02-19", "2024-02-20")
ASKED = machines.MACHINES * machines.ASKED


def _moved(result: Attribution) -> dict[str, float]:
    """How far each stage moves the scores of all rows."""
    return {
        name: 0.0 if name in result.unknown else float(np.abs(result.table[name].to_numpy()).sum()) for name in STAGES
    }


def _require_sums(result: Attribution) -> None:
    known = [name for name in STAGES if name not in result.unknown]
    sums = np.sum([result.table[name].to_numpy() for name in known], axis=0)
    assert np.abs(result.table["answer"].to_numpy() - result.table["ideal"].to_numpy() - sums).max() <= 1e-12
    for measure in result.measures.values():
        assert abs(sum(part.value for part in measure.parts.values()) - measure.difference) <= 1e-12


@pytest.mark.accept
@pytest.mark.slowest
def test_what_redis_gave_and_what_was_answered(recorded: Path) -> None:
    project = Project(recorded)
    assert collect(project).problems == ()
    good, stale = (attribute(project, recorded=True, days=days) for days in (GOOD, STALE))
    for result in (good, stale):
        _require_sums(result)
        assert (result.rows, result.matched, result.left_out, result.unknown) == (ASKED, ASKED, {}, {})
        assert {"auc", "log_loss", "score"} == result.measures.keys()
    moved = _moved(good)
    assert moved[STALENESS] == moved[SKEW] == 0
    # Torch and ONNX Runtime round otherwise.
    assert moved[RUNTIME] < 1e-4 < moved[DISTILLATION]
    # The same rows of the training set have the same ideal.
    other = attribute(project, days=GOOD)
    assert other.measures["auc"].ideal == good.measures["auc"].ideal
    # What a day's staleness changed is in its part, whatever the student does.
    changed = {name: abs(moved[name] - _moved(stale)[name]) for name in STAGES}
    assert changed[STALENESS] >= 0.95 * sum(changed.values()) > 10
    everything = attribute(project, recorded=True)
    assert everything.rows == 2 * ASKED


def test_fields_that_were_sent_otherwise_are_skew(recorded: Path) -> None:
    """The training set says what the speeds were."""
    project = Project(recorded)
    collect(project)
    before = _moved(attribute(project, recorded=True, days=GOOD))
    file = recorded / "data" / "asked.parquet"
    rows = pq.read_table(file)
    place = rows.column_names.index("speed")
    pq.write_table(rows.set_column(place, "speed", pa.array((rows["speed"].to_numpy() + 1) % 3)), file)
    training_set(project)
    after = attribute(project, recorded=True, days=GOOD)
    _require_sums(after)
    changed = {name: abs(_moved(after)[name] - before[name]) for name in STAGES}
    assert changed[SKEW] >= 0.95 * sum(changed.values()) > 1


def test_what_the_runtime_said_otherwise_is_its_part(recorded: Path) -> None:
    project = Project(recorded)

    def other(group: AnswerGroup) -> AnswerGroup:
        outputs = (np.frombuffer(group.outputs, "<f4") * np.float32(0.5)).tobytes()
        return msgspec.structs.replace(group, outputs=outputs)

    machines.alter(segments(project.spool), other)
    collect(project)
    result = attribute(project, recorded=True, days=GOOD)
    _require_sums(result)
    moved = _moved(result)
    assert moved[RUNTIME] >= 0.95 * (sum(moved.values()) - moved[DISTILLATION]) > 1
    assert moved[STALENESS] == moved[SKEW] == 0


def test_what_is_not_known_is_left_out_and_said(recorded: Path) -> None:
    project = Project(recorded)
    seen: list[int] = []

    def other(group: AnswerGroup) -> AnswerGroup:
        if seen:
            return group
        seen.append(1)
        (view,) = group.views
        content, digest = np.frombuffer(view.content, np.int64).copy(), np.frombuffer(group.digest, np.uint64).copy()
        content[0] ^= 1
        digest[1:3] ^= np.uint64(1)
        views = (msgspec.structs.replace(view, content=content.tobytes()),)
        return msgspec.structs.replace(group, views=views, digest=digest.tobytes())

    machines.alter(segments(project.spool), other)
    collect(project)
    result = attribute(project, recorded=True)
    assert result.rows == 2 * ASKED - 3
    assert result.left_out == {
        "the row that Redis returned is not in the history: see `isthmus answers replay`": 1,
        "the model was fed different inputs: see `isthmus answers replay`": 2,
    }
    with pytest.raises(RequestError, match="--fed: cannot be combined with --recorded"):
        attribute(project, recorded=True, fed=recorded / "fed.parquet")
    with pytest.raises(RequestError, match="the table has no prediction from 2024-01-01"):
        attribute(project, recorded=True, days=day_range("2024-01-01", "2024-01-02"))
    shutil.rmtree(next((project.state / "deployments").glob("[0-9a-f]*")))
    with pytest.raises(RequestError, match="is gone"):
        attribute(project, recorded=True)


def test_an_answer_explained(recorded: Path) -> None:
    project = Project(recorded)
    collect(project)
    table = attribute(project, recorded=True, days=STALE).table
    assert table.column_names[:3] == [ID, "machine", "event_timestamp"]
    rows = table.to_pylist()
    worst = max(rows, key=lambda row: abs(row[STALENESS]))
    found = _explained(recorded, worst[ID])
    (row,) = found["rows"]
    # As among all the others.
    assert row["keys"] == {"machine": worst["machine"]}
    assert (row["score"]["ideal"], row["score"]["answer"]) == (worst["ideal"], worst["answer"])
    for stage in STAGES:
        assert row["score"]["parts"][stage]["value"] == pytest.approx(worst[stage], abs=1e-6)
    assert abs(sum(part["value"] for part in row["score"]["parts"].values()) - row["score"]["difference"]) <= 1e-12
    load = row["features"]["machine_load__load"]
    assert load["ideal"] != load["served"] == load["fed"]
    assert len(set(row["features"]["speed"].values())) == 1
    assert row["label"] in (0.0, 1.0)
    assert "<svg" in Path(found["page"]).read_text()
    done = run("answers", "explain", worst[ID], cwd=recorded)
    assert f"Row 1, machine {worst['machine']}: " in done.stdout
    assert "machine_load__load" in done.stdout
    assert "1 of 2 inputs were ideal." in done.stdout
    # One that was not stale: its parts are the student's alone.
    good = attribute(project, recorded=True, days=GOOD).table[ID][0].as_py()
    (row,) = explain(project, good).rows
    assert row.differing == []
    assert row.score.parts[DISTILLATION].value == pytest.approx(row.score.difference, abs=1e-6)
    # Questions that the training set does not have.
    file = recorded / "data" / "asked.parquet"
    pq.write_table(pq.read_table(file).slice(0, ASKED * (machines.DAYS - 1)), file)
    training_set(project)
    apart = explain(project, good)
    assert apart.unknown.keys() == {SKEW}
    assert apart.rows[0].label is None
    assert attribute(project, recorded=True).matched == ASKED


def test_questions_are_matched_as_labels_are_declared_to_be(recorded: Path) -> None:
    project = Project(recorded)
    collect(project)
    file = recorded / "definitions.py"
    text = file.read_text()
    text = text.replace("import (", "import (\n    Monitor,")
    within = text.replace("seeds=1,", "seeds=1, monitor=Monitor(within=timedelta(minutes=1)),")
    # All questions of a day are asked a minute and a half later.
    asked = recorded / "data" / "asked.parquet"
    rows = pq.read_table(asked)
    late = [moment + timedelta(seconds=90) for moment in rows["asked_at"].to_pylist()]
    pq.write_table(rows.set_column(1, "asked_at", pa.array(late, rows.schema.field("asked_at").type)), asked)
    training_set(project)
    assert attribute(project, recorded=True, days=GOOD).matched == ASKED
    file.write_text(within)
    assert attribute(Project(recorded), recorded=True, days=GOOD).matched == 0
    file.write_text(within.replace("minutes=1)", "minutes=2), match=['machine', 'speed']"))
    assert attribute(Project(recorded), recorded=True, days=GOOD).matched == ASKED


def test_an_answer_that_cannot_be_explained(recorded: Path) -> None:
    project = Project(recorded)
    waiting = segments(project.spool)[0].name.partition("-")[0]
    with pytest.raises(RequestError, match=r"is not in the table yet\. Run `isthmus answers collect`"):
        explain(project, f"{waiting}-1")
    collect(project)
    table = RecordedAnswers(project.offline)
    numbers = table.read(ds.field("run") == waiting)
    first, identity, left = numbers["id"].slice(0, 3).to_pylist()
    with pytest.raises(RequestError, match="is not an answer id"):
        explain(project, "nothing")
    with pytest.raises(RequestError, match="is not in the table"):
        explain(project, "0123456789ab-1")
    # A batch that was dropped, and answers that were kept long enough.
    write_deltalake(table.path, numbers.filter(pa.array([n != 1 for n in range(len(numbers))])), mode="overwrite")
    with pytest.raises(RequestError, match=r"was dropped, .*: the table has later answers"):
        explain(project, identity)
    write_deltalake(table.path, numbers.slice(2), mode="overwrite")
    with pytest.raises(RequestError, match=r"is not in the table.* older than `keep_days`"):
        explain(project, first)
    history = Path(project.offline) / machines.VIEW
    history.rename(history.with_name("away"))
    with pytest.raises(DataError, match="1 row was skipped: offline table of machine_load: nothing at"):
        explain(project, left)
    history.with_name("away").rename(history)
    shutil.rmtree(next((project.state / "deployments").glob("[0-9a-f]*")))
    with pytest.raises(DataError, match="is gone"):
        explain(project, left)
    looked = numbers.slice(2, 1)
    looked = looked.set_column(looked.column_names.index("route"), "route", pa.array(["lookup"]))
    write_deltalake(table.path, looked, mode="overwrite")
    with pytest.raises(RequestError, match="is a lookup and has no score"):
        explain(project, looked["id"][0].as_py())


def _explained(root: Path, identity: str) -> dict[str, Any]:
    done = run("answers", "explain", identity, "--json", cwd=root)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
