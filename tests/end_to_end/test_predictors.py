"""The predictions of a README: run in Node, compiled for Android, and in the oldest ONNX Runtime that it names."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyspark
import pytest
from onnx import helper, numpy_helper

from isthmus.distill.onnx.quantize import quantize_mixed
from isthmus.distill.onnx.runtime import oldest_runtime, ort_format, predict, session
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.project import Project
from isthmus.package.clients import CLIENTS
from isthmus.package.golden import read_golden
from isthmus.package.manifest import open_package
from tests.distill.decoder.support import packaged
from tests.end_to_end.compilers import QUICK, compiler
from tests.end_to_end.test_labels import KINDS, exported_shop

pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

NODE = "onnxruntime-node@1.30.0"
JSON = Path(pyspark.__file__).parent / "jars" / "json-1.8.jar"
"""org.json for Java: on Android it is there."""
ELEMENTS = {"bool": np.bool_, "uint8": np.uint8, "int32": np.int32, "int64": np.int64}


def blocks(package: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (package / "README.md").read_text(encoding="utf-8"), re.DOTALL)


USUAL = ("classes",)
"""The kind that `make accept` packages: its predictor has the names of the classes to read."""


@pytest.fixture(
    scope="module",
    params=[kind if kind in USUAL else pytest.param(kind, marks=pytest.mark.slowest) for kind in KINDS],
)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of a label of each kind, with stored features on the device."""
    return Artifacts.of(Project(exported_shop(tmp_path_factory, request.param)), None).last_package()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder), NODE]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_python_and_node_predict_the_golden_rows(package: Path, node: Path, tmp_path: Path) -> None:
    (node / "predictor.mjs").write_text(blocks(package, "javascript")[0], encoding="utf-8")
    (tmp_path / "predictor.py").write_text(blocks(package, "python")[0], encoding="utf-8")
    said = []
    for command, folder in (
        ([sys.executable, "-W", "error", "predictor.py"], tmp_path),
        (["node", "predictor.mjs"], node),
    ):
        done = subprocess.run([*command, package], cwd=folder, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        said.append(done.stdout)
    for name in open_package(package).manifest.classes:
        assert all(name in each for each in said)


@pytest.mark.slowest
def test_kotlin_predicts_the_golden_rows(package: Path, tmp_path: Path) -> None:
    opened = open_package(package)
    code, example, *_, device = blocks(package, "kotlin")
    (tmp_path / "Predictor.kt").write_text(code, encoding="utf-8")
    # The examples stand alone, each in a file of its own.
    for name, text in {"Example.kt": example, "OnDevice.kt": device}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    sources = [*tmp_path.glob("*.kt"), Path(__file__).with_name("onnxruntime.kt")]
    sources += [package / name for name in CLIENTS if name.endswith(".kt")]
    jar = tmp_path / "predict.jar"
    options = ["-include-runtime", "-cp", str(JSON), "-d", str(jar)]
    subprocess.run(["bash", str(compiler()), *options, *sources], env={**os.environ, **QUICK}, check=True)
    smallest = min((each for each in opened.manifest.variants if each.format == "ort"), key=lambda each: each.bytes)
    runtime = session(opened.files.read(smallest.file), 1)
    command = ["java", "-cp", f"{jar}:{JSON}", "isthmus.PredictorKt", str(package)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("feeds "):
                fed = {name: array(**tensor) for name, tensor in json.loads(line.removeprefix("feeds ")).items()}
                numbers = predict(runtime, fed).ravel().tolist()
                process.stdin.write(" ".join(str(number).replace("nan", "NaN") for number in numbers) + "\n")
                process.stdin.flush()
    assert process.returncode == 0, lines
    rows = sum(len(case.rows) for case in read_golden(opened).cases)
    assert re.fullmatch(rf"{rows} golden rows, largest difference \S+", lines[-1])


def array(element: str, values: list[Any], shape: list[int]) -> "np.ndarray[Any, Any]":
    """A tensor of the stand-in for the runtime: floats are whole numbers with their bits."""
    if element == "string":
        return np.array(values, object).reshape(shape)
    if element in ("float", "double"):
        whole = np.array([int(value) for value in values], np.int32 if element == "float" else np.int64)
        return whole.view(np.float32 if element == "float" else np.float64).reshape(shape)
    return np.array([int(value) for value in values], ELEMENTS[element]).reshape(shape)


OPEN = """
import sys
import numpy, onnxruntime
onnxruntime.set_default_logger_severity(4)
print(onnxruntime.__version__)
for file in sys.argv[1:]:
    try:
        onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception:
        print("refused", file)
"""


@pytest.fixture(scope="session", params=["1.19.2", pytest.param("1.22.1", marks=pytest.mark.slowest)])
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A release of ONNX Runtime and the folder that it is installed in, with the NumPy of its time."""
    folder = tmp_path_factory.mktemp("runtime")
    wanted = [f"onnxruntime=={request.param}", "numpy<3"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--target", str(folder), *wanted]
    subprocess.run(command, check=True, capture_output=True)
    return str(request.param), folder


def test_the_oldest_runtime_of_a_readme_opens_and_predicts(
    package: Path, release: tuple[str, Path], tmp_path: Path
) -> None:
    version, folder = release
    table = re.findall(r"^\| (model\.\S+) \| (\d+\.\d+) \|$", (package / "README.md").read_text(), re.MULTILINE)
    models = [variant.file for variant in open_package(package).manifest.variants]
    assert table == [(file, "1.19") for file in models]
    assert refused(folder, version, [package / file for file in models]) == []
    (tmp_path / "predictor.py").write_text(blocks(package, "python")[0], encoding="utf-8")
    command = [sys.executable, "-S", "predictor.py", str(package)]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "golden rows, largest difference" in done.stdout


def test_what_an_older_runtime_refuses_names_a_newer_one(release: tuple[str, Path], tmp_path: Path) -> None:
    """The weights of a causal model need operators that came later; convolutions are fused in ORT format."""
    version, folder = release
    files = [*packaged(tmp_path / "causal").path.glob("model.*.o*")]
    conv = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("Gelu", ["r"], ["y"]),
        ],
        "conv", [helper.make_tensor_value_info("x", 1, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", 1, ["n", 4, 8, 8])],
        [helper.make_tensor("w", 1, [4, 3, 3, 3], [0.1] * 108)],
    )  # fmt: skip
    for opset, ir in ((20, 9), (23, 11)):
        model = helper.make_model(conv, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
        onnx.save(model, tmp_path / f"conv{opset}.onnx")
        (tmp_path / f"conv{opset}.ort").write_bytes(ort_format(model.SerializeToString()))
        files += [tmp_path / f"conv{opset}.onnx", tmp_path / f"conv{opset}.ort"]
    files += transformer_files(tmp_path)
    minor = int(version.split(".")[1])
    promised = [file for file in files if int(oldest_runtime(file.read_bytes()).split(".")[1]) <= minor]
    expected = {"model.fp32.onnx", "model.fp32.ort", "conv20.onnx", "conv20.ort", "block.fp32.ort", "block.mixed.ort"}
    assert expected <= {file.name for file in promised}
    assert refused(folder, version, promised) == []
    others = [file for file in files if file not in promised]
    assert "model.int4.ort" in refused(folder, version, others)


def transformer_files(folder: Path) -> list[Path]:
    """Files of a normalization and a layer, which ONNX Runtime fuses in ORT format."""
    draw = np.random.default_rng(3)
    constants = {"scale": draw.normal(size=64), "w": draw.normal(size=(64, 80)), "b": draw.normal(size=80)}
    block = helper.make_graph(
        [
            helper.make_node("Add", ["x", "r"], ["s"]), helper.make_node("LayerNormalization", ["s", "scale"], ["n"]),
            helper.make_node("MatMul", ["n", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["a"]),
            helper.make_node("Gelu", ["a"], ["y"]),
        ],
        "block", [helper.make_tensor_value_info(name, 1, ["n", "p", 64]) for name in ("x", "r")],
        [helper.make_tensor_value_info("y", 1, ["n", "p", 80])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
    )  # fmt: skip
    model = helper.make_model(block, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    rows = [{name: draw.normal(size=(4, 3, 64)).astype(np.float32) for name in ("x", "r")}]
    (folder / "block.fp32.ort").write_bytes(ort_format(model.SerializeToString()))
    (folder / "block.mixed.ort").write_bytes(ort_format(quantize_mixed(model, rows, ("MatMul",)), compressed=True))
    return [folder / "block.fp32.ort", folder / "block.mixed.ort"]


def refused(folder: Path, version: str, files: list[Path]) -> list[str]:
    """The names of the files that a release does not open."""
    command = [sys.executable, "-S", "-c", OPEN, *map(str, files)]
    done = subprocess.run(command, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
    first, *lines = done.stdout.splitlines()
    assert first == version
    return [Path(line.removeprefix("refused ")).name for line in lines]
