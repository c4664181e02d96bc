"""A small project made by hand: its contract, its rows, a package, and a server process over them."""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from isthmus.features.contract.schema import Column, Contract, ServiceContract, ViewContract
from isthmus.features.files import write_atomically
from isthmus.features.online.store import OnlineStore
from isthmus.features.profiles import OBJECTIVE_MS, ServingProfile
from isthmus.features.redis.connection import connect
from isthmus.features.types import (
    SCALARS,
    Array,
    Bool,
    Bytes,
    DataType,
    Float32,
    Float64,
    Int32,
    Int64,
    String,
    UnixTimestamp,
)
from isthmus.features.values.columns import from_python
from isthmus.package.golden import Golden, GoldenCase, TensorBytes
from isthmus.package.inputs import feeds
from isthmus.package.manifest import Input, Manifest, TensorInfo, Variant, package_digest
from isthmus.package.verdict import FeatureVerdict, Verdict
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.keys import Key, Keyring, create_key
from isthmus.serving.process import start
from isthmus.serving.rollout.releases import deploy
from isthmus.serving.settings import ServerSettings

HOUR = 3_600_000_000
NOW = 500_000 * HOUR
CARRIER = Column("carrier", String)
FLIGHT = Column("flight", Int64)


def view(
    name: str, keys: Sequence[Column], fields: Sequence[tuple[str, DataType]], ttl: int | None = None
) -> ViewContract:
    columns = tuple(Column(field, dtype) for field, dtype in fields)
    return ViewContract(name, ("e",), tuple(keys), columns, ttl, 0, ("s",), "code of " + name)


PUNCTUALITY = view("punctuality", [CARRIER], [("late_rate", Float32), ("flights", Int64)], ttl=24 * HOUR)
EVERYTHING = view(
    "everything",
    [FLIGHT],
    [("a", Bool), ("b", Int32), ("c", Int64), ("d", Float32), ("e", Float64), ("f", UnixTimestamp), ("g", String),
     ("h", Bytes)],
)  # fmt: skip
SEEN, TOKEN, OPEN = Column("seen", UnixTimestamp), Column("token", Bytes), Column("open", Bool)
LISTS = view("lists", [SEEN, TOKEN, OPEN], list(zip("abcdefgh", map(Array, SCALARS), strict=True)))
ROUTE = view("route", [CARRIER, FLIGHT], [("flights", Int32)])


def contract_of(*views: ViewContract, request: Sequence[Column] = (Column("distance", Float64), CARRIER)) -> Contract:
    """A contract with one service over `punctuality` and some request fields."""
    features = (("punctuality", "late_rate"), ("punctuality", "flights"))
    described = {
        "features": [list(pair) for pair in features],
        "request": [[column.name, column.dtype.name] for column in request],
    }
    service = ServiceContract("late", features, tuple(request), "replaced on loading")
    contract = Contract("flights", {one.name: one for one in views}, {"late": service}, {}, {})
    assert contract.as_dict()["services"]["late"] == described
    return Contract.loads(contract.dumps())


CONTRACT = contract_of(PUNCTUALITY, EVERYTHING, ROUTE, LISTS)
TABLES = {"punctuality": "f00d"}


def write(
    store: OnlineStore, view: ViewContract, keys: dict[str, list[Any]], events: Sequence[int], **columns: Sequence[Any]
) -> None:
    event = np.array(events, np.int64)
    typed = {field.name: from_python(columns[field.name], field.dtype) for field in view.fields}
    store.write(view, keys, event, event, typed)


def fill(url: str, contract: Contract = CONTRACT) -> None:
    """Writes the rows every test reads. AA has nulls, B6 a null and a value, OO is old, ZZ is from the future."""
    with connect(url) as client:
        client.flushall()
        store = OnlineStore(client, contract)
        write(
            store, contract.view("punctuality"), {"carrier": ["UA", "AA", "B6", "OO", "ZZ", "EX"]},
            [NOW - HOUR, NOW - HOUR, NOW - HOUR - 1, NOW - 24 * HOUR - 1, NOW + 1, NOW - 24 * HOUR],
            late_rate=[0.1, None, None, 0.5, 0.6, 0.7], flights=[2**60 + 1, None, 7, 8, 9, 10],
        )  # fmt: skip
        write(
            store, contract.view("everything"), {"flight": [1, 2, 2**62 + 1]}, [NOW - HOUR] * 3,
            a=[True, None, False], b=[-(2**31), 5, 6], c=[2**63 - 1, None, -(2**63)],
            d=[float("nan"), float("inf"), 0.5], e=[float("-inf"), None, 1e300],
            f=[1_700_000_000_000_000, 1_700_000_000_123_456, None], g=["é😀", "", None], h=[b"\x00\xff", None, b""],
        )  # fmt: skip
        write(
            store, contract.view("lists"), {"seen": [5, 5, -1], "token": [b"\x00\xff", b"", b""], "open": [True] * 3},
            [NOW - HOUR] * 3,
            a=[[True, False], None, []], b=[[1, -2], [], None], c=[[2**62 + 1], None, None], d=[[0.1, 2.0], [], None],
            e=[[float("nan"), 1.5, float("-inf")], None, [2.5] * 20], f=[[1_000_000], [500_000], None],
            g=[["é", ""], [], None], h=[[b"\x00\xff", b""], None, []],
        )  # fmt: skip
        routes: dict[str, list[Any]] = {"carrier": ["UA", "AA"], "flight": [1, 1]}
        write(store, contract.view("route"), routes, [NOW - HOUR] * 2, flights=[3, 4])


def make_package(
    folder: Path,
    contract: Contract = CONTRACT,
    *,
    inputs: Sequence[tuple[str, DataType]] = (
        ("punctuality__late_rate", Float32),
        ("punctuality__flights", Int64),
        ("distance", Float64),
        ("carrier", String),
    ),
    weight: float = 1.0,
    shift: float = 0.0,
    picky: bool = False,
    blank: bool = False,
    ballast: int = 0,
    program: bytes = b"",
    service: str = "late",
    classes: tuple[str, ...] = (),
    several: bool = False,
) -> Path:
    """A package whose model is sigmoid(weight * the sum of the numbers, null as 0), + 1 inside for carrier UA.

    A picky one cannot be run over an infinite number, and a blank one answers it with NaN. One with ballast multiplies
    by that many square matrices of zeros on its way, and adds the result. A program is what it has for ExecuTorch,
    which a server never opens. With two classes, that is the probability of the second.
    """
    folder.mkdir(parents=True)
    numbers = [name for name, dtype in inputs if dtype is not String]
    texts = [name for name, dtype in inputs if dtype is String]
    file = folder / "model.int8.ort"
    _save_model(file, len(numbers), len(texts), weight, picky=picky, blank=blank, ballast=ballast, classes=len(classes))
    files: list[tuple[Path, Literal["fp32", "int8"], Literal["ort", "pte"]]] = [(file, "int8", "ort")]
    if program:
        (folder / "model.fp32.pte").write_bytes(program)
        files.append((folder / "model.fp32.pte", "fp32", "pte"))
    rows: tuple[tuple[float | str | None, ...], ...] = tuple(
        tuple(text if dtype is String else whole if "Int" in dtype.name else number for _, dtype in inputs)
        for number, whole, text in ((0.25, 3, "UA"), (None, None, "AA"), (-1.5, -2, None))
    )
    golden = [
        weight * sum(x for x in row if isinstance(x, int | float)) + sum(1.0 for x in row if x == "UA") for row in rows
    ]
    answers = np.array([1 / (1 + np.exp(-x)) + shift for x in golden], np.float32)
    if classes:
        answers = np.stack([1 - answers, answers], 1)
    positions = {name: position for group in (numbers, texts) for position, name in enumerate(group)}
    manifest = Manifest(
        format_version=2,
        name="late",
        contract=contract.hash,
        service=service,
        model="student",
        training_set="none",
        inputs=tuple(
            Input(name, dtype.name, "categories" if dtype is String else "numeric", positions[name])
            for name, dtype in inputs
        ),
        task="tabular",
        metric="auc",
        tensors=(
            *((TensorInfo("numeric", "float", ("N", len(numbers))),) if numbers else ()),
            *((TensorInfo("categories", "string", ("N", len(texts))),) if texts else ()),
        ),
        outputs=(TensorInfo("probability", "float", ("N", len(classes)) if classes else ("N",)),),
        classes=classes,
        several=several,
        files={},
        variants=tuple(
            Variant(one.name, precision, form, one.stat().st_size, _sum(one), 1e-5, 0.0, {"auc": 0.5})
            for one, precision, form in files
        ),
    )
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    (folder / "contract.json").write_bytes(contract.dumps())
    names = tuple(name for name, _ in inputs)
    case = GoldenCase({}, {one.name: {"probability": TensorBytes.of(answers)} for one, _, _ in files}, rows)
    columns = Golden(names, (case,)).columns(case, manifest.model_inputs)
    fed = {name: TensorBytes.of(tensor) for name, tensor in feeds(manifest.model_inputs, columns).items()}
    golden_file = Golden(names, (msgspec.structs.replace(case, tensors=fed),))
    (folder / "golden.json").write_bytes(msgspec.json.encode(golden_file))
    sums = [f"{_sum(entry)}  {entry.name}\n" for entry in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


def _sum(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def _save_model(
    file: Path, numbers: int, texts: int, weight: float, *, picky: bool, blank: bool, ballast: int, classes: int
) -> None:
    tensors = [helper.make_tensor_value_info("numeric", TensorProto.FLOAT, ["n", numbers])]
    nodes = [
        helper.make_node("IsNaN", ["numeric"], ["missing"]),
        helper.make_node("Where", ["missing", "zero", "numeric"], ["filled"]),
        helper.make_node("ReduceSum", ["filled", "axes"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "weight"], ["scaled"]),
    ]
    total = "scaled"
    if texts:
        tensors.append(helper.make_tensor_value_info("categories", TensorProto.STRING, ["n", texts]))
        nodes += [
            helper.make_node(
                "LabelEncoder", ["categories"], ["codes"], domain="ai.onnx.ml",
                keys_strings=["UA"], values_floats=[1.0], default_float=0.0,
            ),
            helper.make_node("ReduceSum", ["codes", "axes"], ["code"], keepdims=0),
            helper.make_node("Add", ["scaled", "code"], ["total"]),
        ]  # fmt: skip
        total = "total"
    if picky:
        nodes += [
            helper.make_node("IsInf", ["numeric"], ["infinite"]),
            helper.make_node("Cast", ["infinite"], ["flags"], to=TensorProto.INT64),
            helper.make_node("ReduceSum", ["flags", "axes"], ["count"], keepdims=0),
            # It has one entry: there is nothing to add for an infinite number.
            helper.make_node("Constant", [], ["nothing"], value_floats=[0.0]),
            helper.make_node("Gather", ["nothing", "count"], ["added"]),
            helper.make_node("Add", [total, "added"], ["accepted"]),
        ]
        total = "accepted"
    if blank:
        nodes.append(helper.make_node("Mul", [total, "zero"], ["nothing of it"]))
        nodes.append(helper.make_node("Add", [total, "nothing of it"], ["finite"]))
        total = "finite"
    weights = []
    if ballast:
        weights = [
            helper.make_tensor("wide", TensorProto.FLOAT, [1, 1024], [0.0] * 1024),
            helper.make_tensor("zeros", TensorProto.FLOAT, [1024, 1024], [0.0] * 1024**2),
        ]
        nodes.append(helper.make_node("Unsqueeze", [total, "axes"], ["column"]))
        nodes.append(helper.make_node("MatMul", ["column", "wide"], ["layer0"]))
        for layer in range(ballast):
            nodes.append(helper.make_node("MatMul", [f"layer{layer}", "zeros"], [f"layer{layer + 1}"]))
        nodes.append(helper.make_node("ReduceSum", [f"layer{ballast}", "axes"], ["ballast"], keepdims=0))
        nodes.append(helper.make_node("Add", [total, "ballast"], ["heavy"]))
        total = "heavy"
    nodes.append(helper.make_node("Sigmoid", [total], ["chance" if classes else "probability"]))
    if classes:
        nodes += [
            helper.make_node("Unsqueeze", ["chance", "axes"], ["second"]),
            helper.make_node("Constant", [], ["certain"], value_float=1.0),
            helper.make_node("Sub", ["certain", "second"], ["first"]),
            helper.make_node("Concat", ["first", "second"], ["probability"], axis=1),
        ]
    shape: list[str | int | None] = ["n", classes] if classes else ["n"]
    graph = helper.make_graph(
        nodes, "late", tensors, [helper.make_tensor_value_info("probability", TensorProto.FLOAT, shape)],
        [helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]),
         helper.make_tensor("axes", TensorProto.INT64, [1], [1]),
         helper.make_tensor("weight", TensorProto.FLOAT, [], [weight]), *weights],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(file)
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def verdict_of(package: Path, contract: Contract = CONTRACT, differing: int = 0) -> Verdict:
    compared = FeatureVerdict(10, differing, 0.0)
    views: dict[str, dict[str, FeatureVerdict]] = {}
    for view, feature in contract.service("late").features:
        views.setdefault(view, {})[feature] = compared
    return Verdict(contract.hash, NOW, dict(views), TABLES, {}, package_digest(package), compared)


@dataclass(frozen=True)
class Server:
    """A running server process and what it was given."""

    process: subprocess.Popen[bytes]
    http: httpx.Client
    contract: Path
    deployment: Path
    keys: Path
    log: Path
    secrets: set[str]

    def lookup(self, **asked: Any) -> httpx.Response:
        return self.http.post("/get-online-features", json=asked)

    def predict(self, **asked: Any) -> httpx.Response:
        return self.http.post("/predict", json=asked)

    def deploy(
        self, package: Path, contract: Contract = CONTRACT, probation: float = 0.0, at: int = NOW,
        objective_ms: float = OBJECTIVE_MS, **trial: Any,
    ) -> Deployment:  # fmt: skip
        profile = ServingProfile(probation_seconds=probation, latency_objective_ms=objective_ms)
        verdict = verdict_of(package, contract)
        return deploy(package, verdict, contract, profile, self.deployment, tables=TABLES, at=at, **trial).deployment

    def grant(self, **scopes: str) -> dict[str, str]:
        """Makes these the only keys: name to its scopes with a space between. Returns each one's Authorization."""
        secrets = write_keys(self.keys, **scopes)
        self.secrets.update(secrets.values())
        return {name: f"Bearer {secret}" for name, secret in secrets.items()}

    def lines(self) -> list[dict[str, Any]]:
        # ONNX Runtime writes there, too.
        return [json.loads(line) for line in self.log.read_bytes().splitlines() if line.startswith(b"{")]


def write_keys(file: Path, **scopes: str) -> dict[str, str]:
    """A key file with these keys, name to scopes with a space between; returns the keys by their names."""
    made: dict[str, tuple[Key, str]] = {name: create_key(name, wanted.split(), NOW) for name, wanted in scopes.items()}
    write_atomically(file, Keyring(keys=tuple(key for key, _ in made.values())).dumps(), mode=0o600)
    return {name: secret for name, (_, secret) in made.items()}


def require_discreet(text: str, secrets: set[str]) -> None:
    """Fails if a text shows a stack trace or a secret: every answer and every log of these tests goes through here."""
    for trace in ("Traceback", 'File "', ".py:", "site-packages"):
        assert trace not in text, text
    assert not any(secret in text for secret in secrets), "a secret is shown"


@contextmanager
def serving(folder: Path, redis: str, **settings: Any) -> Iterator[Server]:
    """A server process; it has to end by SIGTERM with exit code 0, and no answer or log line may tell too much."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = ServerSettings(
        contract=str(folder / "contract.json"), deployment=str(folder / "deployment.json"), redis=redis,
        keys=str(folder / "keys.json"), **{"port": free_port(), "now": NOW, **settings},
    )  # fmt: skip
    log = folder / "server.log"
    password = urlsplit(redis).password
    secrets = {password} if password else set()

    def answered(answer: httpx.Response) -> None:
        if not answer.request.url.path.startswith("/docs"):  # the page's own scripts are full of such words
            require_discreet(answer.read().decode(errors="replace") + str(answer.headers), secrets)

    with log.open("wb") as output:
        process = start(chosen, output)
    url = f"http://127.0.0.1:{chosen.port}"
    with httpx.Client(base_url=url, timeout=10, event_hooks={"response": [answered]}) as http:
        try:
            wait(lambda: process.poll() is not None or _up(http), "the server to answer")
            files = Path(chosen.contract), Path(chosen.deployment), folder / "keys.json"
            yield Server(process, http, *files, log, secrets)
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(15)
    assert code == 0, log.read_text()
    require_discreet(log.read_text(), secrets)


def _up(http: httpx.Client) -> bool:
    try:
        return http.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def wait(condition: Any, what: str, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    received = b""
    while chunk := connection.recv(65_536):
        received += chunk
    require_discreet(received.decode(), set())
    return received
