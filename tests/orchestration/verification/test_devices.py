"""The snapshot in the verdict: every row that devices keep is the tables', and what is not is found."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np
import pytest

from isthmus import GateFailed
from isthmus.distill.runtimes.conversions import CONVERSIONS
from isthmus.distill.runtimes.libraries import require_installed
from isthmus.features.files import read_pointer
from isthmus.features.offline.store import OfflineStore
from isthmus.features.progress import silent
from isthmus.features.values.columns import Values
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import Artifacts, verdict_file
from isthmus.orchestration.graph.steps import run_step
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.models.students import distill, export, parity
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.products import RUNTIMES
from isthmus.orchestration.runtimes.web import NAME as WEB
from isthmus.orchestration.snapshots.create import KEY, signer, snapshot, snapshot_folder
from isthmus.orchestration.steps.step import NodeCheck, StepRequest
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.devices import ComparedSnapshot, compare_snapshot, device_rows
from isthmus.orchestration.verification.modelinputs import PREDICT
from isthmus.orchestration.verification.runtimes import compare_feeds, compare_runtimes
from isthmus.orchestration.verification.verify import require_passed, verify
from isthmus.package.clients import CLIENT
from isthmus.package.featurizer.interpreter import CoreFeeds
from isthmus.package.golden import TensorBytes
from isthmus.package.inspect import inspect
from isthmus.package.manifest import open_package, read_package
from isthmus.package.snapshot.file import SnapshotFile, read_snapshot
from isthmus.package.snapshot.owners import Lines, open_owners
from isthmus.package.snapshot.selection import kept_views
from isthmus.package.verdict import ONNX_RUNTIME, Sample, Verdict
from tests.distill.packages import resum, rewritten
from tests.orchestration.shop import HOUR, Shop, learnable, with_device

SERVICE, VIEW = "late_order_device", "snapshot shelf_demand"
MINUTE = 60_000_000


@pytest.fixture
def project(on_device: Shop) -> Project:
    """A shop of whose stores a device keeps two; without a package, which has tests of its own."""
    shutil.rmtree(on_device.state / "packages")
    on_device.replace("keys={}", 'keys={"store": ["s1", "s2"]}')
    opened = Project(on_device.root)
    snapshot(opened)
    return opened


def _replace(project: Project, changed: dict[bytes, bytes | None]) -> None:
    """Puts another snapshot on the shelf, signed by the project's own key: rows are replaced, or left out."""
    place, views = snapshot_folder(project, SERVICE), kept_views(project.applied(), SERVICE)
    latest = place.latest()
    assert latest is not None
    file = read_snapshot(place.snapshot(latest.snapshot), views)
    rows = {key: row for key, row in {**file.rows["shelf_demand"], **changed}.items() if row is not None}
    fields = {name: getattr(file.header, name) for name in file.header.__struct_fields__}
    header = type(file.header)(**{**fields, "views": (("shelf_demand", len(rows)),)})
    sealed = signer(project).seal(SnapshotFile(header, {"shelf_demand": rows}))
    place.add(sealed, views, 0, discloses=latest.discloses, tables=latest.tables)


def _rows(project: Project) -> dict[bytes, bytes]:
    place = snapshot_folder(project, SERVICE)
    latest = place.latest()
    assert latest is not None
    return dict(
        read_snapshot(place.snapshot(latest.snapshot), kept_views(project.applied(), SERVICE)).rows["shelf_demand"]
    )


def _compared(project: Project, later: int = 0) -> ComparedSnapshot:
    contract, declared = project.applied(), project.distillation()
    histories = [OfflineStore(project.offline).history(view) for view in contract.views.values()]
    return compare_snapshot(project, contract, declared, histories, project.now() + later)


def _differing(verdict: Verdict) -> set[str]:
    return {name for name, part in verdict.named().items() if part.differing}


@pytest.mark.accept
def test_a_snapshot_of_the_tables_passes(project: Project) -> None:
    verdict = verify(project)
    assert verdict.passed
    assert {name: part.compared for name, part in verdict.views[VIEW].items()} == {
        "sold_1d": 30, "distance": 30, "event_timestamp": 30, "known_at": 30, "status": 30,
    }  # fmt: skip
    assert "the snapshot" not in verdict.skipped


def test_whatever_is_wrong_in_it_is_found(project: Project) -> None:
    rows = _rows(project)
    first, second, third, fourth, fifth, *_ = rows
    changed, happened, known = (bytearray(rows[key]) for key in (first, fourth, fifth))
    for row, place in ((changed, -1), (happened, 0), (known, 8)):
        row[place] ^= 1
    other = first.replace(b"s1", b"s9")
    # A value, times, a row that is missing, and one of a key that the tables lack.
    others = {first: changed, fourth: happened, fifth: known, other: rows[second]}
    _replace(project, {third: None, **{key: bytes(row) for key, row in others.items()}})
    verdict = verify(project)
    assert not verdict.passed
    found = {name: part.differing for name, part in verdict.views[VIEW].items()}
    assert found["status"] == 2
    # Likewise of the row that is missing.
    assert (found["event_timestamp"], found["known_at"]) == (2, 2)
    assert found["distance"] >= 1
    assert all(name.startswith(VIEW) for name in _differing(verdict))
    with pytest.raises(GateFailed, match="isthmus features snapshot"):
        require_passed(verdict)


@pytest.mark.accept
def test_a_row_is_null_where_the_features_that_devices_keep_are(built: Shop) -> None:
    with_device(built).replace("features=[shelf_demand, basket]", 'features=[shelf_demand[["distance"]], basket]')
    opened = Project(built.root)
    for step in (apply, build, materialize, snapshot):
        step(opened)
    nulls = [row[16] for row in _rows(opened).values()]
    assert 0 < sum(nulls) < len(nulls)
    assert {VIEW} <= require_passed(verify(opened)).views.keys()


def test_a_snapshot_that_no_device_takes_fails(project: Project) -> None:
    place = snapshot_folder(project, SERVICE)
    latest = place.latest()
    assert latest is not None
    file = place.path(latest.snapshot)
    whole = file.read_bytes()

    def refused() -> str:
        (example,) = _compared(project).views[f"snapshot {SERVICE}"]["file"].examples
        return str(example.online)

    key = (project.snapshots / KEY).read_bytes()
    (project.snapshots / KEY).unlink()
    assert "not signed by the key of the project" in refused()
    (project.snapshots / KEY).write_bytes(key)
    # A letter of the hash in its header: it says that it is of another contract.
    digit = whole.index(b'"hash":"') + 8
    for altered in (whole[: len(whole) // 2], whole[:digit] + bytes([whole[digit] ^ 1]) + whole[digit + 1 :]):
        file.write_bytes(altered)
        assert refused() == "it is damaged: its SHA-256 differs"
    file.unlink()
    assert refused() == "its file is gone"
    verdict = verify(project)
    assert _differing(verdict) == {f"snapshot {SERVICE}.file"}
    with pytest.raises(
        GateFailed, match=rf"1 of .* differ: snapshot {SERVICE}\.file .*Run `isthmus features snapshot`"
    ):
        require_passed(verdict)


def test_what_cannot_be_compared_is_said(project: Project) -> None:
    place = snapshot_folder(project, SERVICE)
    latest = place.latest()
    assert latest is not None
    whole = place.snapshot(latest.snapshot)

    def skipped(later: int = 0) -> str:
        compared = _compared(project, later)
        assert (compared.views, compared.file) == ({}, None)
        return compared.skipped

    views = kept_views(project.applied(), SERVICE)
    read = read_snapshot(whole, views)
    header = msgspec.structs.replace(read.header, hash="0" * 64)
    place.add(signer(project).seal(SnapshotFile(header, read.rows)), views, 0, tables=latest.tables)
    assert skipped().startswith(f"it has contract 000000000000, and {SERVICE} has ")
    snapshot(project)
    assert skipped(6 * HOUR + MINUTE) == (
        "it is 361 minutes old, and devices accept at most 360: run `isthmus features snapshot`"
    )
    shutil.rmtree(place.folder)
    assert verify(project).skipped["the snapshot"] == skipped() == "none was written: run `isthmus features snapshot`"


@pytest.mark.accept
def test_every_runtime_answers_and_is_fed_what_the_tables_have(on_device: Shop, web: None) -> None:
    verdict = require_passed(verify(Project(on_device.root)))
    assert verdict.samples == {
        "rows of request transforms": Sample(500, 2400),
        f"rows in {WEB}": Sample(100, 500),
        "rows asked of the API": Sample(500, 2000),
    }
    assert verdict.skipped == {}
    files = {f"model.{precision}.ort in {WEB}" for precision in ("fp32", "int8")}
    assert verdict.runtimes.keys() == {ONNX_RUNTIME, WEB}
    assert set(verdict.runtimes[WEB].files) == files
    assert set(verdict.runtimes[ONNX_RUNTIME].files) == verdict.files.keys() - files - {PREDICT}
    rows = verdict.runtimes[WEB].rows
    assert 50 < rows <= 100 < 2000 < verdict.runtimes[ONNX_RUNTIME].rows
    assert verdict.device.keys() == verdict.inputs.keys()
    # Of two files, with the rows that a request transform refuses.
    assert {part.compared for part in verdict.device.values()} == {2 * 100}
    assert verdict.files[f"model.fp32.ort in {WEB}"].worst <= 1e-5
    text = (on_device.state / "verdicts" / "late_order.html").read_text()
    assert f">{WEB}</" in text
    assert Verdict.loads(verdict.dumps()) == verdict


def test_a_device_whose_every_row_is_refused_answers_nothing_and_the_verdict_says_so(on_device: Shop) -> None:
    opened = Project(on_device.root)
    contract, declared = opened.applied(), opened.distillation()
    package = open_package(Artifacts(opened, declared).last_package())
    histories = [OfflineStore(opened.offline).history(view) for view in contract.views.values()]
    every = device_rows(opened, declared, package, histories, _compared(opened), None)
    assert every is not None
    count = len(every.rows)
    # The request transform divides by what was sold.
    none = {"shelf_demand__sold_1d": Values(np.zeros(count, np.int64), np.ones(count, bool))}
    rows = replace(every, offline={**every.offline, **none}, stored={**every.stored, **none})
    with parity(opened, declared, package) as beside:
        parts, answered = Verdict("", 0, {}), Verdict("", 0, {})
        compare_runtimes(beside, package, rows, verdict=parts, all_keys=False)
        compare_runtimes(beside, package, every, verdict=answered, all_keys=False)
    said = {"what a device answers": f"a request transform refuses all {count:,} rows"}
    assert parts.skipped.items() - answered.skipped.items() == said.items()


def _without_package(shop: Shop) -> Project:
    shutil.rmtree(shop.state / "packages")
    return Project(shop.root)


def _flip(project: Project, place: int) -> str:
    """Flips a byte of the own rows of the n-th owner in the file of all; returns the owner."""
    folder = snapshot_folder(project, SERVICE)
    latest = folder.latest()
    assert latest is not None
    file = folder.owners(latest.snapshot)
    with open_owners(file) as owners:
        _, (((line, *_),)), own = [*owners][place]
        owner = json.loads(own.parts[0][13:])["owner"]
    whole = file.read_bytes()
    assert whole.count(line) == 1
    end = whole.index(line) + len(line) - 1
    file.write_bytes(whole[:end] + bytes([whole[end] ^ 1]) + whole[end + 1 :])
    return str(owner[1])


@pytest.mark.accept
@pytest.mark.slowest
def test_the_snapshots_of_all_owners_are_compared(of_owners: Shop) -> None:
    opened = _without_package(of_owners)
    verdict = require_passed(verify(opened))
    assert verdict.views[f"snapshot {SERVICE}"]["files"].compared == 60
    for name in ("orders_7d", "mean_amount_7d", "late_rate_7d", "event_timestamp", "known_at", "status"):
        assert verdict.views["snapshot customer_orders"][name].compared == 60
    assert verdict.views[VIEW]["sold_1d"].compared == 60
    assert "the snapshot" not in verdict.skipped


def test_a_byte_of_an_owner_is_found_by_the_owner(of_owners: Shop) -> None:
    opened = _without_package(of_owners)
    owner = _flip(opened, 41)
    verdict = verify(opened)
    files = verdict.views[f"snapshot {SERVICE}"]["files"]
    assert (files.compared, files.differing) == (60, 1)
    (example,) = files.examples
    assert example.key == owner
    assert example.online == "it is not signed with the project's key, or was altered"
    assert _differing(verdict) == {f"snapshot {SERVICE}.files", "snapshot customer_orders.late_rate_7d"}
    with pytest.raises(GateFailed, match=r"files .1 of 60.*Run `isthmus features snapshot`"):
        require_passed(verdict)


def test_what_is_wrong_with_an_owner_is_found_though_it_is_signed(of_owners: Shop) -> None:
    opened = _without_package(of_owners)
    place, key = snapshot_folder(opened, SERVICE), signer(opened)
    latest = place.latest()
    assert latest is not None
    with open_owners(place.owners(latest.snapshot)) as owners:
        generation, whole = owners.generation, {key: rows for key, rows, _ in owners}
    first, second, third, fourth, *_ = whole

    def put(changed: Mapping[bytes, list[Lines] | None]) -> ComparedSnapshot:
        rows = {owner: lines for owner, lines in {**whole, **changed}.items() if lines is not None}
        place.add_owners(generation, rows, key.sign, 0, discloses=latest.discloses, tables=latest.tables)
        return _compared(opened)

    def differing(compared: ComparedSnapshot) -> dict[str, int]:
        parts = {f"{view}.{name}": part for view, parts in compared.views.items() for name, part in parts.items()}
        return {name: part.differing for name, part in parts.items() if part.differing}

    assert differing(put({})) == {}
    # A value of another moment; an owner who is missing; rows of somebody else.
    line = bytearray(whole[first][0][0])
    line[-1] ^= 1
    assert differing(put({first: [(bytes(line),)]})) == {"snapshot customer_orders.late_rate_7d": 1}
    assert differing(put({second: None}))["snapshot customer_orders.status"] == 1
    compared = put({third: [(*whole[third][0], *whole[fourth][0])]})
    assert differing(compared) == {f"snapshot {SERVICE}.files": 1}
    (example,) = compared.views[f"snapshot {SERVICE}"]["files"].examples
    assert example.online == "it has rows of another customer"
    assert differing(put({third: [(b"i", *whole[third][0])]}))[f"snapshot {SERVICE}.files"] == 1
    # Of an earlier declaration it is not compared.
    of_owners.replace('owner="customer"', "owner=None")
    assert _compared(Project(of_owners.root)).skipped == "its `owner` has changed: run `isthmus features snapshot`"


def test_a_file_of_owners_that_was_altered_or_is_gone_fails(of_owners: Shop) -> None:
    opened = _without_package(of_owners)
    place = snapshot_folder(opened, SERVICE)
    latest = place.latest()
    assert latest is not None
    file = place.owners(latest.snapshot)
    whole = file.read_bytes()

    def refused() -> str:
        (example,) = _compared(opened).views[f"snapshot {SERVICE}"]["file"].examples
        return str(example.online)

    # A byte of the head of the file that SQLite does not read.
    file.write_bytes(whole[:75] + b"\1" + whole[76:])
    assert refused() == "it was altered since it was written"
    # What all share: of whom it is, and of which views.
    for part in (b"\xa8customer", b"\xacshelf_demand"):
        assert whole.count(part) == 1
        file.write_bytes(whole.replace(part, part[:-1] + b"?"))
        assert refused() == "it has other views or another owner"
    file.write_bytes(whole[: len(whole) // 2])
    assert refused().startswith("it is damaged")
    # Of another service, or of another contract, in one byte alone: no device takes a file of it.
    for part in (SERVICE.encode(), opened.applied().service(SERVICE).hash.encode()):
        assert whole.count(part) == 1
        file.write_bytes(whole.replace(part, part[:-1] + b"?"))
        assert _compared(opened).views[f"snapshot {SERVICE}"]["files"].differing == 60
    file.unlink()
    assert refused() == "its file is gone"


@pytest.mark.accept
def test_the_client_is_asked_with_the_real_files_of_owners(of_owners: Shop, web: None) -> None:
    opened = Project(of_owners.root)
    assert read_package(read_pointer(of_owners.state / "packages" / "late_order.latest")).device.owner == "customer"  # type: ignore[union-attr]
    verdict = require_passed(verify(opened))
    assert verdict.skipped == {}
    assert 50 < verdict.runtimes[WEB].rows <= 100
    assert verdict.device.keys() == verdict.inputs.keys()
    assert {"input customer_orders__orders_7d on a device"} <= verdict.named().keys()
    # The first owner of those that are drawn evenly.
    owner = _flip(opened, 0)
    torn = verify(opened)
    assert torn.views[f"snapshot {SERVICE}"]["files"].examples[0].key == owner
    assert f"file model.fp32.ort in {WEB}" in _differing(torn)
    (refused, *_) = torn.files[f"model.fp32.ort in {WEB}"].examples
    assert "the snapshot is not signed by the key of this model" in str(refused.online)


@pytest.mark.accept
def test_a_file_that_was_exchanged_or_torn_fails_by_the_name_of_its_runtime(on_device: Shop, web: None) -> None:
    folder = read_pointer(on_device.state / "packages" / "late_order.latest")
    # The student of INT8 under the name of fp32, and a client that reads other numbers than those in the snapshot.
    (folder / "model.fp32.onnx").write_bytes((folder / "model.int8.onnx").read_bytes())
    client = (folder / CLIENT).read_text()
    (folder / CLIENT).write_text(client.replace("view.getFloat32(place, true)", "view.getFloat32(place, true) + 1"))
    files = {"core.fp32.pte": "pte", "core.fp32.tflite": "tflite"}
    for file in files:
        (folder / file).write_bytes(b"torn")
    rewritten("manifest.json", partial(_with_core, files))(folder)
    rewritten("golden.json", partial(_with_core_answers, files))(folder)
    resum(folder)
    verdict = verify(Project(on_device.root))
    differing = _differing(verdict)
    assert {"file model.fp32.onnx", "file core.fp32.pte in ExecuTorch"} <= differing
    assert "input shelf_demand__distance on a device" in differing
    assert f"file model.fp32.ort in {WEB}" in differing
    assert not {"file model.fp32.ort", "input store on a device", "input shelf_demand__distance"} & differing
    assert "ExecuTorch refuses it" in verdict.files["core.fp32.pte"].examples[0].online
    if find_spec("ai_edge_litert"):
        assert "file core.fp32.tflite in LiteRT" in differing
    else:
        assert "pip install --no-deps" in verdict.skipped["LiteRT"]
    with pytest.raises(GateFailed, match=r"core\.fp32\.pte in ExecuTorch"):
        require_passed(verdict)


def _with_core(files: Mapping[str, str], manifest: Any) -> None:
    (first, *_) = manifest["variants"]
    manifest["core"] = [{"name": "numbers", "element": "float", "shape": ["N", 2]}]
    manifest["variants"] += [
        {**first, "file": file, "format": kind, "core": True, "most": {"N": 1}} for file, kind in files.items()
    ]


def _with_core_answers(files: Mapping[str, str], golden: Any) -> None:
    for case in golden["cases"]:
        case["core"] = {"numbers": msgspec.to_builtins(TensorBytes.of(np.zeros((len(case["rows"]), 2), np.float32)))}
        case["outputs"] |= dict.fromkeys(files, case["outputs"]["model.fp32.onnx"])


def test_a_runtime_that_is_absent_is_named_by_the_verdict_and_by_the_deployment(on_device: Shop) -> None:
    opened = Project(on_device.root)
    (checked,) = run_step(opened, StepRequest("verify", checks=(("package/late_order", "verdict"),)), silent)
    assert isinstance(checked, NodeCheck)
    verdict = require_passed(Verdict.loads(verdict_file(opened, opened.distillation()).read_bytes()))
    *samples, limit = verdict.limits
    assert checked.metadata["limits"] == "; ".join(verdict.limits)
    assert limit == (
        f"not compared: {WEB}, because it is not installed: run `isthmus package verify PACKAGE --runtime web`, "
        "which installs it"
    )
    assert verdict.device == {}
    released = deploy(opened)
    assert released.deployment.verdict.limits == (*samples, limit)
    assert json.loads(opened.deployment_file.read_bytes())["verdict"]["limits"] == verdict.limits


@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.slowest
def test_every_format_is_asked_in_its_runtime_through_the_snapshot(
    on_device: Shop, web: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_installed("make accept", [conversion.program.libraries for conversion in CONVERSIONS.values()])
    monkeypatch.setenv("ISTHMUS_PACKAGES__RUNTIMES", json.dumps([*CONVERSIONS]))
    opened = Project(on_device.root)
    exported = export(opened)
    manifest = read_package(exported.path)
    assert {variant.format for variant in manifest.variants} == {"onnx", "ort", "pte", "tflite", "mlpackage"}
    assert max(exported.bytes.values()) <= 250_000
    verdict = require_passed(verify(opened))
    assert verdict.runtimes.keys() == RUNTIMES.keys()
    assert verdict.skipped == {}
    for name, runtime in verdict.runtimes.items():
        rows = {verdict.files[file].compared for file in runtime.files}
        assert rows == {runtime.rows}
        # All rows of a small table, the golden cases, and those of the snapshot.
        assert runtime.rows > (50 if name == WEB else 2000)
    fp32 = {file: part.worst for file, part in verdict.files.items() if "fp32" in file}
    assert len(fp32) == 6
    assert max(fp32.values()) <= 1e-5
    # The same without the project, by its golden cases.
    for product in RUNTIMES.values():
        inspect(exported.path, runtime=product()).require()
    torn = exported.path / "core.fp32.tflite"
    whole = torn.read_bytes()
    torn.write_bytes(whole[: len(whole) // 2])
    resum(exported.path)
    assert {"file core.fp32.tflite in LiteRT"} == _differing(verify(opened))


def test_what_feeds_a_core_is_compared_to_the_bit_but_for_the_payload_of_a_nan() -> None:
    bits = np.array([[0x7FC00000, 0], [0x7FC00000, 0x3F800000], [0xFFC00000, 0x80000000]], np.uint32)
    theirs = np.array([[0xFFC00000, 0], [0x7FC00000, 0x3F800001], [0xFFC00001, 0]], np.uint32)
    refused = np.array([False, False, True])
    expected = CoreFeeds({"numbers": bits.view(np.float32), "places": bits.astype(np.int64)}, refused)
    found = CoreFeeds({"numbers": theirs.view(np.float32), "places": bits.astype(np.int64)}, refused)
    compared = compare_feeds(np.array(["a", "b", "c"]), expected, found)
    differing = {"numbers": 2, "places": 0, "refused": 0}
    expected_verdict = {f"{name} of head.json in head.mjs": count for name, count in differing.items()}
    assert {name: part.differing for name, part in compared.items()} == expected_verdict
    assert [example.key for example in compared["numbers of head.json in head.mjs"].examples] == ["b", "c"]


@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.slowest
def test_what_feeds_a_core_in_a_browser_is_asked_about_the_rows_of_the_snapshot(
    shop: Shop, web: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_PACKAGES__RUNTIMES", '["executorch"]')
    learnable(with_device(shop))
    opened = Project(shop.root)
    for step in (apply, build, materialize, snapshot, training_set, distill):
        step(opened)
    exported = export(opened)
    verdict = require_passed(verify(opened))
    fed = {name for name in verdict.device if name.endswith(" of head.json in head.mjs")}
    assert "refused of head.json in head.mjs" in fed
    assert len(fed) > 1
    assert {verdict.device[name].compared for name in fed} == {verdict.runtimes[WEB].rows}
    reader = exported.path / "head.mjs"
    text = reader.read_text()
    assert text.count("Sub: (a, b) => round(a - b)") == 1
    reader.write_text(text.replace("Sub: (a, b) => round(a - b)", "Sub: (a, b) => round(a - b - 1e-6)"))
    resum(exported.path)
    differing = _differing(verify(opened))
    assert differing
    assert differing <= {f"input {name} on a device" for name in fed}
