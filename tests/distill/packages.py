"""Packages that are whole in every respect, and the forger's hand."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from isthmus.distill.export.export import export
from isthmus.distill.export.package import contents, write_package
from isthmus.distill.onnx.runtime import ask, ort_format, session, tensor_info
from isthmus.features.contract.schema import Column, Contract, ServiceContract
from isthmus.features.profiles import ServingProfile
from isthmus.package.checksums import SUMS
from isthmus.package.golden import Golden, GoldenCase, TensorBytes
from isthmus.package.manifest import FORMAT_VERSION, Manifest, Variant
from tests.distill.support import STUDENT, material, run, training_set


def contract() -> Contract:
    """One service, whose inputs are those of the student: request fields all of them."""
    request = tuple(Column(item.name, item.dtype) for item in STUDENT)
    service = ServiceContract("features", (), request, "replaced on loading")
    return Contract.loads(Contract("flights", {}, {"features": service}, {}, {}).dumps())


def of_rows(folder: Path) -> Path:
    """A package of a student, trained and exported."""
    table, made = training_set(600), contract()
    trained = run(folder, table, contract=made.hash, seeds=1)
    report = export(
        material(table, contract=made.hash, seeds=1),
        trained.path,
        folder / "packages",
        contract=json.loads(made.dumps()),
        profile=ServingProfile(latency_objective_ms=50),
        cache=folder / "cache",
    )
    return report.path


def of_tensors(folder: Path) -> Path:
    """A package whose model is fed a tensor of every kind, and gives each back."""
    kinds = {
        "bool": np.array([[True], [False]]), "uint8": np.array([[0], [255]], np.uint8),
        "int32": np.array([[-(2**31)], [2**31 - 1]], np.int32), "int64": np.array([[-(2**63)], [2**63 - 1]]),
        "float": np.array([[0.1], [-np.inf]], np.float32), "double": np.array([[0.1], [1e300]]),
        "string": np.array([["émile 😀"], [""]], object),
    }  # fmt: skip
    types = {name: getattr(TensorProto, name.upper()) for name in kinds}
    graph = helper.make_graph(
        [helper.make_node("Concat", [name, name], [f"{name}_out"], axis=1) for name in kinds],
        "kinds",
        [helper.make_tensor_value_info(name, kind, ["n", 1]) for name, kind in types.items()],
        [helper.make_tensor_value_info(f"{name}_out", kind, ["n", 2]) for name, kind in types.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    source = model.SerializeToString()
    files = {"model.fp32.onnx": source, "model.fp32.ort": ort_format(source)}
    found = {file: ask(session(data, 1), kinds) for file, data in files.items()}
    case = GoldenCase(
        {name: TensorBytes.of(array) for name, array in kinds.items()},
        {file: {name: TensorBytes.of(array) for name, array in of.items()} for file, of in found.items()},
    )
    made = contract()
    variants = tuple(
        Variant(file, "fp32", "onnx" if file.endswith("x") else "ort", len(data), _sum(data), 0.0, 0.0, {})
        for file, data in files.items()
    )
    manifest = Manifest(
        FORMAT_VERSION, "kinds", made.hash, "features", "none", "none", "tests:Kinds", "none", (),
        tuple(map(tensor_info, model.graph.input)), tuple(map(tensor_info, model.graph.output)), variants, {},
    )  # fmt: skip
    whole = contents(manifest, json.loads(made.dumps()), Golden((), (case,)), files)
    return write_package(folder, manifest.name, whole)


def resum(package: Path, *, models: bool = True) -> None:
    """Makes the sums again, as a forger does; those of the model files in the manifest, too."""
    file = package / "manifest.json"
    if models:
        manifest = json.loads(file.read_bytes())
        for variant in manifest["variants"]:
            data = (package / variant["file"]).read_bytes()
            variant |= {"sha256": _sum(data), "bytes": len(data)}
        file.write_text(json.dumps(manifest))
    names = sorted(entry.name for entry in package.iterdir() if entry.name not in (SUMS, "model.sig"))
    lines = [f"{_sum((package / name).read_bytes())}  {name}\n" for name in names]
    (package / SUMS).write_text("".join(lines), encoding="utf-8")


def rewritten(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """A forger's change of a JSON file, with the sums made again."""

    def forge(package: Path) -> None:
        data = json.loads((package / name).read_bytes())
        change(data)
        (package / name).write_text(json.dumps(data))
        resum(package, models=False)

    return forge


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
