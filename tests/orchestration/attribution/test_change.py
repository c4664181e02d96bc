"""What changed between two periods of a project: rows of its training set, and recorded predictions."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from isthmus.features.days import DAY, Days
from isthmus.features.errors import RequestError
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.attribution.periods.change import change, segments_of
from isthmus.orchestration.attribution.periods.coalitions import CONTRACT, FEATURES, MODEL, PARTS, POPULATION
from isthmus.orchestration.attribution.periods.page import PeriodChange
from isthmus.orchestration.models.students import export
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import collect
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.set import training_set
from isthmus.package.manifest import open_package
from tests.commandline import run
from tests.distill.packages import resum
from tests.orchestration.attribution import machines

BEFORE, AFTER = Days.parse("2024-01-10", "2024-01-30"), Days.parse("2024-01-30", "2024-02-19")
LOAD = "machine_load__load"


def _require_sums(result: PeriodChange) -> None:
    for measure in result.measures.values():
        assert abs(sum(part.value for part in measure.parts.values()) - measure.difference) <= 1e-12
        assert all(part.low - 1e-12 <= part.value <= part.high + 1e-12 for part in measure.parts.values())


def _require_whole(result: PeriodChange, part: str, measure: str = "score") -> None:
    _require_sums(result)
    moved = {name: abs(own.value) for name, own in result.measures[measure].parts.items()}
    assert moved[part] >= 0.95 * sum(moved.values()) > 0.02


def _times(column: pa.ChunkedArray) -> np.ndarray:
    times: np.ndarray = column.cast(pa.int64()).to_numpy()
    return times


def test_the_same_change_is_one_of_population_or_of_features_by_its_segments(unserved: Path) -> None:
    """In the later period only machines of a high load are asked about: each as often as before, at other times."""
    project = Project(unserved)
    table = Artifacts.of(project).current_training_set().table()
    later = _times(table["event_timestamp"]) >= AFTER.first * DAY
    low = later & (table[LOAD].to_numpy() < 2)
    asked = unserved / "data" / "asked.parquet"
    rows = pq.read_table(asked)
    mask = np.isin(
        rows["asked_at"].cast(pa.int64()).to_numpy(), table["event_timestamp"].cast(pa.int64()).to_numpy()[low]
    )
    pq.write_table(rows.filter(pa.array(~mask)), asked)
    training_set(project)
    _require_whole(change(project, days=AFTER, against=BEFORE, by=[LOAD]), POPULATION)
    found = change(project, days=AFTER, against=BEFORE)
    _require_whole(found, FEATURES)
    assert (found.by, found.segments, found.common) == (["machine"], machines.MACHINES, 1.0)
    assert found.measures.keys() == {"score", "log_loss", "auc"}
    # The parts of segments sum to the change, as far as they are listed.
    every = change(project, days=AFTER, against=BEFORE, by=["speed"])
    assert sum(part.moved for part in every.largest) == pytest.approx(every.measures["score"].difference, abs=1e-12)


def _other_package(root: Path) -> tuple[Path, Path]:
    """The last package, and one before it whose student has other weights."""
    project = Project(root)
    last = Artifacts.of(project).last_package()
    file = Artifacts.of(project).last_model() / "student.safetensors"
    weights = load_file(file)
    place = max(name for name in weights if name.startswith("layers.") and name.endswith("bias"))
    before = root / "before"
    shutil.copytree(last, before)
    save_file({name: value + 1 if name == place else value for name, value in weights.items()}, file)
    export(project)
    return before, Artifacts.of(project).last_package()


def test_another_package_and_nothing_else(unserved: Path) -> None:
    before, last = _other_package(unserved)
    project = Project(unserved)
    nothing = change(project, days=AFTER, against=AFTER)
    assert {part: own.value for part, own in nothing.measures["auc"].parts.items()} == dict.fromkeys(PARTS, 0.0)
    assert all(abs(own.value) <= 1e-15 for each in nothing.measures.values() for own in each.parts.values())
    found = change(project, days=AFTER, against=AFTER, package=before)
    _require_whole(found, MODEL)
    _require_whole(found, MODEL, "log_loss")
    assert found.measures["score"].parts[CONTRACT].value == 0
    assert [period.package for period in found.periods] == [open_package(path).files.digest for path in (before, last)]
    # Of another time, too: what changed by chance is small beside it.
    mixed = change(project, days=AFTER, against=BEFORE, package=before).measures["score"]
    assert mixed.parts[MODEL].value == pytest.approx(found.measures["score"].difference, abs=0.02)
    assert mixed.parts[CONTRACT].value == 0
    done = run(
        "model", "attribute", "--from", "2024-01-30", "--to", "2024-02-19", "--against", "2024-01-10", "2024-01-30",
        "--package-against", str(before), "--by", "speed", "--json", cwd=unserved,
    )  # fmt: skip
    shown = json.loads(done.stdout)
    assert shown["by"] == ["speed"]
    assert shown["measures"]["score"]["parts"].keys() == {*PARTS}
    text = Path(shown["page"]).read_text()
    assert text.count("<svg") == 3
    assert "waterfall of log loss" in text
    done = run(
        "model",
        "attribute",
        "--from",
        "2024-01-30",
        "--to",
        "2024-02-19",
        "--against",
        "2024-01-10",
        "2024-01-30",
        cwd=unserved,
    )
    assert "mean score: " in done.stdout
    assert "40 segments by machine; 100.0% of the rows are in segments of both periods." in done.stdout


def _of_another_contract(root: Path, view: str) -> Path:
    """Has the project compute loads otherwise, and its last package run under that contract; returns the one before."""
    project = Project(root)
    last = Artifacts.of(project).last_package()
    before = root / "before"
    shutil.copytree(last, before)
    file = root / "definitions.py"
    text = file.read_text().replace('readings.select("machine", "read_at", "load", "heat")', view)
    file.write_text(text.replace("sources=[readings],", "sources=[readings], version=2,"))
    for step in (apply, build, training_set):
        step(Project(root))
    contract = Project(root).applied()
    (last / "contract.json").write_bytes(contract.dumps())
    manifest = json.loads((last / "manifest.json").read_text())
    (last / "manifest.json").write_text(json.dumps({**manifest, "contract": contract.hash}))
    resum(last)
    return before


def test_another_contract_and_nothing_else(unserved: Path) -> None:
    before = _of_another_contract(unserved, 'readings.selectExpr("machine", "read_at", "load + 1 AS load", "heat")')
    project = Project(unserved)
    found = change(project, days=AFTER, against=AFTER, package=before)
    assert found.unknown == {}
    assert len({period.contract for period in found.periods}) == 2
    _require_whole(found, CONTRACT)
    assert found.measures["score"].parts[MODEL].value == found.measures["score"].parts[POPULATION].value == 0
    # The table of the contract before is gone: each row has what it was joined with.
    shutil.rmtree(Path(project.offline) / machines.VIEW)
    found = change(project, days=AFTER, against=AFTER, package=before)
    assert found.unknown[CONTRACT].startswith("its features are not known any more")
    assert found.measures["score"].difference == 0


def test_segments_by_as_many_keys_as_are_there_in_both_periods() -> None:
    rows = pa.table({"origin": ["JFK", "LGA"] * 4, "tail": list("abcdefgh"), "hour": [1, 1, 1, 1, 9, 9, 9, 9]})
    by, found = segments_of(rows, [], ["origin", "tail"], 4)
    assert (by, found.places.tolist()) == (["origin"], [0, 1] * 4)
    by, found = segments_of(rows, ["tail"], ["origin", "tail"], 4)
    assert (by, len(found.values)) == (["tail"], 8)
    by, found = segments_of(rows, ["hour", "origin"], ["origin", "tail"], 4)
    assert found.values[0] == {"hour": "1", "origin": "JFK"}
    # A single key stays, whatever there is of it.
    assert segments_of(rows, [], ["tail"], 4)[0] == ["tail"]


def test_what_is_asked_wrongly(unserved: Path) -> None:
    project = Project(unserved)
    with pytest.raises(RequestError, match="--from and --to are missing"):
        change(project, days=None, against=BEFORE)
    with pytest.raises(RequestError, match="--by heat: is not a column of the rows"):
        change(project, days=AFTER, against=BEFORE, by=["heat"])
    with pytest.raises(RequestError, match="no row from 2025-01-01"):
        change(project, days=AFTER, against=Days.parse("2025-01-01", "2025-01-02"))
    done = run("model", "attribute", "--by", "speed", cwd=unserved)
    assert (done.returncode, "cannot be combined with attribute without --against" in done.stderr) == (2, True)


def test_two_days_of_recorded_predictions(recorded: Path) -> None:
    project = Project(recorded)
    collect(project)
    first, second = (Days.parse(f"2024-02-{day}", f"2024-02-{day + 1}") for day in (18, 19))
    found = change(project, days=second, against=first, recorded=True)
    _require_sums(found)
    assert [period.rows for period in found.periods] == [machines.MACHINES * machines.ASKED] * 2
    assert found.measures.keys() == {"score", "log_loss", "auc"}
    # What was fed on the first day was a day old: its scores are of no use.
    assert found.measures["auc"].before < 0.75 < found.measures["auc"].after
    assert found.measures["auc"].parts[FEATURES].value > 0.1
    assert found.measures["auc"].parts[MODEL].value == 0
    with pytest.raises(RequestError, match="cannot be combined with --recorded"):
        change(project, days=second, against=first, recorded=True, package=recorded)


def test_predictions_that_are_newer_than_the_training_set_have_no_labels(recorded: Path) -> None:
    asked = recorded / "data" / "asked.parquet"
    rows = pq.read_table(asked)
    first, second = (Days.parse(f"2024-02-{day}", f"2024-02-{day + 1}") for day in (18, 19))
    pq.write_table(rows.filter(pa.array(_times(rows["asked_at"]) < first.first * DAY)), asked)
    project = Project(recorded)
    training_set(project)
    collect(project)
    found = change(project, days=second, against=first, recorded=True)
    _require_sums(found)
    assert found.measures.keys() == {"score"}
