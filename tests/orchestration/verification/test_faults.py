"""Faults planted in a real project, beneath every check that comes before: the verdict finds each and names it."""

import hashlib
import http.client
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import msgspec
import numpy as np
import onnx
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from onnx import helper, numpy_helper

from isthmus import ConfigurationError, ContractMismatch, DataError, GateFailed, PackageError, RequestError
from isthmus.dagster import build_definitions
from isthmus.distill.onnx.runtime import ort_format
from isthmus.distill.types import evenly_spaced
from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.files import read_pointer
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.changes import key_values
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.request.layout import output_name
from isthmus.features.values.arrow import from_arrow, micros
from isthmus.features.values.columns import Values
from isthmus.features.values.entitykey import entity_keys
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import RECORD
from isthmus.orchestration.graph.steps import run_step
from isthmus.orchestration.models.release import deploy
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.web import WebRuntime
from isthmus.orchestration.server.serve import running, settings
from isthmus.orchestration.steps.step import NodeMaterialization, StepRequest
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.client import Client, private_api
from isthmus.orchestration.verification.modelinputs import PREDICT, compare_package
from isthmus.orchestration.verification.page import screen
from isthmus.orchestration.verification.recomputation import recompute
from isthmus.orchestration.verification.sides import SINGLES, OnlineSide
from isthmus.orchestration.verification.verify import require_passed, verify
from isthmus.orchestration.verification.views import compare_view
from isthmus.package.inspect import OnnxRuntime, inspect
from isthmus.package.manifest import open_package, package_digest, read_package
from isthmus.package.signature import PASSWORD
from isthmus.package.verdict import Sample, Verdict, flat
from tests.orchestration.shop import HOUR, Open, Shop
from tests.signing import pair

FILES = [f"file model.{precision}.{form}" for precision in ("fp32", "int8") for form in ("onnx", "ort")]
Change = Callable[[dict[str, Values], np.ndarray[Any, Any]], np.ndarray[Any, Any]]
"""Changes columns in place; gives the event times."""


def found(shop: Shop, project: Open) -> tuple[dict[str, int], Verdict]:
    """What `verify` finds to differ, by the names that its refusal and its page give."""
    verdict = verify(project(shop), all_keys=True)
    named = {name: one.differing for name, one in verdict.named().items() if one.differing}
    with pytest.raises(GateFailed, match=f"values differ: {next(iter(named))} "):
        require_passed(verdict)
    page = (shop.state / "verdicts" / "late_order.html").read_text()
    assert all(f">{name}</" in page for name in named)
    assert all(one.examples for one in verdict.named().values() if one.differing)
    return named, verdict


def test_a_project_without_faults_passes(exported: Shop, project: Open) -> None:
    verdict = require_passed(verify(project(exported), all_keys=True))
    assert set(verdict.files) == {name.removeprefix("file ") for name in FILES} | {PREDICT}
    golden = json.loads((package(exported) / "golden.json").read_text())["cases"]
    assert {name: one.compared for name, one in verdict.files.items() if name != PREDICT} == dict.fromkeys(
        set(verdict.files) - {PREDICT}, 2000 + sum(len(case["rows"]) for case in golden)
    )
    assert {one.compared for one in verdict.inputs.values()} == {2000}
    assert 0 < verdict.files[PREDICT].compared <= 2000
    assert set(verdict.inputs) == {
        "shelf_demand__sold_1d", "shelf_demand__distance", "store", "product", "hour", "weight",
    }  # fmt: skip
    with pytest.raises(RequestError, match="the share is 1; expected a number of at least 0 and below 1"):
        deploy(project(exported), share=1.0)
    assert deploy(project(exported)).deployment.verdict.compared == verdict.compared


@pytest.mark.accept
def test_a_package_with_request_transforms_is_checked_by_itself(exported: Shop, cache: Path) -> None:
    found = package(exported)
    assert {item.tensor for item in read_package(found).inputs} > {"given_double", "categories"}
    for runtime in (OnnxRuntime(), WebRuntime(cache)):
        inspection = inspect(found, runtime=runtime)
        inspection.require()
        assert max(inspection.worst.values()) <= runtime.tolerance


@pytest.mark.accept
def test_what_must_be_signed_is_signed_by_export_and_neither_verified_nor_deployed_otherwise(
    exported: Shop, project: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = pair(exported.root, "mine", "open sesame")
    pair(exported.root, "another")
    unsigned = package_digest(package(exported))
    plain = exported.toml.read_text()

    def configured(**keys: str) -> Project:
        exported.toml.write_text(plain + "[packages]\n" + "".join(f'{name} = "{key}"\n' for name, key in keys.items()))
        return project(exported)

    ours = {"signing_key": private.name, "public_key": public.name}
    require_passed(verify(project(exported)))
    for refused in (verify, deploy):
        with pytest.raises(PackageError, match="the package is not signed"):
            refused(configured(public_key=public.name))
    with pytest.raises(ConfigurationError, match=r"mine\.pem: key: has a password"):
        export(configured(**ours))
    monkeypatch.setenv(PASSWORD, "open sesame")
    with pytest.raises(PackageError, match=r"signed by key \w+; expected a signature by key"):
        export(configured(**{**ours, "public_key": "another.pub"}))
    export(configured(**ours))
    assert package_digest(package(exported)) == unsigned
    assert deploy(configured(**ours)).deployment.public_key == public.read_text()
    with pytest.raises(PackageError, match="signed by key"):
        deploy(configured(public_key="another.pub"))
    require_passed(verify(configured(**ours)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, r"the serving half is missing"),
        ({"precision": "fp32"}, r"measured with precision fp32; expected precision int8.*isthmus model export"),
        ({"threads": 9}, r"measured with threads 9; expected threads 1"),
        ({"memory_mb": None}, r"the serving half lacks memory_mb"),
    ],
)
def test_what_was_not_measured_is_not_deployed(
    exported: Shop, project: Open, change: dict[str, Any], words: str
) -> None:
    (file,) = exported.state.glob("serving/late_order-*.json")
    half = json.loads(file.read_bytes())
    file.write_text(json.dumps({**half, **change}) if change else "null")
    if not change:
        file.unlink()
    with pytest.raises(GateFailed, match=words):
        deploy(project(exported))
    file.write_bytes(b"{")
    with pytest.raises(DataError, match=r"cannot be read.*isthmus model export"):
        deploy(project(exported))


def test_a_student_below_a_gate_of_today_is_not_deployed(exported: Shop, project: Open) -> None:
    exported.replace("gates=[]", 'gates=[Gate("lift_kept", at_least=2.0)]')
    with pytest.raises(GateFailed, match=r"student of late_order: gate lift_kept failed: [\d.]+ < 2\. Train"):
        deploy(project(exported))


def test_a_failed_gate_is_why_there_is_no_package(exported: Shop, project: Open) -> None:
    exported.replace("gates=[]", 'gates=[Gate("lift_kept", at_least=2.0)]')
    (exported.state / "packages" / "late_order.latest").unlink()
    blocked = r"xport is blocked: gate lift_kept failed: [\d.]+ < 2"
    with pytest.raises(DataError, match=rf"package of late_order: e{blocked}\. Train longer"):
        deploy(project(exported))
    with pytest.raises(GateFailed, match=r"gate lift_kept failed: [\d.]+ < 2"):
        export(project(exported))
    verdict = verify(project(exported))
    assert verdict.passed
    shown = "\n".join(text for block in screen(verdict, exported.root) for text in [str(block)])
    assert "passed, except that the package was not compared" in shown
    assert re.search(f"not compared: the package, because e{blocked}", "\n".join(verdict.limits))


def test_a_second_distill_trains_nothing_and_keeps_what_export_measured(exported: Shop, project: Open) -> None:
    opened = project(exported)
    student = read_pointer(exported.state / "models" / "late_order" / "latest")
    card = (student / "BOUNDARY.md").read_text()
    assert "measured on the host" in card
    weights = (student / "student.safetensors").stat().st_ino
    notes: list[str] = []
    again = distill(opened, progress=lambda text, _done: notes.append(text))
    assert (again.path, again.trained, again.as_dict()["trained"]) == (student, False, False)
    assert any("so nothing was trained" in note for note in notes)
    assert (student / "BOUNDARY.md").read_text() == card
    nodes = ("teacher/late_order", "teacher_outputs/late_order", "student/late_order", "control/late_order")
    made = {one.node: one for one in run_step(opened, StepRequest("distill", nodes), lambda _text, _done: None)}
    told = made["student/late_order"]
    assert isinstance(told, NodeMaterialization)
    assert (told.version, told.metadata["trained"]) == (again.id, False)
    assert (student / "student.safetensors").stat().st_ino == weights
    assert distill(opened, again=True).trained
    assert (student / "student.safetensors").stat().st_ino != weights
    assert (student / "BOUNDARY.md").read_text().partition("## Serving half")[2] == card.partition("## Serving half")[2]
    # What was measured is of the package's student alone.
    exported.replace("hidden=(16,)", "hidden=(15,)")
    other = distill(project(exported))
    assert other.trained
    assert "Not measured yet" in (other.path / "BOUNDARY.md").read_text()


def rewrite(shop: Shop, project: Open, name: str, change: Change) -> None:
    """Writes the rows of a view in Redis anew, with other values or event times."""
    contract, at = project(shop).applied(), project(shop).now()
    view = contract.view(name)
    with EmbeddedRedis(shop.state / "redis") as server, connect(server.url) as client:
        store = OnlineStore(client, contract)
        keys = store.keys(view)
        held = store.read(view, keys, at)
        columns = {field.name: held.columns[field.name] for field in view.fields}
        event = change(columns, held.event.copy())
        put(client, contract, view, keys, event, held.known, columns)


def put(
    client: Any, contract: Contract, view: ViewContract, keys: Mapping[str, Any], event: Any, known: Any, columns: Any
) -> None:
    for key in entity_keys(contract.project, view.keys, keys):
        client.hdel(key, view.name)
    assert OnlineStore(client, contract).write(view, keys, event, known, columns).written == len(event)


def narrowed(columns: dict[str, Values], event: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    mean = columns["mean_amount_7d"]
    columns["mean_amount_7d"] = Values(mean.data.astype(np.float32).astype(np.float64), mean.valid)
    return event


def swapped(columns: dict[str, Values], event: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    columns["mean_amount_7d"], columns["late_rate_7d"] = columns["late_rate_7d"], columns["mean_amount_7d"]
    return event


def later(columns: dict[str, Values], event: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Local time in Zurich in winter, taken for UTC."""
    call = columns["last_call"]
    columns["last_call"] = Values(np.where(call.valid, call.data + HOUR, 0), call.valid)
    return event


def earlier(_: dict[str, Values], event: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same for the time of the row itself."""
    return event - HOUR


ONLINE: dict[str, tuple[str, Change, set[str], float]] = {
    "float32 against float64": ("customer_orders", narrowed, {"mean_amount_7d", "content_hash"}, 1e-3),
    "two columns swapped": ("customer_orders", swapped, {"mean_amount_7d", "late_rate_7d", "content_hash"}, 1e4),
    "a value in local time": ("customer_facts", later, {"last_call", "content_hash"}, HOUR),
    "an event in local time": ("shelf_demand", earlier, {"event_timestamp"}, HOUR),
}


@pytest.mark.accept
@pytest.mark.parametrize("fault", [
    pytest.param(fault, marks=pytest.mark.accept if fault in {"two columns swapped", "a value in local time"} else [])
    for fault in ONLINE
])  # fmt: skip
def test_a_fault_of_the_online_store(exported: Shop, project: Open, fault: str) -> None:
    view, change, fields, worst = ONLINE[fault]
    rewrite(exported, project, view, change)
    named, verdict = found(exported, project)
    assert set(named) == {f"{view}.{field}" for field in fields}
    values = fields - {"content_hash"}
    for one in (verdict.views[view][field] for field in values):
        assert 0 < one.worst <= worst
        assert one.tolerance == 0
        assert all(e.event_timestamp and e.event_timestamp[:3] == "202" for e in one.examples)
    if fault.endswith("local time"):
        assert {verdict.views[view][field].worst for field in values} == {HOUR}


@pytest.mark.accept
def test_a_stale_row(exported: Shop, project: Open) -> None:
    """The row before the last, of one key: what a lost write leaves."""
    contract, at = project(exported).applied(), project(exported).now()
    view = contract.view("shelf_demand")
    rows = OfflineStore(project(exported).offline).history(view).table()
    rows = rows.filter(pa.compute.less_equal(micros_column(rows, "known_at"), at))
    counts: dict[tuple[Any, ...], list[int]] = {}
    order = np.argsort(micros(rows["event_timestamp"]), kind="stable").tolist()
    names = [column.name for column in view.keys]
    plain = rows.select(names).to_pylist()
    for n in order:
        counts.setdefault(tuple(plain[n].values()), []).append(n)
    sold = rows["sold_1d"].to_pylist()
    fresh = at - 3 * 24 * HOUR
    event = micros(rows["event_timestamp"])
    places = next(p for p in counts.values() if event[p[-2]] > fresh and sold[p[-1]] != sold[p[-2]])
    old = rows.take(pa.array([places[-2]]))
    with EmbeddedRedis(exported.state / "redis") as server, connect(server.url) as client:
        columns = {field.name: from_arrow(old[field.name], field.dtype) for field in view.fields}
        put(
            client,
            contract,
            view,
            key_values(view, old),
            micros(old["event_timestamp"]),
            micros(old["known_at"]),
            columns,
        )
    named, verdict = found(exported, project)
    shelf = {name: n for name, n in named.items() if name.startswith("shelf_demand.")}
    assert shelf.items() >= {"shelf_demand.sold_1d": 1, "shelf_demand.event_timestamp": 1}.items()
    assert set(shelf.values()) == {1}
    example = verdict.views["shelf_demand"]["sold_1d"].examples[0]
    assert (example.key, example.offline, example.online) == (
        str(plain[places[-1]]), sold[places[-1]], sold[places[-2]],
    )  # fmt: skip
    assert example.event_timestamp == rows["event_timestamp"][places[-1]].as_py().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    # The package is fed the stale value, too, and the API predicts from it.
    asked = sum(row["store"] == plain[places[-1]]["store"] and row["product"] == plain[places[-1]]["product"]
                for row in sampled(exported, project))  # fmt: skip
    assert named["input shelf_demand__sold_1d"] == asked > 0


def micros_column(rows: pa.Table, name: str) -> pa.Array:
    return pa.array(micros(rows[name]))


def sampled(shop: Shop, project: Open) -> list[dict[str, Any]]:
    rows = training_set(project(shop)).table()
    found: list[dict[str, Any]] = rows.take(pa.array(evenly_spaced(len(rows), 2000))).to_pylist()
    return found


@pytest.mark.accept
def test_a_changed_transform(exported: Shop, project: Open, tmp_path: Path) -> None:
    """The table was built by other code than that of the rows in Redis. Its hash would say so, and is forged."""
    other = Shop(Path(shutil.copytree(exported.root, tmp_path / "other")))
    other.replace("SLOW = 60", "SLOW = 20")
    apply(project(other))
    with pytest.raises(ContractMismatch, match="offline table of shelf_demand: built under"):
        verify(project(other))
    build(project(other))
    path = Path("offline") / "shelf_demand"
    commit = {k: v for k, v in DeltaTable(exported.state / path).history(1)[0].items() if k.startswith("isthmus.")}
    rows = pa.table(DeltaTable(other.state / path).to_pyarrow_table())
    write_deltalake(
        exported.state / path, rows, mode="overwrite", commit_properties=CommitProperties(custom_metadata=commit)
    )
    verdict = verify(project(exported))
    named = {name: one.differing for name, one in verdict.named().items() if one.differing}
    stored = {name for name in named if not name.startswith(("input ", "file "))}
    assert stored - {"shelf_demand.status"} == {"shelf_demand.distance", "shelf_demand.content_hash"}
    example = verdict.views["shelf_demand"]["distance"].examples[0]
    assert (example.offline, example.online > 20) == (None, True)
    assert "input shelf_demand__distance" in named


COMPUTED = {
    "a flipped default": ("F.coalesce(shelf_demand__sold_1d, F.lit(1))", "F.coalesce(shelf_demand__sold_1d, F.lit(2))",
                          "moment.per_sold"),
    "float32 against float64": ("F.log1p(weight)", 'F.log1p(weight.cast("float"))', "moment.per_sold"),
    "hours in local time": ("F.sin(hour *", "F.sin((hour + 1) *", "moment.hour_sin"),
    "two columns swapped": ("F.concat(store, F.lit(\"-\"), F.when(hour < 12, \"am\").otherwise(\"pm\"))",
                            "F.concat(F.when(hour < 12, \"am\").otherwise(\"pm\"), F.lit(\"-\"), store)",
                            "moment.store_code"),
}  # fmt: skip


@pytest.mark.accept
@pytest.mark.parametrize("fault", [
    fault if fault == "a flipped default" else pytest.param(fault, marks=pytest.mark.accept) for fault in COMPUTED
])  # fmt: skip
def test_a_graph_that_computes_something_else_than_the_engine_did(exported: Shop, project: Open, fault: str) -> None:
    old, new, name = COMPUTED[fault]
    exported.replace(old, new)
    apply(project(exported))
    # The hash of the transform says that the training set is of another one: nothing is compared, or deployed.
    verdict = verify(project(exported))
    assert "moment" not in verdict.views
    assert "was made before it changed" in verdict.skipped["moment"]
    assert "the package" in verdict.skipped
    with pytest.raises((GateFailed, ContractMismatch)):
        deploy(project(exported))
    record = next((exported.state / "training" / "late_order").glob(f"*/{RECORD}"))
    told = json.loads(record.read_text())
    told["computed"]["moment"]["hash"] = project(exported).applied().transforms["moment"].hash
    record.write_text(json.dumps(told))
    named, verdict = found(exported, project)
    assert set(named) == {name, f"API {name}"}
    view, field = name.split(".")
    example = verdict.views[view][field].examples[0]
    assert "store" in example.key
    assert example.event_timestamp
    assert verdict.views[view][field].tolerance == (1e-15 if field == "per_sold" else 0)


@pytest.mark.accept
def test_a_server_that_computes_something_else(exported: Shop, project: Open, tmp_path: Path) -> None:
    """Its graph is another one than that which was compared with the engine."""
    other = Shop(Path(shutil.copytree(exported.root, tmp_path / "other")))
    other.replace("F.coalesce(shelf_demand__sold_1d, F.lit(1))", "F.coalesce(shelf_demand__sold_1d, F.lit(2))")
    apply(project(other))
    found = []
    for asked in (project(exported), project(other)):
        with asked.redis() as url, private_api(asked, asked.applied(), url, asked.now()) as api:
            compared = _recomputed(project(exported), project(exported).applied(), api).views
        found.append({f"{view}.{name}": one.differing for view, one_view in compared.items()
                      for name, one in one_view.items() if one.differing})  # fmt: skip
        assert {one.compared for one in compared["API moment"].values()} == {2000}
    assert found[0] == {}
    assert list(found[1]) == ["API moment.per_sold"]
    (example, *_) = compared["API moment"]["per_sold"].examples
    assert example.online == pytest.approx(example.offline / 2)
    assert example.event_timestamp


def _recomputed(project: Project, contract: Contract, api: Client) -> Verdict:
    verdict = Verdict(contract.hash, 0, {})
    recompute(project, contract, project.distillation(), api, verdict, all_keys=True)
    return verdict


def with_another_last_bit_alone(graph: bytes) -> bytes:
    """The graph, whose numbers in double precision are others when it computes a single row."""
    model = onnx.load_from_string(graph)
    name, inner = output_name("double"), "among_others"
    for node in model.graph.node:
        node.output[:] = [inner if output == name else output for output in node.output]
    numbers = {"one": [1], "next": [1 + 2.0**-52], "same": [1.0], "axis": [1]}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(value, np.int64 if constant in {"one", "axis"} else np.float64), constant)
        for constant, value in numbers.items()
    )
    model.graph.node.extend(
        helper.make_node(operator, inputs, [output])
        for operator, inputs, output in (
            ("Shape", [inner], "shape"), ("Gather", ["shape", "axis"], "rows"), ("Equal", ["rows", "one"], "alone"),
            ("Where", ["alone", "next", "same"], "factor"), ("Mul", [inner, "factor"], name),
        )
    )  # fmt: skip
    altered: bytes = model.SerializeToString()
    return altered


def test_a_graph_whose_bits_depend_on_the_size_of_the_batch(exported: Shop, project: Open) -> None:
    """The tolerance for an engine hides nothing of it, and only the rows that are computed alone show it."""
    opened = project(exported)
    contract = opened.applied()
    transform = contract.transforms["moment"]
    transform = replace(transform, graph=with_another_last_bit_alone(transform.graph))
    contract = replace(contract, transforms={**contract.transforms, "moment": transform})
    record = next((exported.state / "training" / "late_order").glob(f"*/{RECORD}"))
    written = json.loads(record.read_text())
    written["computed"]["moment"]["hash"] = transform.hash
    record.write_text(json.dumps(written))
    with opened.redis() as url, private_api(opened, contract, url, opened.now()) as api:
        verdict = _recomputed(opened, contract, api)
    assert {part.differing for part in flat(verdict.views).values()} == {0}
    differing = {name: part for name, part in verdict.singly.items() if part.differing}
    assert set(differing) == {"moment.per_sold", "API moment.per_sold"}
    assert {part.compared for part in verdict.singly.values()} == {SINGLES}
    assert all(0 < part.worst < 1e-15 for part in differing.values())
    with pytest.raises(GateFailed, match=r"moment\.per_sold alone \(\d+ of 256\).*isthmus apply"):
        require_passed(verdict)


class _Altering(BaseHTTPRequestHandler):
    """Passes requests on to a server, and alters what it answers to those of a single row."""

    protocol_version = "HTTP/1.1"
    port: int

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._pass_on("GET", None)

    def do_POST(self) -> None:
        self._pass_on("POST", self.rfile.read(int(self.headers["content-length"])))

    def _pass_on(self, method: str, body: bytes | None) -> None:
        headers = {name: self.headers[name] for name in ("content-type", "accept") if name in self.headers}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            connection.request(method, self.path, body, headers)
            response = connection.getresponse()
            data = response.read()
        if self.path == "/predict":
            answer = json.loads(data)
            if len(answer["predictions"]) == 1:
                answer["predictions"][0] = float(answer["predictions"][0]) + 1
            data = json.dumps(answer).encode()
        elif self.path == "/get-online-features":
            table = pa.ipc.open_stream(data).read_all()
            name = "customer_orders__mean_amount_7d"
            if len(table) == 1 and name in table.column_names and table[name][0].is_valid:
                value = pa.array([np.nextafter(table[name][0].as_py(), np.inf)])
                table = table.set_column(table.column_names.index(name), name, value)
                with pa.BufferOutputStream() as sink, pa.ipc.new_stream(sink, table.schema) as stream:
                    stream.write_table(table)
                data = sink.getvalue().to_pybytes()
        self.send_response(response.status)
        self.send_header("content-length", str(len(data)))
        self.send_header("isthmus-contract", response.headers.get("isthmus-contract") or "")
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def altering(log: Path) -> Iterator[Path]:
    """The log of a server that stands before the one of a log, and alters its answers to single rows."""
    lines = log.read_text().splitlines()
    port = next(message["port"] for message in map(json.loads, lines) if message.get("event") == "listening")
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Altering,), {"port": port})) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        front = log.with_suffix(".front")
        message = {"event": "listening", "host": "127.0.0.1", "port": server.server_port}
        front.write_text(json.dumps(message) + "\n")
        try:
            yield front
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.accept
def test_a_server_that_answers_something_else_to_a_single_row(exported: Shop, project: Open) -> None:
    require_passed(verify(project(exported)))
    deploy(project(exported))
    opened = project(exported)
    contract, declared, at = opened.applied(), opened.distillation(), opened.now()
    offline = OfflineStore(opened.offline)
    histories = [offline.history(view) for view in contract.views.values()]
    log = exported.root / "server.log"
    with opened.redis() as url, connect(url) as client, log.open("wb") as file:
        configured = msgspec.structs.replace(settings(opened, url, 0, private=True), workers=1, now=at)
        with running(configured, file) as child:
            with closing(Client(contract, child, log)) as direct:
                assert direct.rejection_reason() is None
            with altering(log) as front, closing(Client(contract, child, front)) as api:
                online = OnlineSide(OnlineStore(client, contract), url, api, at)
                history = next(history for history in histories if history.view.name == "customer_orders")
                verdict = Verdict(contract.hash, at, {})
                compare_view(offline, history, online, verdict, all_keys=True)
                opened_package = open_package(package(exported))
                compare_package(opened, declared, opened_package, histories, online, 100, verdict)
    changed = "customer_orders.mean_amount_7d"
    assert {part.differing for part in verdict.views["customer_orders"].values()} == {0}
    assert {name for name, part in verdict.singly.items() if part.differing} == {changed, f"file {PREDICT}"}
    assert verdict.singly[changed].compared == len(history.table().group_by("customer").aggregate([]))
    assert verdict.samples == {"rows asked of the API": Sample(100, 2000)}
    assert verdict.files[PREDICT].differing == 0
    assert {part.differing for part in verdict.inputs.values()} == {0}
    alone = verdict.singly[f"file {PREDICT}"]
    assert alone.differing == alone.compared > 0


def package(shop: Shop) -> Path:
    return read_pointer(shop.state / "packages" / "late_order.latest")


def forge(shop: Shop, files: Mapping[str, bytes]) -> None:
    """Replaces files of the package, and every sum that would tell."""
    folder = package(shop)
    manifest = json.loads(files.get("manifest.json", (folder / "manifest.json").read_bytes()))
    for variant in manifest["variants"]:
        if variant["file"] in files:
            data = files[variant["file"]]
            variant |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    written = {**files, "manifest.json": json.dumps(manifest).encode()}
    for name, data in written.items():
        (folder / name).write_bytes(data)
    names = [line.partition("  ")[2] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    sums = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(sums))


def with_another_vocabulary(model: bytes) -> bytes:
    """The words of every category in reverse order."""
    graph = onnx.load_from_string(model)
    encoders = [node for node in graph.graph.node if node.op_type == "LabelEncoder"]
    assert encoders
    for node in encoders:
        (words,) = (attribute for attribute in node.attribute if attribute.name == "keys_strings")
        backwards = list(words.strings)[::-1]
        del words.strings[:]
        words.strings.extend(backwards)
    altered: bytes = graph.SerializeToString()
    return altered


@pytest.mark.accept
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.accept), "int8"])
def test_a_wrong_vocabulary_in_the_package(exported: Shop, project: Open, precision: str) -> None:
    wrong = with_another_vocabulary((package(exported) / f"model.{precision}.onnx").read_bytes())
    forge(exported, {f"model.{precision}.onnx": wrong, f"model.{precision}.ort": ort_format(wrong)})
    named, verdict = found(exported, project)
    files = {f"file model.{precision}.onnx", f"file model.{precision}.ort"}
    # A server refuses the file that it would run, by its golden rows.
    assert set(named) == (files | {f"file {PREDICT}"} if precision == "int8" else files)
    example = verdict.files[f"model.{precision}.ort"].examples[0]
    assert "'store': " in example.key
    assert example.event_timestamp
    if precision == "int8":
        assert "golden" in verdict.files[PREDICT].examples[0].online


@pytest.mark.accept
def test_two_inputs_of_the_package_swapped(exported: Shop, project: Open) -> None:
    manifest = json.loads((package(exported) / "manifest.json").read_text())
    numbers = [n for n, item in enumerate(manifest["inputs"]) if item["tensor"] == "numeric"]
    one, other = (manifest["inputs"][n] for n in numbers[:2])
    one["name"], other["name"] = other["name"], one["name"]
    one["dtype"], other["dtype"] = other["dtype"], one["dtype"]
    forge(exported, {"manifest.json": json.dumps(manifest).encode()})
    named, verdict = found(exported, project)
    assert set(named) == {*FILES, f"file {PREDICT}"}
    with pytest.raises(GateFailed, match=r"file model.fp32.onnx .* Run `isthmus model export`"):
        require_passed(verdict)


@pytest.mark.accept
def test_the_blocking_check_of_dagster_names_the_fault(exported: Shop, project: Open) -> None:
    rewrite(exported, project, "customer_facts", later)
    definitions = build_definitions(exported.root)
    (check,) = (spec.key for checks in definitions.asset_checks or () for spec in checks.check_specs
                if spec.name == "verdict")  # fmt: skip
    job = dg.define_asset_job("verdict", dg.AssetSelection.checks(check))
    held = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job]))
    result = held.resolve_job_def("verdict").execute_in_process(raise_on_error=False)
    (evaluation,) = result.get_asset_check_evaluations()
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.ERROR)
    table = str(evaluation.metadata["differs"].value)
    assert "| customer_facts.last_call | 42 | 50 | 3.6e+09 | 0 | {'customer': 1000003} |" in table
    assert "| ONNX Runtime | 4 | 2,0" in str(evaluation.metadata["runtimes"].value)
    assert Path(str(evaluation.metadata["page"].value)).read_text().startswith("<!doctype html>")
