"""`isthmus package verify`, with what a serving host has, and by a browser's runtime."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from isthmus.features.errors import RequestError
from isthmus.orchestration.runtimes.products import open_runtime
from isthmus.orchestration.runtimes.web import TOLERANCE, WebRuntime, installed
from isthmus.package.inspect import inspect
from isthmus.package.signature import Signer
from tests.distill.packages import of_rows, of_tensors, resum, rewritten
from tests.serving.support import make_package
from tests.signing import pair

HEAVY = ("torch", "onnx", "dagster", "feast", "pyspark", "pysail", "sklearn", "scipy", "transformers", "accelerate")
SIGNING = ("model_signing", "cryptography")


def verify(package: Path, *options: str, absent: tuple[str, ...] = HEAVY, begin: str = "", **environment: str) -> Any:
    """The verb in a process in which some libraries cannot be imported."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        f"{begin}\nfrom isthmus.orchestration.cli.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "package", "verify", str(package), *options]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr
    return done


def test_a_serving_host_can_verify(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package")
    shown = verify(package, absent=(*HEAVY, *SIGNING))
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines() if " ok " in line]
    assert [line.partition(" ok ")[0] for line in lines] == [
        "files and manifest", "model.sig", "contract.json", "golden.json", "model.int8.ort",
    ]  # fmt: skip
    told = json.loads(verify(package, "--json").stdout)
    assert told["passed"]
    assert 0 < told["worst"]["model.int8.ort"] < 1e-5
    assert {check["passed"] for check in told["checks"]} == {True}


def forged(folder: Path, *nodes: onnx.NodeProto, constants: Mapping[str, Any]) -> Path:
    """A package whose float32 graph computes something more, for nothing but the trouble."""
    package = of_tensors(folder)
    file = package / "model.fp32.onnx"
    model = onnx.load(file)
    for name, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    (last,) = (node for node in model.graph.node if "float_out" in node.output)
    last.output[0] = "float_before"
    model.graph.node.extend([*nodes, onnx.helper.make_node("Add", ["float_before", "trouble"], ["float_out"])])
    file.write_bytes(model.SerializeToString())
    resum(package)
    return package


@pytest.mark.accept
def test_a_graph_takes_no_more_memory_than_it_may(tmp_path: Path) -> None:
    # A GiB of zeros, which a runtime makes when it opens the graph.
    package = forged(
        tmp_path,
        onnx.helper.make_node("ConstantOfShape", ["many"], ["zeros"]),
        onnx.helper.make_node("ReduceSum", ["zeros"], ["trouble"], keepdims=0),
        constants={"many": np.array([2**28])},
    )
    shown = verify(package)
    assert shown.returncode == 0, shown.stderr
    begin = "from isthmus.orchestration.cli import packages; packages.MEMORY = 2**29"
    shown = verify(package, begin=begin)
    assert (shown.returncode, "model.fp32.onnx: onnxruntime refuses it (" in shown.stderr) == (1, True), shown.stderr


def test_a_graph_that_ends_the_runtime_is_refused_with_a_sentence(tmp_path: Path) -> None:
    # ONNX Runtime follows the empty name of a bias that is not there to nowhere.
    norm = onnx.helper.make_node("LayerNormalization", ["float_before", "scale", ""], ["trouble"])
    package = forged(tmp_path, norm, constants={"scale": np.ones(2, np.float32)})
    shown = verify(package)
    assert shown.returncode == 1, shown.stderr
    assert "SIGSEGV ended ONNX Runtime" in shown.stderr
    assert json.loads(verify(package, "--json").stdout)["found"].startswith("SIGSEGV")


@pytest.mark.accept
def test_a_graph_that_computes_for_ever_is_stopped(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info
    body = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["going"], ["on"]), onnx.helper.make_node("Cos", ["x"], ["y"])], "body",
        [value("turn", onnx.TensorProto.INT64, []), value("going", onnx.TensorProto.BOOL, []),
         value("x", onnx.TensorProto.FLOAT, [])],
        [value("on", onnx.TensorProto.BOOL, []), value("y", onnx.TensorProto.FLOAT, [])],
    )  # fmt: skip
    loop = onnx.helper.make_node("Loop", ["turns", "", "zero"], ["trouble"], body=body)
    package = forged(tmp_path, loop, constants={"turns": np.array(2**62), "zero": np.float32(0)})
    begin = "from isthmus.orchestration.cli import packages; packages.SECONDS = 5"
    shown = verify(package, begin=begin)
    assert (shown.returncode, "it took more than 5 seconds" in shown.stderr) == (1, True), shown.stderr


def test_every_wrong_thing_has_its_line_and_the_first_is_the_error(tmp_path: Path) -> None:
    package = make_package(tmp_path / "package", shift=0.001)
    rewritten("manifest.json", lambda m: m.update(service="others"))(package)
    shown = verify(package)
    assert shown.returncode == 1
    assert [line.split()[0] for line in shown.stdout.splitlines() if " refused " in line] == [
        "contract.json", "model.int8.ort",
    ]  # fmt: skip
    assert "no service others; expected late" in shown.stderr
    told = verify(package, "--json")
    assert told.returncode == 1
    assert [check["check"] for check in json.loads(told.stdout)["checks"] if not check["passed"]] == [
        "contract.json", "model.int8.ort",
    ]  # fmt: skip
    (package / "README.md").write_text("[bold]not listed[/bold]")
    resum(package)
    damaged = make_package(tmp_path / "damaged")
    (damaged / "[red]x").write_text("")
    shown = verify(damaged)
    assert (shown.returncode, "not listed in SHA256SUMS" in shown.stderr) == (1, True)


def test_a_terminal_obeys_nothing_that_a_package_says(tmp_path: Path) -> None:
    package, obeyed = of_tensors(tmp_path), "\x1b]0;mine\x1b[2J"
    model = onnx.load(package / "model.fp32.onnx")
    model.graph.node[0].op_type = obeyed
    (package / "model.fp32.onnx").write_bytes(model.SerializeToString())
    (package / "model.fp32.ort").rename(package / "[red]model.ort")
    for name in ("manifest.json", "golden.json"):
        file = package / name
        file.write_text(file.read_text().replace("model.fp32.ort", "[red]model.ort"))
    resum(package)
    shown = verify(package)
    assert shown.returncode == 1
    assert "\x1b" not in shown.stdout + shown.stderr
    assert "mine" in shown.stdout
    assert "mine" in shown.stderr
    assert "[red]model.ort" in shown.stdout


@pytest.mark.accept
def test_a_key_asks_for_a_signature(tmp_path: Path) -> None:
    package, (private, public), (_, other) = (
        make_package(tmp_path / "package"),
        pair(tmp_path, "a"),
        pair(tmp_path, "b"),
    )
    shown = verify(package, "--key", str(public))
    assert (shown.returncode, "the package is not signed" in shown.stderr) == (1, True)
    Signer(private).sign(package)
    assert "signed; no key to check it with" in verify(package, absent=SIGNING).stdout
    shown = verify(package, "--key", str(public))
    assert (shown.returncode, "by key" in shown.stdout) == (0, True)
    shown = verify(package, "--key", str(other))
    assert (shown.returncode, "is signed by key" in shown.stderr) == (1, True)
    assert verify(package, "--key", str(private)).returncode == 2
    shown = verify(package, "--key", str(public), absent=SIGNING)
    assert (shown.returncode, "isthmus[signing]" in shown.stderr) == (3, True)


@pytest.mark.accept
def test_a_browser_s_runtime_takes_tensors_of_every_kind(cache: Path, tmp_path: Path) -> None:
    package = of_tensors(tmp_path)
    inspection = inspect(package, runtime=WebRuntime(cache))
    inspection.require()
    assert inspection.worst == {"model.fp32.ort": 0.0}
    assert [entry.name for entry in cache.glob("onnxruntime-web-*")] == [WebRuntime(cache).node.folder.name]


@pytest.mark.accept
def test_a_browser_s_runtime_answers_as_recorded(cache: Path, tmp_path: Path) -> None:
    package = of_rows(tmp_path)
    inspection = inspect(package, runtime=WebRuntime(cache))
    inspection.require()
    assert inspection.worst.keys() == {"model.fp32.ort", "model.int8.ort"}
    assert max(inspection.worst.values()) <= TOLERANCE
    shutil.copy(package / "model.int8.ort", package / "model.fp32.ort")
    resum(package)
    (found,) = [check for check in inspect(package, runtime=WebRuntime(cache)).checks if check.error]
    assert (found.subject, "does not reproduce" in found.finding) == ("model.fp32.ort", True)
    (package / "model.fp32.ort").write_bytes(b"ORTM" * 9)
    resum(package)
    (found,) = [check for check in inspect(package, runtime=WebRuntime(cache)).checks if check.error]
    assert (found.subject, "onnxruntime-web refuses it" in found.finding) == ("model.fp32.ort", True)


def test_a_runtime_that_is_not_known_is_named_with_all_that_are() -> None:
    sentence = r"runtime 'litrt': is not known \(did you mean litert\?\); expected one of coreml, .*, litert, ort, web"
    with pytest.raises(RequestError, match=sentence):
        open_runtime("litrt")


@pytest.mark.accept
def test_what_a_browser_s_runtime_lacks_is_named(cache: Path, tmp_path: Path) -> None:
    package, nothing = make_package(tmp_path / "package"), str(tmp_path)
    shown = verify(package, "--runtime", "web", PATH=nothing)
    assert (shown.returncode, "node: not found. Install Node.js 20" in shown.stderr) == (3, True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "node").symlink_to(shutil.which("node") or "")
    shown = verify(package, "--runtime", "web", PATH=str(tmp_path / "bin"), XDG_CACHE_HOME=nothing)
    assert (shown.returncode, "npm: not found. Install Node.js 20" in shown.stderr) == (3, True)
    shown = verify(
        package, "--runtime", "web", XDG_CACHE_HOME=str(tmp_path / "cache"),
        npm_config_registry="http://127.0.0.1:1/", npm_config_cache=str(tmp_path / "npm"),
    )  # fmt: skip
    assert (shown.returncode, "npm: cannot install onnxruntime-web" in shown.stderr) == (3, True), shown.stderr
    assert list((tmp_path / "cache" / "isthmus").iterdir()) == []


@pytest.mark.accept
def test_the_javascript_of_a_readme_runs(tmp_path: Path) -> None:
    package = of_tensors(tmp_path)
    (code,) = re.findall(r"```javascript\n(.*?)```", (package / "README.md").read_text(), re.DOTALL)
    (model,) = set(re.findall(r"bytes of (\S+)", code))
    runtime = installed() / "node_modules" / "onnxruntime-web" / "dist" / "ort.node.min.mjs"
    script = tmp_path / "readme.mjs"
    script.write_text(
        f'import {{ readFileSync }} from "node:fs";\nimport * as ort from "{runtime.as_uri()}";\n{code}\n'
        "const [model, golden] = process.argv.slice(2).map((file) => readFileSync(file));\n"
        "console.log(await check(ort, model, JSON.parse(golden)));\n"
    )
    command = ["node", str(script), str(package / model), str(package / "golden.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) <= TOLERANCE
