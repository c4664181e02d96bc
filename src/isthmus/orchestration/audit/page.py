"""Show an audit on the terminal, or as one HTML page to send."""

from collections.abc import Iterator

from isthmus.features.audit.causes import CAUSES
from isthmus.features.document.blocks import (
    Block,
    BlockGroup,
    Code,
    Heading,
    Paragraph,
    TableBlock,
    Text,
    bad,
    cell,
    code,
    good,
    strong,
)
from isthmus.features.document.html import to_html
from isthmus.orchestration.audit.report import KINDS, AuditFinding, AuditReport, Example, ViewReport

_WIDEST = 60
"""Maximum characters of a value in a table."""


def page(report: AuditReport) -> str:
    blocks: list[Block] = [Heading(f"Audit of the Feast project {report.project}", 1), *_summary(report)]
    for view in report.views:
        blocks += [Heading(view.name), *_view(view)]
    return to_html(f"Audit of {report.project}", [*blocks, *_mend(report)])


def screen(report: AuditReport) -> Iterator[Block]:
    yield from _summary(report)
    for view, finding in report.findings:
        yield Paragraph((strong(f"{view.name}: {_title(finding)}. "), CAUSES[finding.cause].meaning))
        yield from (Paragraph(("    ", code(example.check))) for example in finding.examples[:1])
    yield from _mend(report)


def _summary(report: AuditReport) -> Iterator[Block]:
    keys = "all keys" if report.sample is None else f"at most {report.sample:,} keys per view"
    yield Paragraph(f"{report.repository}: offline store {report.offline_store}, online store {report.online_store}. "
                    f"Compared on {report.at}: {keys}, in {report.seconds:,.1f} s. Nothing was written.")  # fmt: skip
    findings = [*report.findings]
    if report.passed:
        yield Paragraph(good("Every compared value equals the value of its source."))
    elif findings:
        count = len({view.name for view, _ in findings})
        yield Paragraph(
            bad(f"{len(findings)} finding{'s' * (len(findings) > 1)} in {count} of {len(report.views)} views.")
        )
    yield from (Paragraph(bad(f"Not compared: {error}")) for error in report.errors)
    yield from (Paragraph(note) for note in report.notes)
    counts = {view.name: [sum(each.get(kind, 0) for each in view.features.values()) for kind in KINDS]
              for view in report.views}  # fmt: skip
    found = [n for n in range(len(KINDS)) if any(totals[n] for totals in counts.values())]
    columns = ["view", "rows", "keys", "values compared", *(KINDS[n] for n in found), "rows into join",
               "rows out of join", "seconds"]  # fmt: skip
    lines: list[list[Text]] = []
    for view in report.views:
        totals = [counts[view.name][n] for n in found]
        joined = [view.rows_in, view.rows_out]
        lines.append([view.name, *map(cell, (view.rows, view.keys, view.compared)),
                      *(bad(cell(total)) if total else cell(total) for total in totals), *map(cell, joined),
                      cell(view.seconds)])  # fmt: skip
    if lines:
        yield TableBlock(columns, lines, numbers=columns[1:])


def _view(view: ViewReport) -> Iterator[Block]:
    yield from (Paragraph(bad(f"Not compared: {error}")) for error in view.errors)
    if not view.findings and not view.errors:
        yield Paragraph(good(f"{view.compared:,} values compared, no difference."))
    for finding in view.findings:
        about = CAUSES[finding.cause]
        parts: list[Block] = [Paragraph(f"{about.meaning} {finding.note}".strip())]
        if about.remedy:
            parts.append(Paragraph((strong("To do: "), f"{about.remedy}.")))
        if finding.examples:
            columns = ["key", "feature", "source value", "source time", "online value", "online time"]
            parts += [TableBlock(columns, [_cells(example) for example in finding.examples], code=columns[2:])]
            checks = "\n".join(dict.fromkeys(example.check for example in finding.examples))
            parts += [BlockGroup("details", [Code(checks, "import feast, pandas")], "Check with Feast's SDK")]
        yield BlockGroup("card", parts, _title(finding))
    columns = ["feature", "compared", *KINDS]
    counted = [[name, *(cell(counts.get(kind, 0)) for kind in columns[1:])] for name, counts in view.features.items()]
    if counted:
        yield TableBlock(columns, counted, numbers=columns[1:])


def _mend(report: AuditReport) -> Iterator[Block]:
    if report.mend:
        yield Heading("Fix it with Isthmus's classes for Feast")
        yield Paragraph("Install `isthmus[orchestration]`, set these lines, run `feast apply`, and materialize again.")
        yield Code(report.mend, "feature_store.yaml")


def _title(finding: AuditFinding) -> str:
    kind = f" ({finding.kind})" if finding.kind not in finding.cause else ""
    features = f" in {', '.join(finding.features)}" if 0 < len(finding.features) <= 3 else ""
    return f"{finding.cause}{kind}: {finding.count:,} row{'s' * (finding.count > 1)}{features}"


def _cells(example: Example) -> list[Text]:
    key = ", ".join(f"{name}={value}" for name, value in example.key.items()) or "all"
    return [key, example.feature, _short(example.source), example.source_time, _short(example.online),
            example.online_time]  # fmt: skip


def _short(value: object) -> str:
    text = cell(value) if value is None else repr(value)
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}…"
