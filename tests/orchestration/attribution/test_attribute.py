import json
import shutil
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import numpy_helper
from safetensors.torch import load_file, save_file

from isthmus.dagster import build_definitions
from isthmus.distill.gates import STAGES
from isthmus.distill.onnx.runtime import ort_format
from isthmus.features.errors import ConfigurationError, DataError, RequestError
from isthmus.features.offline.log import FOLDER
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.attribution.attribute import attribute, day_range
from isthmus.orchestration.attribution.report import Attribution
from isthmus.orchestration.attribution.stages import DISTILLATION, PRECISION, RUNTIME, SKEW, STALENESS
from isthmus.orchestration.graph.steps import run_step
from isthmus.orchestration.models.students import export
from isthmus.orchestration.project import Project
from isthmus.orchestration.steps.step import NodeCheck, StepRequest
from isthmus.orchestration.training.set import training_set
from tests.commandline import run
from tests.distill.packages import resum
from tests.orchestration.attribution import machines

CHECK = "stays_close_to_its_ideal"


def _package(root: Path) -> Path:
    return Artifacts.of(Project(root)).last_package()


def _inputs(root: Path) -> pa.Table:
    """What the model of the healthy project was fed."""
    rows = Artifacts.of(Project(root)).current_training_set().table()
    return rows.select(["machine", "event_timestamp", "machine_load__load", "speed"])


def _stale(root: Path) -> None:
    """Each day becomes readable a day late."""
    shutil.rmtree(root / ".isthmus" / "offline" / FOLDER)
    machines.serve(root, late=1)


def _wrong(root: Path) -> None:
    """A student that learned the opposite."""
    file = Artifacts.of(Project(root)).last_model() / "student.safetensors"
    weights = load_file(file)
    last = max(name for name in weights if name.startswith("layers.") and name.endswith("weight"))
    save_file({name: -value if name == last else value for name, value in weights.items()}, file)
    export(Project(root))


def _changed(file: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> bytes:
    model = onnx.load(file)
    for tensor in model.graph.initializer:
        before = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(change(tensor.name, before).astype(before.dtype), tensor.name))
    changed: bytes = model.SerializeToString()
    return changed


def _saturated(root: Path) -> None:
    """Activations beyond a tenth of their range are cut off."""
    package, seen = _package(root), []
    scales = {
        node.input[1] for node in onnx.load(package / "model.int8.onnx").graph.node if node.op_type == "QuantizeLinear"
    }

    def change(name: str, value: np.ndarray) -> np.ndarray:
        if name in scales:
            seen.append(name)
        return value / 10 if name in scales else value

    model = _changed(package / "model.int8.onnx", change)
    assert seen
    (package / "model.int8.onnx").write_bytes(model)
    (package / "model.int8.ort").write_bytes(ort_format(model))
    resum(package)


def _tampered(root: Path) -> None:
    """The file that is served answers as if a layer had other weights; the one beside it is as it was."""
    package = _package(root)
    model = _changed(package / "model.fp32.onnx", lambda _, value: value / 2 if value.ndim == 2 else value)
    (package / "model.fp32.ort").write_bytes(ort_format(model))
    resum(package)


def _skewed(root: Path) -> Path:
    """What the model was fed: one input is another than what was served."""
    table = _inputs(root)
    load = pa.array((table["machine_load__load"].to_numpy() + 1) % 4)
    file = root / "fed.parquet"
    pq.write_table(table.set_column(2, "machine_load__load", load), file)
    return file


@pytest.mark.accept
@pytest.mark.slowest
@pytest.mark.parametrize(
    ("stage", "fault", "precision"),
    [
        (STALENESS, _stale, "fp32"),
        (SKEW, _skewed, "fp32"),
        (DISTILLATION, _wrong, "fp32"),
        (PRECISION, _saturated, "int8"),
        (RUNTIME, _tampered, "fp32"),
    ],
)
def test_a_fault_is_in_the_part_of_its_stage(
    served: Path, stage: str, fault: Callable[[Path], Path | None], precision: str
) -> None:
    healthy = attribute(Project(served), precision=precision)
    faulty = attribute(Project(served), fed=fault(served), precision=precision)
    for side in (healthy, faulty):
        table, known = side.table, [name for name in STAGES if name not in side.unknown]
        sums = np.sum([table[name].to_numpy() for name in known], axis=0)
        assert np.abs(table["answer"].to_numpy() - table["ideal"].to_numpy() - sums).max() <= 1e-12
        for measure in side.measures.values():
            assert abs(sum(part.value for part in measure.parts.values()) - measure.difference) <= 1e-12
            assert all(part.low - 1e-12 <= part.value <= part.high + 1e-12 for part in measure.parts.values())
    # Of what the fault changed of all rows, and of what it changed of a measure by labels.
    rows = {name: np.abs(_column(faulty, name) - _column(healthy, name)).sum() for name in STAGES}
    losses = {name: abs(_loss(faulty, name) - _loss(healthy, name)) for name in STAGES}
    for moved in (rows, losses):
        assert moved[stage] >= 0.95 * sum(moved.values()) > 0


def _loss(side: Attribution, stage: str) -> float:
    parts = side.measures["log_loss"].parts
    return parts[stage].value if stage in parts else 0.0


def _column(side: Attribution, stage: str) -> np.ndarray:
    """The parts of a stage; of one of which nothing is known, zeros."""
    known: np.ndarray = side.table[stage].to_numpy() if stage not in side.unknown else np.zeros(side.rows)
    return known


def test_what_nobody_served_has_no_part(unserved: Path) -> None:
    found = attribute(Project(unserved))
    assert found.unknown[STALENESS] == "machine_load was never materialized under this contract"
    machines.serve(unserved, late=30)
    found = attribute(Project(unserved))
    assert found.unknown[STALENESS].startswith("machine_load was first served at 2024-02-25T00:01:00")
    assert list(found.measures["auc"].parts) == [DISTILLATION, PRECISION, RUNTIME]
    report = Artifacts.of(Project(unserved)).last_report()
    # What is known of both models without this: the figures of the test part.
    assert found.measures["auc"].ideal == report["models"]["teacher"]["quality"]["auc"]
    assert found.measures["auc"].answer == pytest.approx(report["models"]["student"]["quality"]["auc"], abs=1e-6)
    parts = Artifacts.of(Project(unserved)).current_training_set().table().num_rows
    assert 0 < found.rows < parts


@pytest.mark.accept
def test_rows_before_serving_are_left_out(served: Path) -> None:
    found = attribute(Project(served), days=day_range("2024-01-20", "2024-02-01"))
    assert found.left_out == {"nothing was served yet": 6 * machines.MACHINES * machines.ASKED}
    assert (found.rows, found.measures["score"].parts[STALENESS].value) == (
        found.left_out["nothing was served yet"],
        0.0,
    )


@pytest.mark.accept
@pytest.mark.slowest
def test_a_range_of_a_later_training_set(served: Path) -> None:
    """Rows that the student has no training set with: their teacher is asked anew, and says the same."""
    days = day_range("2024-02-10", "2024-02-14")
    before = attribute(Project(served), days=days)
    orders = served / "data" / "asked.parquet"
    rows = pq.read_table(orders)
    pq.write_table(rows.slice(machines.MACHINES * machines.ASKED), orders)
    made = training_set(Project(served))
    assert made.id != before.training_set
    after = attribute(Project(served), days=days)
    assert after.training_set == made.id
    assert after.table.equals(before.table)


@pytest.mark.accept
def test_rows_that_are_fed_twice_or_not_at_all_are_left_out(served: Path) -> None:
    table = pq.read_table(_skewed(served))
    last = table.num_rows - 1
    file = served / "fed.arrow"
    with pa.ipc.new_file(file, table.schema) as out:
        # The second to last row twice, and no last one.
        out.write(pa.concat_tables([table.slice(0, last), table.slice(last - 1, 1)]))
    found = attribute(Project(served), fed=file)
    assert found.left_out == {f"not exactly once in {file}": 2}
    assert found.each[SKEW] > 0.1


@pytest.mark.accept
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda table: table.drop_columns(["machine"]),
            "no column machine; expected machine, event_timestamp",
        ),
        (lambda table: table.append_column("heat", table["speed"]), "column heat, which is not an input"),
        (lambda table: table.select(["machine", "event_timestamp"]), "no input"),
        (lambda table: table.slice(0, 10), "none of its 10 rows is one of the"),
        (lambda table: table.set_column(0, "machine", pa.array(["m"] * len(table))), "its keys have the wrong types"),
        (lambda table: table.set_column(3, "speed", pa.array(["m"] * len(table))), "column speed"),
    ],
)
def test_a_file_that_is_not_what_the_model_was_fed(
    served: Path, change: Callable[[pa.Table], pa.Table], message: str
) -> None:
    file = served / "fed.parquet"
    pq.write_table(change(_inputs(served)), file)
    with pytest.raises(DataError, match=message):
        attribute(Project(served), fed=file)


@pytest.mark.accept
def test_what_is_not_there(served: Path) -> None:
    project = Project(served)
    with pytest.raises(DataError, match="cannot be read"):
        attribute(project, fed=served / "none.parquet")
    with pytest.raises(RequestError, match="no row from 2025-01-01 to 2025-01-02; expected days from 2024-01-01"):
        attribute(project, days=day_range("2025-01-01", "2025-01-02"))
    with pytest.raises(RequestError, match="--to is missing"):
        day_range("2025-01-01", None)
    with pytest.raises(RequestError, match="is not a known runtime; expected one of coreml"):
        attribute(project, runtime="java")
    with pytest.raises(RequestError, match="no fp32 model in pte format"):
        attribute(project, runtime="executorch")
    with pytest.raises(RequestError, match="no int4 model in onnx format"):
        attribute(project, precision="int4")
    # Kept answers are gone: the teacher is asked again.
    shutil.rmtree(Artifacts.of(project).outputs)
    assert attribute(project).measures["auc"].ideal > 0.7
    shutil.rmtree(Artifacts.of(project).last_model())
    with pytest.raises(DataError, match="is missing, and cannot be restored from the package"):
        attribute(project)
    Artifacts.of(project).package_pointer.unlink()
    with pytest.raises(DataError, match="Run `isthmus model export`"):
        attribute(project)


@pytest.mark.accept
def test_the_command_and_its_page(served: Path) -> None:
    done = run("model", "attribute", "--fed", str(_skewed(served)), cwd=served)
    assert done.returncode == 0, done.stderr
    assert "log loss: " in done.stdout
    shown = json.loads(run("model", "attribute", "--json", cwd=served).stdout)
    assert shown["measures"]["auc"]["parts"].keys() == {STALENESS, DISTILLATION, PRECISION, RUNTIME}
    assert shown["unknown"].keys() == {SKEW}
    assert len(shown["largest"]) == 10
    page = Path(shown["page"]).read_text()
    assert page.count("<svg") == 3
    assert "waterfall of log loss" in page
    assert "-0.0%" not in page
    rows = pq.read_table(shown["table"])
    assert rows.num_rows == shown["rows"]
    done = run("model", "attribute", "--from", "2024-02-30", "--to", "2024-03-01", cwd=served)
    assert done.returncode == 2


def _bound(root: Path, bounds: str) -> None:
    file = root / "definitions.py"
    file.write_text(file.read_text().replace("seeds=1, gates=[],", f"seeds=1, gates=[], bounds=[{bounds}],"))
    file.write_text(file.read_text().replace("    Float64,\n", "    Float64,\n    Gate,\n"))


@pytest.mark.accept
def test_bounds_are_judged(served: Path) -> None:
    bounds = ('"staleness.row", at_most=0.0', '"distillation.auc", at_least=0.1', '"skew.row", at_most=1')
    _bound(served, ", ".join(f"Gate({bound})" for bound in bounds))
    done = run("model", "attribute", "--json", cwd=served)
    assert done.returncode == 1
    shown = json.loads(done.stdout)
    assert [bound["holds"] for bound in shown["bounds"]] == [True, False, False]
    assert not shown["passed"]
    assert "skew.row has no value" in done.stderr
    assert "expected distillation.auc at least 0.1" in done.stderr


@pytest.mark.accept
def test_bounds_are_a_check_that_blocks_nothing(served: Path) -> None:
    def checks() -> dict[str, dg.AssetCheckSpec]:
        graph = build_definitions(served).resolve_asset_graph()
        return {key.name: graph.get_check_spec(key) for key in graph.asset_check_keys}

    assert CHECK not in checks()
    _bound(served, 'Gate("distillation.auc", at_least=0.1)')
    assert checks()[CHECK].asset_key == dg.AssetKey([machines.MODEL, "package"])
    assert not checks()[CHECK].blocking
    asked = StepRequest("attribute", checks=((f"package/{machines.MODEL}", CHECK),))
    (checked,) = run_step(Project(served), asked, lambda _text, _share: None)
    assert isinstance(checked, NodeCheck)
    assert (checked.passed, checked.blocking) == (False, False)
    assert checked.message.startswith("distillation.auc is ")
    assert checked.metadata["attribution"]["raw_value"].count("data:image/svg+xml") == 3
    json.dumps(checked.metadata)


@pytest.mark.parametrize(
    "bounds", ['Gate("age.auc", at_most=1)', 'Gate("skew.rmse", at_most=1)', 'Gate("skew.auc")', "0.1"]
)
def test_bounds_on_nothing_are_refused(served: Path, bounds: str) -> None:
    _bound(served, bounds)
    with pytest.raises(ConfigurationError, match="bound"):
        Project(served).applied()
