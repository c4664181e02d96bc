"""Output of `isthmus demo`."""

from collections.abc import Iterator, Mapping
from typing import Any

from isthmus.features.document.blocks import Block, Heading, Paragraph, TableBlock, bad, cell, good, strong
from isthmus.orchestration.cli.screens.models import models_blocks

_FEATURES = 5  # features shown per answer


def demo_blocks(outcome: Mapping[str, Any]) -> Iterator[Block]:
    yield Heading((outcome["project"], f"  contract {outcome['contract'][:12]}"))
    yield _views(outcome)
    examples, package, verdict = outcome["training_set"], outcome["package"], outcome["verdict"]
    yield Paragraph(f"Training set: {examples['rows_in']:,} rows in, {examples['rows_out']:,} rows out.")
    yield from models_blocks(outcome["distillation"])
    sizes = ", ".join(f"{name} {size / 1000:.1f} kB" for name, size in package["bytes"].items())
    yield Paragraph(f"Package: {package['path']} ({sizes})")
    word = good("passed") if verdict["passed"] else bad("failed")
    compared = f", {verdict['compared']:,} values compared, {verdict['differing']:,} differ."
    yield Paragraph(("Verdict: ", word, compared))
    for lookup, prediction in zip(outcome["lookups"], outcome["predictions"], strict=True):
        yield from _answer(lookup, prediction)
    seconds = dict(outcome["seconds"])
    total = seconds.pop("total")
    steps = "  ".join(f"{step} {value:.1f}" for step, value in seconds.items())
    yield Paragraph((f"Seconds: {steps}  ", strong(f"total {total:.1f}")))


def _views(outcome: Mapping[str, Any]) -> TableBlock:
    rows = []
    for name, built in outcome["views"].items():
        counts = outcome["materialize"][name]
        features = outcome["verdict"]["views"][name].values()
        verified = sum(feature["compared"] for feature in features)
        differing = sum(feature["differing"] for feature in features)
        figures = (built["rows"], counts["compared"], counts["changed"], counts["written"], verified, differing)
        rows.append([name, *map(cell, figures)])
    columns = ["rows", "keys", "changed", "written", "verified", "differing"]
    return TableBlock(["view", *columns], rows, numbers=columns)


def _answer(lookup: Mapping[str, Any], prediction: Mapping[str, Any]) -> Iterator[Block]:
    names, results = lookup["answer"]["metadata"]["feature_names"], lookup["answer"]["results"]
    keys = ", ".join(f"{key}={values[0]}" for key, values in lookup["request"]["entities"].items())
    (value,) = prediction["answer"]["predictions"]
    # A classifier returns the name of a class.
    yield Heading(f"{keys}: {f'{value:.3f}' if isinstance(value, float) else value}")
    features = [i for i, name in enumerate(names) if "__" in name]
    shown = features[:: max(1, len(features) // _FEATURES)][:_FEATURES]
    rows = [[names[i], cell(results[i]["values"][0]), results[i]["statuses"][0]] for i in shown]
    yield TableBlock(["feature", "value", "status"], rows, numbers=["value"])
    yield Paragraph(f"{len(shown)} of {len(features)} features")
