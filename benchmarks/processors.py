"""Compare the operators of our graphs on two processors, such as x86-64 and AArch64, as a table for docs/packages.md.

Each operator is an output of one graph, which runs on both targets (see `isthmus package verify --on`) with the same
inputs. Install the same release of ONNX Runtime on both:

    python benchmarks/processors.py PYTHON "qemu-aarch64-static -L ROOT ROOT/usr/bin/python3.11"
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from isthmus.distill.onnx.runtime import tensor_info
from isthmus.package.checksums import MANIFEST, PackageFiles
from isthmus.package.device.target import Target, outputs_of
from isthmus.package.golden import GoldenCase, TensorBytes
from isthmus.package.manifest import FORMAT_VERSION, Manifest, Package, Variant

Array = np.ndarray[Any, Any]
FILE, ROWS, WIDTH = "model.fp32.onnx", 256, 64
NEXT = np.random.default_rng(7)

UNARY = (
    "Abs", "Acos", "Asin", "Atan", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "Log", "Neg", "Reciprocal", "Relu",
    "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Tan", "Tanh",
)  # fmt: skip
BINARY = ("Add", "Div", "Max", "Min", "Mul", "Pow", "Sub")
SINGLE = ("Acos", "Asin", "Atan", "Cos", "Cosh", "Erf", "Sinh", "Tan")  # ONNX Runtime has them in float32 only
UNIT = ("Acos", "Asin")  # inputs from -1 to 1
POSITIVE = ("Log", "Pow", "Sqrt")


class Operator(NamedTuple):
    """Nodes that compute the output `name`, and their constants. Inputs are "x", "y", "unit", "positive" or "image"."""

    name: str
    nodes: Sequence[onnx.NodeProto]
    constants: Mapping[str, Array]


def inputs() -> dict[str, Array]:
    wide = NEXT.normal(size=(ROWS, WIDTH)) * np.exp2(NEXT.integers(-6, 3, (ROWS, WIDTH)))
    plain = {
        "x": wide,
        "y": NEXT.normal(size=(ROWS, WIDTH)) + 0.01,
        "unit": NEXT.uniform(-1, 1, (ROWS, WIDTH)),
        "positive": np.abs(wide) + 1e-3,
    }
    single = {name: value.astype(np.float32) for name, value in plain.items()}
    double = {f"{name}/double": value for name, value in plain.items()}
    return {**single, **double, "image": NEXT.uniform(0, 1, (4, 16, 24, 24)).astype(np.float32)}


def elementwise() -> list[Operator]:
    made = []
    for suffix in ("", "/double"):
        for kind in (kind for kind in (*UNARY, *BINARY) if not suffix or kind not in SINGLE):
            first = "unit" if kind in UNIT else "positive" if kind in POSITIVE else "x"
            fed = [f"{first}{suffix}", *([f"y{suffix}"] if kind in BINARY else [])]
            made.append(_operator(kind + suffix, kind, fed))
    return made


def layers() -> list[Operator]:
    weight = NEXT.normal(size=(WIDTH, 48)).astype(np.float32)
    bias, scale = NEXT.normal(size=48).astype(np.float32), NEXT.normal(size=WIDTH).astype(np.float32)
    kernel, depthwise, up = (
        NEXT.normal(size=shape).astype(np.float32) for shape in ((32, 16, 3, 3), (16, 1, 3, 3), (16, 8, 2, 2))
    )
    last = np.array([-1])
    return [
        _operator("Gemm", "Gemm", ["x", "weight", "bias"], weight=weight, bias=bias),
        _operator("MatMul", "MatMul", ["x", "weight"], weight=weight),
        _operator("Conv", "Conv", ["image", "weight"], {"pads": [1, 1, 1, 1]}, weight=kernel),
        _operator("Conv, depthwise", "Conv", ["image", "weight"], {"pads": [1, 1, 1, 1], "group": 16},
                  weight=depthwise),
        _operator("ConvTranspose", "ConvTranspose", ["image", "weight"], {"strides": [2, 2]}, weight=up),
        _operator("Gelu", "Gelu", ["x"]),
        _operator("LayerNormalization", "LayerNormalization", ["x", "scale", "shift"], {"axis": -1},
                  scale=scale, shift=scale),
        _operator("Softmax", "Softmax", ["x"], {"axis": -1}),
        _operator("ReduceSum", "ReduceSum", ["x", "last"], last=last),
        _operator("ReduceSum/double", "ReduceSum", ["x/double", "last"], last=last),
        _operator("ReduceMean", "ReduceMean", ["x", "last"], last=last),
        _operator("ReduceMax", "ReduceMax", ["x", "last"], last=last),
    ]  # fmt: skip


def quantized() -> list[Operator]:
    made = []
    for bits in (7, 8):
        most = 2 ** (bits - 1) - 1
        weight = NEXT.integers(-most, most + 1, (WIDTH, 48)).astype(np.int8)
        kernel = NEXT.integers(-most, most + 1, (32, 16, 3, 3)).astype(np.int8)
        made += [
            _quantized(f"INT8 Gemm, weights of {bits} bits", "Gemm", "x", weight, {}, step=2.0**-6, out=2.0**-2),
            _quantized(f"INT8 Conv, weights of {bits} bits", "Conv", "image", kernel, {"pads": [1, 1, 1, 1]},
                       step=2.0**-8, out=2.0**-3),
        ]  # fmt: skip
    for kind in ("Add", "Mul", "Sum"):
        made += [_between(f"INT8 {kind}, {which} steps", kind, ["x", "y"], {}, steps, 2 * steps[0])
                 for which, steps in (("other", (0.0173, 0.0071)), ("binary", (2.0**-6, 2.0**-7)))]  # fmt: skip
    pool = {"kernel_shape": [3, 3]}
    made.append(_between("INT8 AveragePool", "AveragePool", ["image"], pool, (0.0071,), 0.0063))
    made.append(_between("INT8 GlobalAveragePool", "GlobalAveragePool", ["image"], {}, (0.0071,), 0.0013))
    twice, double = {"mode": "linear"}, np.array([1, 1, 2, 2], np.float32)
    made.append(_between("INT8 Resize, linear", "Resize", ["image"], twice, (0.0071,), 0.0071, scales=double))
    whole = NEXT.integers(-63, 64, (WIDTH, 48)).astype(np.int8)
    made.append(_quantized("INT8 Gemm, other steps", "Gemm", "x", whole, {}, step=0.0173, out=0.2391))
    blocks = NEXT.integers(0, 256, (48, WIDTH // 32, 16)).astype(np.uint8)
    steps = NEXT.uniform(0.01, 0.1, 48 * WIDTH // 32).astype(np.float32)
    bytes8 = NEXT.integers(0, 256, (48, WIDTH // 32, 32)).astype(np.uint8)
    shape = {"K": WIDTH, "N": 48, "block_size": 32, "domain": "com.microsoft"}
    for name, bits, level, packed in (
        ("INT4 MatMulNBits, float32 activations", 4, 1, blocks),
        ("INT4 MatMulNBits, INT8 activations", 4, 4, blocks),
        ("INT8 MatMulNBits, INT8 activations", 8, 4, bytes8),
    ):
        attributes = {**shape, "bits": bits, "accuracy_level": level}
        made.append(_operator(name, "MatMulNBits", ["x", "weight", "steps"], attributes, weight=packed, steps=steps))
    return made


def _operator(
    name: str, kind: str, fed: Sequence[str], attributes: Mapping[str, Any] | None = None, **constants: Array
) -> Operator:
    own = {constant: f"{name}/{constant}" for constant in constants}
    node = helper.make_node(kind, [own.get(each, each) for each in fed], [name], name=name, **(attributes or {}))
    return Operator(name, [node], {own[constant]: value for constant, value in constants.items()})


def _quantized(
    name: str, kind: str, fed: str, weight: Array, attributes: Mapping[str, Any], *, step: float, out: float
) -> Operator:
    part = f"{name}/{{}}".format
    constants = {
        part("step"): np.float32(step), part("zero"): np.uint8(128), part("weight"): weight,
        part("weight step"): np.float32(2.0**-7), part("weight zero"): np.int8(0), part("out step"): np.float32(out),
    }  # fmt: skip
    steps = [
        ("QuantizeLinear", [fed, part("step"), part("zero")], part("in"), {}),
        ("DequantizeLinear", [part("in"), part("step"), part("zero")], part("in float"), {}),
        ("DequantizeLinear", [part("weight"), part("weight step"), part("weight zero")], part("weight float"), {}),
        (kind, [part("in float"), part("weight float")], part("out float"), attributes),
        ("QuantizeLinear", [part("out float"), part("out step"), part("zero")], part("out"), {}),
        ("DequantizeLinear", [part("out"), part("out step"), part("zero")], name, {}),
    ]
    nodes = [helper.make_node(op, given, [made], name=made, **more) for op, given, made, more in steps]
    return Operator(name, nodes, {key: np.asarray(value) for key, value in constants.items()})


def _between(
    name: str,
    kind: str,
    fed: Sequence[str],
    attributes: Mapping[str, Any],
    steps: Sequence[float],
    out: float,
    **more: Array,
) -> Operator:
    """An operator on floats between integers, in whose place ONNX Runtime may compute with the integers."""
    constants: dict[str, Array] = {f"{name}/zero": np.array(128, np.uint8)}
    nodes, given = list[onnx.NodeProto](), list[str]()
    for place, (tensor, step) in enumerate(zip(fed, steps, strict=True)):
        constants[f"{name}/step {place}"] = np.array(step, np.float32)
        nodes += _rounded(tensor, f"{name}/in {place}", f"{name}/step {place}", f"{name}/zero")
        given.append(f"{name}/in {place}")
    constants[f"{name}/out step"] = np.array(out, np.float32)
    constants |= {f"{name}/{part}": value for part, value in more.items()}
    given += ["", *(f"{name}/{part}" for part in more)] if more else []  # a Resize has no region of interest
    nodes.append(helper.make_node(kind, given, [f"{name}/float"], name=f"{name}/float", **attributes))
    return Operator(name, [*nodes, *_rounded(f"{name}/float", name, f"{name}/out step", f"{name}/zero")], constants)


def _rounded(tensor: str, result: str, step: str, zero: str) -> list[onnx.NodeProto]:
    """Nodes that round a tensor to integers of some step and convert them back to floats."""
    whole = f"{result}/whole"
    return [
        helper.make_node("QuantizeLinear", [tensor, step, zero], [whole], name=whole),
        helper.make_node("DequantizeLinear", [whole, step, zero], [result], name=result),
    ]


def model_of(operators: Sequence[Operator], fed: Mapping[str, Array]) -> onnx.ModelProto:
    read = {name for operator in operators for node in operator.nodes for name in node.input}
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in fed.items()
        if name in read
    ]
    constants = [
        numpy_helper.from_array(value, name) for operator in operators for name, value in operator.constants.items()
    ]
    kinds = [TensorProto.DOUBLE if each.name.endswith("/double") else TensorProto.FLOAT for each in operators]
    results = [
        helper.make_tensor_value_info(operator.name, kind, None)
        for operator, kind in zip(operators, kinds, strict=True)
    ]
    nodes = [node for operator in operators for node in operator.nodes]
    graph = helper.make_graph(nodes, "operators", given, results, constants)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def package_of(folder: Path, model: onnx.ModelProto) -> Package:
    data = model.SerializeToString()
    variant = Variant(FILE, "fp32", "onnx", len(data), sha256(data).hexdigest(), 0.0, 0.0, {})
    manifest = Manifest(
        FORMAT_VERSION, "operators", "", "", "", "", "operators", "", (), tuple(map(tensor_info, model.graph.input)),
        tuple(map(tensor_info, model.graph.output)), (variant,), {},
    )  # fmt: skip
    files = {FILE: data, MANIFEST: msgspec.json.encode(manifest)}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sums = {name: sha256(content).hexdigest() for name, content in files.items()}
    return Package(PackageFiles(folder, "", sums, {name: len(content) for name, content in files.items()}), manifest)


def ulps(left: Array, right: Array) -> int:
    """Return the greatest distance in units in the last place; two NaNs have none."""
    whole = np.int32 if left.dtype == np.float32 else np.int64
    differ = (left != right) & ~(np.isnan(left) & np.isnan(right))
    sides = [side[differ].view(whole).astype(object) for side in (left, right)]
    ordered = [np.where(side < 0, np.iinfo(whole).min - side, side) for side in sides]
    return max(np.abs(ordered[0] - ordered[1]), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs=2, metavar="TARGET", help="as for `isthmus package verify --on`")
    targets = [Target.parse(text) for text in parser.parse_args().targets]
    operators, fed = [*elementwise(), *layers(), *quantized()], inputs()
    model = model_of(operators, fed)
    read = {value.name for value in model.graph.input}
    case = GoldenCase({name: TensorBytes.of(value) for name, value in fed.items() if name in read}, {})
    with tempfile.TemporaryDirectory() as folder:
        package = package_of(Path(folder), model)
        runs = [target.run(package, package.manifest.variants[0], [case]) for target in targets]
    for run in runs:
        print(f"{run.processor.machine}: ONNX Runtime {run.processor.onnxruntime}, {run.processor.processor}")
    ours, theirs = (outputs_of(run.result)[0] for run in runs)
    print("\n| operator | values | differ | greatest difference | ulps |\n|---|---:|---:|---:|---:|")
    for operator in operators:
        left, right = ours[operator.name], theirs[operator.name]
        bits = np.dtype(f"u{left.itemsize}")
        differing = int((left.view(bits) != right.view(bits)).sum())
        gap = np.nanmax(np.abs(left.astype(np.float64) - right)) if differing else 0.0
        print(f"| {operator.name} | {left.size:,} | {differing:,} | {gap:.2g} | {ulps(left, right)} |")


if __name__ == "__main__":
    main()
