"""The README of a package: what its model takes and returns, and code for each platform (`README.md.jinja`)."""

import json
from pathlib import Path

import jinja2

from isthmus.features.package.checksums import SUMS
from isthmus.features.package.manifest import Manifest, Variant
from isthmus.features.request.layout import VALID, input_name

_NOT_IN_SWIFT = ("bool", "double")
_TEMPLATES = jinja2.Environment(  # noqa: S701 - Markdown, not HTML
    loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)
_TEMPLATES.filters["json"] = json.dumps


def readme(manifest: Manifest) -> str:
    """The text, in Markdown. Its code opens the smallest model in ORT format."""
    measures = list(manifest.variants[0].quality)

    def qualities(variant: Variant) -> list[str]:
        values = (variant.quality[measure] for measure in measures)
        return ["not known" if value is None else f"{value:.4g}" for value in values]

    return _TEMPLATES.get_template("README.md.jinja").render(
        manifest=manifest,
        served=min((variant for variant in manifest.variants if variant.format == "ort"), key=lambda file: file.bytes),
        programs=[variant for variant in manifest.variants if variant.format == "pte"],
        measures=measures,
        qualities=qualities,
        input_names=[tensor.name for tensor in manifest.tensors],
        output_names=[tensor.name for tensor in manifest.outputs],
        input_tensors={column.tensor for column in manifest.inputs},
        request_columns=[column.name for column in manifest.inputs if column.tensor.startswith(input_name(""))],
        unsupported=[tensor for tensor in manifest.tensors if tensor.element in _NOT_IN_SWIFT],
        valid=input_name(VALID),
        sums=SUMS,
    )
