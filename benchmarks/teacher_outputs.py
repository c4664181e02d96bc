"""Compare a training epoch over cached teacher outputs with one that calls the teacher.

The teacher is a transformer encoder of four layers, 192 wide; the student has one layer, 32 wide. Both have random
weights, and the texts are random tokens. Both sides train the same student on the same batches in the same order. The
time to fill the cache is shown without a target. The sides alternate, and the quietest round of each counts. Both must
give the same losses: live outputs are rounded to float16 like cached ones, but the last bits of a teacher depend on the
rows of its batch, so the loss of each step may differ by 0.1 %. The largest difference is printed.

A file of outputs (`TeacherOutputs`) with ten million rows in random order is joined to a training set by key and time.

Run it on an idle machine.
"""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from result import Comparison, at_least, less, more, note, options_parser, report
from torch import Tensor, nn

from isthmus import Entity, Field, Int64, TeacherOutputs
from isthmus.distill.tabular.users.sources import TeacherRows
from isthmus.distill.tabular.users.stored import StoredSource
from isthmus.features.definition.spec import Spine
from isthmus.losses import soft_targets
from isthmus.teachers import NetworkTeacher, OutputCache, identities

BAR = 3.0
JOINED = 1e6
CLASSES, TOKENS, WORDS, BATCH = 20, 32, 1000, 64
CLOSE = 1e-3
Targets = Callable[[Tensor], Tensor]


class Encoder(nn.Module):
    """A text encoder: token ids, (rows, TOKENS), to logits (rows, CLASSES)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(TOKENS, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, texts: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.words(texts) + self.places).mean(1))
        return logits


def epoch(texts: Tensor, targets: Targets) -> tuple[list[float], float]:
    torch.manual_seed(1)
    student = Encoder(32, 1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    losses = []
    began = time.perf_counter()
    for rows in torch.split(torch.randperm(len(texts)), BATCH):
        loss = soft_targets(student(texts[rows]), targets(rows), temperature=2.0)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, time.perf_counter() - began


def seconds_to_join(count: int, folder: Path) -> float:
    draw = np.random.default_rng(0)
    table = pa.table({
        "customer": draw.integers(0, count // 10, count),
        "event_timestamp": pa.array(np.arange(count) * 1_000_000, pa.timestamp("us", tz="UTC")),
    })  # fmt: skip
    outputs = table.take(draw.permutation(count)).append_column("probabilities", pa.array(draw.random(count)))
    pq.write_table(outputs, folder / "teacher.parquet")
    spine = Spine("rows", [Entity("customer", join_keys={"customer": Int64})], Field("label", Int64), [])
    rows = TeacherRows(table, (), np.arange(count), np.zeros(count), None, {}, spine, folder, 2, numeric=False)
    began, source = time.perf_counter(), StoredSource(TeacherOutputs("teacher.parquet"), rows)
    for part in np.array_split(np.arange(count), max(1, count // 65_536)):
        source.predict_rows(part)
    return time.perf_counter() - began


def main() -> int:
    parser = options_parser(__doc__, "one round of fewer rows")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds, count = (1, 1024) if options.quick else (options.rounds, 8192)
    torch.manual_seed(0)
    texts = torch.randint(0, WORDS, (count, TOKENS))
    teacher = NetworkTeacher(Encoder(192, 4))
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        rows = identities({"text": texts})
        identified = time.perf_counter() - began
        kept = OutputCache(Path(folder), teacher, rows, lambda rows: texts[rows], contract="none", batch=BATCH)
        began = time.perf_counter()
        kept.fill()
        filled = time.perf_counter() - began
        began = time.perf_counter()
        kept = OutputCache(Path(folder), teacher, rows, lambda rows: texts[rows], contract="none", batch=BATCH)
        opened = time.perf_counter() - began
        sides: dict[str, Targets] = {
            "kept": lambda rows: kept[rows]["logits"],
            "live": lambda rows: teacher.ask(texts[rows])["logits"].half(),
        }
        best, losses, worst = dict.fromkeys(sides, math.inf), dict[str, list[float]](), 0.0
        for _ in range(rounds):
            for side, targets in sides.items():
                losses[side], taken = epoch(texts, targets)
                best[side] = min(best[side], taken)
            pairs = zip(losses["kept"], losses["live"], strict=True)
            worst = max(worst, *(abs(kept - live) / abs(live) for kept, live in pairs))
        began = time.perf_counter()
        for part in torch.split(torch.randperm(count), BATCH):
            _ = kept[part]
        gathered = time.perf_counter() - began
        large = 100_000 if options.quick else 10_000_000
        joined = seconds_to_join(large, Path(folder))
    note(f"{count} rows identified in {identified:.2f} s, filled in {filled:.2f} s, opened in {opened:.3f} s; {best}")
    note(f"the losses of {count // BATCH} steps differ by at most {worst:.1e} of their value ({CLOSE:g} is allowed)")
    if worst > CLOSE:
        raise SystemExit(f"the losses differ by {worst:.1e} of their value")
    steps = f"{count:,} rows, batches of {BATCH}"
    comparisons: list[Comparison] = [
        less(
            f"an epoch of a student, {steps}", "s", best["kept"], best["live"], "calling the teacher in each step", BAR
        ),
        more(f"rows gathered at random, {steps}", "rows/s", count / gathered, count / filled, "computed and saved"),
        at_least(f"a file of outputs joined to a training set, {large:,} rows", "rows/s", large / joined, JOINED),
    ]
    return report("teacher_outputs", comparisons, as_json=options.json, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
