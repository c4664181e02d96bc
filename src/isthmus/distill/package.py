"""The folder a mobile engineer receives."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features.files import publish
from isthmus.features.manifest import SUMS, Golden, Manifest, read_package
from isthmus.features.rowgraph import VALID, given
from isthmus.transforms.fitting import LEARNED, Preparation

_README = """\
# {name}

A model for a device: raw feature values in, a probability out. Scaling, imputation and category vocabularies are inside
the graph. Made for contract `{contract}`, feature service `{service}`.

## Feeding it

{tensors}

| input | type | tensor | column |
| --- | --- | --- | --- |
{inputs}

The output `{output}` is float32 (N,).

```python
import json
from pathlib import Path

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{file}")
golden = json.loads(Path("golden.json").read_text())
rows = golden["rows"]
feeds = {{
{feeds}
}}
answer = session.run(None, feeds)[0]
assert np.abs(answer - golden["outputs"]["{file}"]).max() <= {tolerance}
```

A UnixTimestamp is given in microseconds since 1970 UTC, a Bool as 0 or 1.

## Files

| file | precision | bytes | largest difference allowed | seen | AUC |
| --- | --- | --- | --- | --- | --- |
{variants}

The difference is of probabilities, against the trained model. `golden.json` holds rows with the answer of every file;
`contract.json` says what the inputs mean, `preparation.json` what the training part taught about them, which is inside
the graph; `sha256sum --check {sums}` says whether the folder is whole.
"""


_ROW = {
    "bool": ("bool", "False"), "int32": ("np.int32", "0"), "int64": ("np.int64", "0"), "float": ("np.float32", "0"),
    "double": ("np.float64", "0"), "string": ("object", "''"),
}  # fmt: skip
"""By what a graph holds a value as, NumPy's type, and what to put under a null."""


def write_package(
    packages: Path,
    manifest: Manifest,
    contract: Mapping[str, Any],
    learned: Preparation,
    golden: Golden,
    models: Mapping[str, bytes],
) -> Path:
    """Writes a package and gives its folder, whose name ends in the digest of what it holds."""
    files = {
        **models,
        "manifest.json": _json(manifest),
        "contract.json": json.dumps(contract, separators=(",", ":"), sort_keys=True).encode() + b"\n",
        LEARNED: msgspec.json.encode(learned) + b"\n",
        "golden.json": json.dumps(msgspec.to_builtins(golden), separators=(",", ":"), allow_nan=False).encode() + b"\n",
        "README.md": _readme(manifest).encode(),
    }
    lines = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files)]
    files[SUMS] = "".join(lines).encode()
    target = packages / f"{manifest.name}-{hashlib.sha256(files[SUMS]).hexdigest()[:12]}"

    def write(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    publish(target, write)
    read_package(target)
    return target


def package_bytes(path: Path, precision: str) -> int:
    """Bytes of a package that ships one precision: every file but the models of the other."""
    return sum(
        file.stat().st_size
        for file in path.iterdir()
        if not file.name.startswith("model.") or file.name.startswith(f"model.{precision}.")
    )


def _json(value: Any) -> bytes:
    return json.dumps(msgspec.to_builtins(value), indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


def _readme(manifest: Manifest) -> str:
    kinds = {item.tensor for item in manifest.inputs}
    tensors, feeds = [], []
    known = list(dict.fromkeys(item.name for item in manifest.inputs))
    if "numeric" in kinds:
        places = [known.index(item.name) for item in manifest.inputs if item.tensor == "numeric"]
        tensors.append(f"`numeric` is float32 (N, {len(places)}); NaN is null.")
        feeds.append(f'    "numeric": np.array([[row[i] for i in {places}] for row in rows], np.float32),')
    if "categories" in kinds:
        places = [known.index(item.name) for item in manifest.inputs if item.tensor == "categories"]
        tensors.append(f"`categories` is string (N, {len(places)}); the empty string is null.")
        feeds.append(f'    "categories": np.array([[row[i] or "" for i in {places}] for row in rows], object),')
    rows = [item for item in manifest.inputs if item.tensor.startswith(given(""))]
    if rows:
        tensors.append(
            "Inputs of a tensor `given_…` stand in it under each other, (inputs, N), each in its own type, with any "
            f"value under a null; `{given(VALID)}`, booleans of shape ({len(rows)}, N), says where they are not null, "
            "in the order of the table."
        )
    for tensor in dict.fromkeys(item.tensor for item in rows):
        places = [known.index(item.name) for item in rows if item.tensor == tensor]
        kind, zero = _ROW[tensor.removeprefix(given(""))]
        values = f"[[{zero} if row[i] is None else row[i] for row in rows] for i in {places}]"
        feeds.append(f'    "{tensor}": np.array({values}, {kind}),')
    if rows:
        places = [known.index(item.name) for item in rows]
        feeds.append(f'    "{given(VALID)}": np.array([[row[i] is not None for row in rows] for i in {places}]),')
    served = manifest.variant("int8")
    return _README.format(
        name=manifest.name,
        contract=manifest.contract,
        service=manifest.service,
        tensors=" ".join(tensors),
        inputs="\n".join(f"| {i.name} | {i.dtype} | {i.tensor} | {i.position} |" for i in manifest.inputs),
        output=manifest.output,
        file=served.file,
        feeds="\n".join(feeds),
        tolerance=served.tolerance,
        variants="\n".join(
            f"| {v.file} | {v.precision} | {v.bytes} | {v.tolerance} | {v.worst:.2g} | {v.auc:.4f} |"
            for v in manifest.variants
        ),
        sums=SUMS,
    )
