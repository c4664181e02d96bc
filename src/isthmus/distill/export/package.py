"""Write the package folder that a mobile engineer receives, with its README (`README.md.jinja`)."""

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from isthmus.distill.onnx.runtime import oldest_runtime
from isthmus.features.contract.schema import SEPARATOR
from isthmus.features.files import publish
from isthmus.features.request.layout import VALID, input_name
from isthmus.package.checksums import CONTRACT, GOLDEN, MANIFEST, README, SUMS
from isthmus.package.clients import CLIENTS, PREDICTORS, READERS, sources
from isthmus.package.featurizer.form import HEAD
from isthmus.package.golden import Golden, read_golden
from isthmus.package.manifest import CORE, MODEL, WHOLE, Format, Manifest, Variant, open_package
from isthmus.package.replay import check_featurizer

_Example = dict[str, tuple[str, ...]]

XCTEST = "CoreMLTests.swift"
_MODELS = (f"{MODEL}.", f"{CORE}.")
_NOT_IN_SWIFT = ("bool", "double")
_SWIFT_KEYS = {"Bool": "bool", "String": "string", "Bytes": "bytes"}
_PLACEHOLDER = {"String": "…", "Bytes": "…", "Bool": True}
"""Example join keys by type; 1 for all others."""
_TEMPLATES = jinja2.Environment(  # noqa: S701 - Markdown, not HTML
    loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)
_TEMPLATES.filters["json"] = json.dumps


def contents(
    manifest: Manifest, contract: Mapping[str, Any], golden: Golden, files: Mapping[str, bytes]
) -> dict[str, bytes]:
    package = {
        **files,
        MANIFEST: json.dumps(msgspec.to_builtins(manifest), indent=2, sort_keys=True, allow_nan=False).encode(),
        CONTRACT: json.dumps(contract, separators=(",", ":"), sort_keys=True).encode() + b"\n",
        GOLDEN: msgspec.json.encode(golden) + b"\n",
        README: readme(manifest, contract, golden, files).encode(),
    }
    lines = [f"{hashlib.sha256(package[name]).hexdigest()}  {name}\n" for name in sorted(package)]
    return {**package, SUMS: "".join(lines).encode()}


def xctest(manifest: Manifest) -> Mapping[str, str]:
    if (variant := _of_format(manifest, "mlpackage")) is None:
        return {}
    package = variant.file.partition(".mlpackage")[0]
    return {XCTEST: _TEMPLATES.get_template(f"{XCTEST}.jinja").render(variant=variant, package=package)}


def _of_format(manifest: Manifest, suffix: Format) -> Variant | None:
    return next((variant for variant in manifest.variants if variant.format == suffix), None)


def write_package(packages: Path, name: str, files: Mapping[str, bytes]) -> Path:
    target = packages / f"{name}-{hashlib.sha256(files[SUMS]).hexdigest()[:12]}"

    def write(folder: Path) -> None:
        for file, content in files.items():
            (folder / file).write_bytes(content)

    publish(target, write)
    package = open_package(target)
    golden = read_golden(package)
    if HEAD in package.manifest.files:
        check_featurizer(package, golden)
    return target


def package_bytes(files: Mapping[str, bytes], precision: str) -> int:
    return sum(
        len(content)
        for name, content in files.items()
        if name not in {README, *CLIENTS, *READERS}
        and (not name.startswith(_MODELS) or name.startswith(tuple(f"{part}{precision}." for part in _MODELS)))
    )


def readme(manifest: Manifest, contract: Mapping[str, Any], golden: Golden, files: Mapping[str, bytes]) -> str:
    stored = {column.name.partition(SEPARATOR)[0] for column in manifest.inputs if SEPARATOR in column.name}
    measures = list(manifest.variants[0].quality)
    whole = [variant.file for variant in manifest.variants if variant.format in WHOLE]

    def qualities(variant: Variant) -> list[str]:
        values = (variant.quality[measure] for measure in measures)
        return ["unknown" if value is None else f"{value:.4g}" for value in values]

    return _TEMPLATES.get_template("README.md.jinja").render(
        manifest=manifest,
        served=min((variant for variant in manifest.variants if variant.format == "ort"), key=lambda file: file.bytes),
        programs=[variant for variant in manifest.variants if variant.format == "pte"],
        lite=_of_format(manifest, "tflite"),
        apple=_of_format(manifest, "mlpackage"),
        xctest=XCTEST,
        head=HEAD,
        stored=stored,
        example=_example(manifest, contract, golden, stored),
        oldest={file: oldest_runtime(files[file]) for file in whole},
        predictors={name: text.decode() for name, text in sources(PREDICTORS).items()},
        fed_names=lambda variant: [tensor.name for tensor in manifest.fed(variant)],
        measures=measures,
        rounding=f"{manifest.rounding:.2g}".replace("e-0", "e-"),
        qualities=qualities,
        output_names=[tensor.name for tensor in manifest.outputs],
        input_tensors={column.tensor for column in manifest.inputs},
        request_columns=[column.name for column in manifest.inputs if column.tensor.startswith(input_name(""))],
        unsupported=[tensor for tensor in manifest.tensors if tensor.element in _NOT_IN_SWIFT],
        valid=input_name(VALID),
        minutes=manifest.device and f"{manifest.device.age / 60e6:.4g}",
        sums=SUMS,
    )


def _example(manifest: Manifest, contract: Mapping[str, Any], golden: Golden, views: Collection[str]) -> _Example:
    row = dict(zip(golden.inputs, golden.cases[0].rows[0], strict=True)) if manifest.inputs else {}
    types = {name: kind for view in sorted(views) for name, kind in contract["views"].get(view, {}).get("keys", ())}
    types |= {name: kind for view in (manifest.device.views if manifest.device else ()) for name, kind in view.keys}
    keys = {name: row[name] if row.get(name) is not None else _PLACEHOLDER.get(kind, 1) for name, kind in types.items()}
    request = {name: value for name, value in row.items() if SEPARATOR not in name and name not in keys}

    def text(values: Mapping[str, Any], begin: str, between: str, end: str, null: str) -> str:
        literals = {name: null if value is None else _json(value) for name, value in values.items()}
        if begin == "mapOf(":
            arrays = [name for name, value in values.items() if isinstance(value, tuple)]
            literals |= {name: f"listOf({literals[name][1:-1]})" for name in arrays}
        shown = [f"{_json(name)}{between}{literal}" for name, literal in literals.items()]
        return begin + (", ".join(shown) or (":" if begin == "[" else "")) + end

    forms = {
        "javascript": ("{", ": ", "}", "null"),
        "kotlin": ("mapOf(", " to ", ")", "null"),
        "swift": ("[", ": ", "]", "nil"),
    }
    example: _Example = {name: (text(keys, *form), text(request, *form)) for name, form in forms.items()}
    typed = ", ".join(
        f"{_json(name)}: .{_SWIFT_KEYS.get(types[name], 'int')}({_json(value)})" for name, value in keys.items()
    )
    example["swift"] += (f"[{typed}]",)
    # In Kotlin strings, a dollar sign begins an expression.
    example["kotlin"] = tuple(part.replace("$", "\\$") for part in example["kotlin"])
    return {**example, "python": (repr(keys), repr(request))}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
