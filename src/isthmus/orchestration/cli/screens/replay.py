"""Output of `isthmus answers replay`."""

from collections.abc import Iterator

from isthmus.features.document.blocks import Block, Paragraph, TableBlock
from isthmus.orchestration.recording.replay import Replay


def replay_blocks(report: Replay) -> Iterator[Block]:
    yield Paragraph(f"{report.same:,} of {report.answers:,} answers are bit-identical ({report.rows:,} rows)")
    if report.causes:
        yield TableBlock(["cause", "answers"], [[cause, f"{count:,}"] for cause, count in report.causes.items()])
        yield TableBlock(
            ["answer", "time", "cause", "found"],
            [[one.id, one.at, one.cause, one.found] for one in report.differences],
        )
