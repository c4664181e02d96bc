"""Output of `isthmus distill`, `isthmus model search` and `isthmus model benchmark-device`."""

from collections.abc import Iterator, Mapping
from typing import Any

from isthmus.distill.reports.comparison import comparison, explained, legend, measures
from isthmus.distill.reports.findings import early_stops, teacher_gain, warnings
from isthmus.distill.reports.report import read_report
from isthmus.distill.reports.searchpage import advice, front, read_search
from isthmus.features.document.blocks import Block, Paragraph, TableBlock, cell


def distillation_blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    yield from models_blocks(report)
    if not report["trained"]:
        yield Paragraph(f"Nothing has changed since student {report['id']} was trained. Use --again to train anyway.")
    yield Paragraph(f"Student, with report.html: {report['path']}")


def models_blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    read = read_report(report)
    yield comparison(read)
    yield legend(read)
    yield from explained(measures(read))
    yield from map(Paragraph, (*warnings(read), *teacher_gain(read), *early_stops(read)))
    yield Paragraph(f"{len(read.seeds)} seed{'s' if len(read.seeds) > 1 else ''}; shipped: {read.shipped}.")


def search_blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    read = read_search(report)
    if read.front:
        yield front(read)
        yield Paragraph(
            f"{read.metric} of the exported graph on the validation part. No other student is better in every column."
        )
    statuses = [trial.status for trial in read.trials]
    counts = ", ".join(f"{statuses.count(word)} {word}" for word in ("trained", "over budget", "failed"))
    yield Paragraph(f"{len(statuses)} students: {counts}. Budget: {read.budget.words}.")
    yield from advice(read)
    yield Paragraph(f"Page: {report['path']}/search.html")


def device_blocks(report: Mapping[str, Any]) -> Iterator[Block]:
    processor = report["processor"]
    columns = ["values", "differing", "worst", "p50_us", "p99_us", "load_ms", "memory_mb"]
    rows = [[file["file"], *(cell(file[name]) for name in columns)] for file in report["files"]]
    yield TableBlock(["model file", *columns], rows, numbers=columns)
    yield Paragraph(
        f"Measured on {report['target']}: {processor['machine']}, {processor['processor']}, "
        f"ONNX Runtime {processor['onnxruntime']}, one thread."
    )
    yield Paragraph(f"Signed measurement: {report['path']}")
