"""The README of a package: what its model is fed, what it gives, and code for each platform that has run it once."""

import json
from collections.abc import Iterable, Sequence

from isthmus.features.package.checksums import SUMS
from isthmus.features.package.manifest import Manifest, Tensor
from isthmus.features.request.layout import VALID, given

_PYTHON = """\
```python
import base64
import json
from pathlib import Path

import numpy as np
import onnxruntime

KINDS = {"bool": "?", "uint8": "u1", "int32": "<i4", "int64": "<i8", "float": "<f4", "double": "<f8"}


def tensor(kept):
    if kept["element"] == "string":
        return np.array(kept["texts"], object).reshape(kept["shape"])
    return np.frombuffer(base64.b64decode(kept["data"]), KINDS[kept["element"]]).reshape(kept["shape"])


session = onnxruntime.InferenceSession("@FILE@")
names = [output.name for output in session.get_outputs()]
for case in json.loads(Path("golden.json").read_text())["cases"]:
    feeds = {name: tensor(kept) for name, kept in case["tensors"].items()}
    expected = case["outputs"]["@FILE@"]
    for name, found in zip(names, session.run(names, feeds)):
        assert np.abs(tensor(expected[name]) - found).max() <= 1e-5
```
"""
_JAVASCRIPT = """\
```javascript
const KINDS = { bool: Uint8Array, uint8: Uint8Array, int32: Int32Array, int64: BigInt64Array,
                float: Float32Array, double: Float64Array };

function tensor(ort, { element, shape, data, texts }) {
  if (element === "string") return new ort.Tensor("string", texts, shape);
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const type = { float: "float32", double: "float64" }[element] ?? element;
  return new ort.Tensor(type, new KINDS[element](bytes.buffer), shape);
}

const apart = (one, other) => (one === other ? 0 : Math.abs(Number(one) - Number(other)));

// The largest difference from what is recorded. `ort` is onnxruntime-web, or onnxruntime-node.
async function check(ort, model, golden) {
  const session = await ort.InferenceSession.create(model); // bytes of @FILE@
  let worst = 0;
  for (const { tensors, outputs } of golden.cases) {
    const feeds = Object.fromEntries(Object.entries(tensors).map(([name, kept]) => [name, tensor(ort, kept)]));
    const answers = await session.run(feeds);
    for (const [name, kept] of Object.entries(outputs["@FILE@"])) {
      tensor(ort, kept).data.forEach((value, n) => (worst = Math.max(worst, apart(value, answers[name].data[n]))));
    }
  }
  return worst;
}
```
"""
_KOTLIN = """\
```kotlin
import ai.onnxruntime.*
import android.util.Base64
import org.json.JSONObject
import java.nio.ByteBuffer
import java.nio.ByteOrder

val kinds = mapOf("bool" to OnnxJavaType.BOOL, "uint8" to OnnxJavaType.UINT8, "int32" to OnnxJavaType.INT32,
                  "int64" to OnnxJavaType.INT64, "float" to OnnxJavaType.FLOAT, "double" to OnnxJavaType.DOUBLE)

fun tensor(env: OrtEnvironment, kept: JSONObject): OnnxTensor {
    val shape = kept.getJSONArray("shape").let { sizes -> LongArray(sizes.length()) { sizes.getLong(it) } }
    val element = kept.getString("element")
    if (element == "string") {
        val texts = kept.getJSONArray("texts").let { all -> Array(all.length()) { all.getString(it) } }
        return OnnxTensor.createTensor(env, texts, shape)
    }
    val bytes = Base64.decode(kept.getString("data"), Base64.DEFAULT)
    val buffer = ByteBuffer.allocateDirect(bytes.size).order(ByteOrder.nativeOrder())
    buffer.put(bytes).rewind()
    return OnnxTensor.createTensor(env, buffer, shape, kinds.getValue(element))
}

fun answer(env: OrtEnvironment, session: OrtSession, case: JSONObject): OrtSession.Result {
    val tensors = case.getJSONObject("tensors")
    return session.run(tensors.keys().asSequence().associateWith { tensor(env, tensors.getJSONObject(it)) })
}

// val env = OrtEnvironment.getEnvironment()
// val session = env.createSession(assets.open("@FILE@").readBytes())
```
"""
_SWIFT = """\
```swift
import Foundation
import OnnxRuntimeBindings

let kinds: [String: ORTTensorElementDataType] = ["uint8": .uInt8, "int32": .int32, "int64": .int64, "float": .float]

func tensor(_ kept: [String: Any]) throws -> ORTValue {
    let shape = kept["shape"] as! [NSNumber]
    let element = kept["element"] as! String
    if element == "string" {
        return try ORTValue(tensorStringData: kept["texts"] as! [String], shape: shape)
    }
    let data = Data(base64Encoded: kept["data"] as! String)!
    return try ORTValue(tensorData: NSMutableData(data: data), elementType: kinds[element]!, shape: shape)
}

func answer(_ session: ORTSession, _ golden: [String: Any], output: String) throws -> ORTValue {
    let tensors = golden["tensors"] as! [String: [String: Any]]
    let answers = try session.run(withInputs: tensors.mapValues(tensor), outputNames: [output], runOptions: nil)
    return answers[output]!
}

// let session = try ORTSession(env: ORTEnv(loggingLevel: .warning), modelPath: path, sessionOptions: nil)
```
"""
_NO_SWIFT = """\
The Swift package of ONNX Runtime has no tensors of kind {kinds}, of which this model takes {names}: call the C API
(`CreateTensorWithDataAsOrtValue`), which has.
"""

_EXECUTORCH = """\
`@FILE@` answers the same for runtimes that phones have instead of ONNX Runtime. It takes one row at a time, tensors in
the order of the table above: @ORDER@. Its answers differ from those of the trained model by @WORST@ at most.@OTHER@ The
Python has been run; the Kotlin and the Swift have not.

```python
import base64
import json
from pathlib import Path

import numpy as np
import torch
from executorch.runtime import Runtime

KINDS = {"bool": "?", "uint8": "u1", "int32": "<i4", "int64": "<i8", "float": "<f4", "double": "<f8"}


def tensor(kept):
    array = np.frombuffer(base64.b64decode(kept["data"]), KINDS[kept["element"]]).reshape(kept["shape"])
    return torch.from_numpy(array.copy())


program = Runtime.get().load_program("@FILE@")
method = program.load_method("forward")
for case in json.loads(Path("golden.json").read_text())["cases"]:
    feeds = [tensor(case["tensors"][name]) for name in @INPUTS@]
    expected = [tensor(case["outputs"]["@FILE@"][name]) for name in @OUTPUTS@]
    for row in range(len(feeds[0])):
        for kept, found in zip(expected, method.execute([feed[row : row + 1] for feed in feeds])):
            assert np.abs(kept[row : row + 1].numpy() - found.numpy()).max() <= 1e-5
```

```kotlin
import android.util.Base64
import org.json.JSONObject
import org.pytorch.executorch.EValue
import org.pytorch.executorch.Module
import org.pytorch.executorch.Tensor
import java.nio.ByteBuffer
import java.nio.ByteOrder

// One row of a tensor of golden.json.
fun tensor(kept: JSONObject, row: Int): EValue {
    val shape = kept.getJSONArray("shape").let { sizes -> LongArray(sizes.length()) { sizes.getLong(it) } }
    val bytes = Base64.decode(kept.getString("data"), Base64.DEFAULT)
    val size = bytes.size / shape[0].toInt()
    shape[0] = 1
    val buffer = ByteBuffer.wrap(bytes, row * size, size).slice().order(ByteOrder.LITTLE_ENDIAN)
    return EValue.from(when (val element = kept.getString("element")) {
        "float" -> Tensor.fromBlob(FloatArray(size / 4) { buffer.getFloat(4 * it) }, shape)
        "double" -> Tensor.fromBlob(DoubleArray(size / 8) { buffer.getDouble(8 * it) }, shape)
        "int32" -> Tensor.fromBlob(IntArray(size / 4) { buffer.getInt(4 * it) }, shape)
        "int64" -> Tensor.fromBlob(LongArray(size / 8) { buffer.getLong(8 * it) }, shape)
        "uint8" -> Tensor.fromBlobUnsigned(ByteArray(size) { buffer.get(it) }, shape)
        else -> error("no tensor of $element")
    })
}

fun answer(module: Module, case: JSONObject, row: Int): Array<EValue> {
    val tensors = case.getJSONObject("tensors")
    val fed = listOf(@KOTLIN@).map { tensor(tensors.getJSONObject(it), row) }
    return module.forward(*fed.toTypedArray())
}

// val module = Module.load(File(context.filesDir, "@FILE@").path)
```

```swift
import ExecuTorch
import Foundation

// One row of a tensor of golden.json.
func tensor(_ kept: [String: Any], row: Int) -> AnyTensor {
    var shape = (kept["shape"] as! [NSNumber]).map(\\.intValue)
    let kinds: [String: DataType] = ["bool": .bool, "uint8": .byte, "int32": .int, "int64": .long, "float": .float,
                                     "double": .double]
    let data = Data(base64Encoded: kept["data"] as! String)!
    let size = data.count / shape[0]
    shape[0] = 1
    return AnyTensor(data: data.subdata(in: row * size ..< (row + 1) * size), shape: shape,
                     dataType: kinds[kept["element"] as! String]!)
}

func answer(_ module: Module, _ golden: [String: Any], row: Int) throws -> [Value] {
    let tensors = golden["tensors"] as! [String: [String: Any]]
    return try module.forward([@SWIFT@].map { tensor(tensors[$0]!, row: row) })
}

// let module = Module(filePath: path)
```
"""
_RUNNING = """\
`golden.json` holds cases: `tensors` that the model is fed, and the `outputs` of each of its files. The code below asks
`{file}` for them. Another processor may differ in the last bits, by 1e-5 at most; answers differ from those of the
trained model by {worst:.2g} at most, of {tolerance} that are allowed. The Python and the JavaScript have been run; the
Kotlin and the Swift have not.
"""


def readme(manifest: Manifest) -> str:
    """The text, in Markdown. Its code opens the smallest model in ORT format."""
    opened = min((variant for variant in manifest.variants if variant.format == "ort"), key=lambda one: one.bytes)
    served = opened.file
    tensors = [[one.name, one.element, _shape(one)] for one in manifest.tensors]
    parts = [
        f"# {manifest.name}",
        f"A model for a device, made for contract `{manifest.contract}`, feature service `{manifest.service}`.",
        "## What it is fed",
        _table(["tensor", "elements", "shape"], tensors),
        _columns(manifest),
        "## What it gives",
        _table(["tensor", "elements", "shape"], [[one.name, one.element, _shape(one)] for one in manifest.outputs]),
        "## Running it",
        _RUNNING.format(file=served, worst=opened.worst, tolerance=opened.tolerance),
        *(part for name, code in (("Python", _PYTHON), ("JavaScript", _JAVASCRIPT), ("Kotlin", _KOTLIN))
          for part in (f"### {name}", code.replace("@FILE@", served))),
        "### Swift",
        _swift(manifest),
        *_executorch(manifest),
        "## Files",
        _files(manifest),
        f"`contract.json` says what the features mean. `sha256sum --check {SUMS}` says whether the folder is whole.",
    ]  # fmt: skip
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "one number"


def _columns(manifest: Manifest) -> str:
    """Which column goes where, and how a null is written."""
    if not manifest.inputs:
        return ""
    kinds = {item.tensor for item in manifest.inputs}
    rules = ["A UnixTimestamp is given in microseconds since 1970 UTC, a Bool as 0 or 1."]
    if "numeric" in kinds:
        rules.append("In `numeric`, NaN is null.")
    if "categories" in kinds:
        rules.append("In `categories`, the empty text is null.")
    if rows := [item for item in manifest.inputs if item.tensor.startswith(given(""))]:
        rules.append(
            "Inputs of a tensor `given_…` stand in it under each other, each in its own type, with any value under a "
            f"null; `{given(VALID)}` says where they are not null, for: {', '.join(item.name for item in rows)}."
        )
    table = _table(
        ["input", "type", "tensor", "place in it"],
        [[item.name, item.dtype, item.tensor, item.position] for item in manifest.inputs],
    )
    return (
        "Raw values go in: scaling, imputation and vocabularies are inside the graph.\n\n"
        + table
        + "\n\n"
        + " ".join(rules)
    )


def _swift(manifest: Manifest) -> str:
    lacking = [tensor for tensor in manifest.tensors if tensor.element in ("bool", "double")]
    if not lacking:
        return _SWIFT
    return _NO_SWIFT.format(
        kinds=" and ".join(dict.fromkeys(tensor.element for tensor in lacking)),
        names=", ".join(f"`{tensor.name}`" for tensor in lacking),
    )


def _executorch(manifest: Manifest) -> list[str]:
    programs = [variant for variant in manifest.variants if variant.format == "pte"]
    if not programs:
        return []
    fed, given = ([tensor.name for tensor in of] for of in (manifest.tensors, manifest.outputs))
    other = "".join(f" `{one.file}` is the same with whole numbers, {one.worst:.2g} at most." for one in programs[1:])
    quoted = ", ".join(json.dumps(name) for name in fed)
    told = {
        "FILE": programs[0].file, "WORST": f"{programs[0].worst:.2g}", "ORDER": ", ".join(f"`{name}`" for name in fed),
        "INPUTS": json.dumps(fed), "OUTPUTS": json.dumps(given), "KOTLIN": quoted, "SWIFT": quoted, "OTHER": other,
    }  # fmt: skip
    text = _EXECUTORCH
    for place, value in told.items():
        text = text.replace(f"@{place}@", value)
    return ["### ExecuTorch", text]


def _files(manifest: Manifest) -> str:
    measures = list(manifest.variants[0].quality)
    models = [
        [
            one.file,
            one.precision,
            f"{one.bytes:,}",
            f"{one.worst:.2g}",
            *(_number(one.quality[name]) for name in measures),
        ]
        for one in manifest.variants
    ]
    table = _table(["model", "precision", "bytes", "farthest from the trained model", *measures], models)
    return "\n\n".join([table, *(f"`{name}`: {purpose}." for name, purpose in sorted(manifest.files.items()))])


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
