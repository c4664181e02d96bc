"""Compare training on a GPU by precision, with and without `torch.compile`: rows per second, memory, and final loss.

A text encoder of six layers, 384 wide, learns from the cached probabilities of a wider one, over random tokens. All
sides start with the same weights, and take the same batches in the same order. Each final loss is compared with
fp32. One run in bf16 is stopped by a signal halfway, and continues from its checkpoint.

Needs a CUDA device. Run it on an idle machine.
"""

import math
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from result import Comparison, less, more, options_parser, plain_figure, report
from torch import Tensor, nn

from isthmus.distill.accelerator import accelerator
from isthmus.distill.settings import Settings
from isthmus.distill.training.loop import Training
from isthmus.features.errors import Stopped
from isthmus.features.profiles import TrainingProfile
from isthmus.losses import soft_targets

CLASSES, TOKENS, WORDS, BATCH, ROWS = 64, 128, 8000, 256, 16_384
WARM = 12
"""Steps before the clock starts: torch compiles in the first step, and chooses kernels in the next ones."""


class Encoder(nn.Module):
    """A text encoder: token ids, int64 (n, TOKENS), to logits (n, CLASSES)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(TOKENS, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, texts: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.words(texts) + self.places).mean(1))
        return logits


class Texts:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.texts = torch.randint(WORDS, (ROWS, TOKENS)).cuda()
        teacher = Encoder(768, 2).eval().cuda()
        with torch.inference_mode():
            self.logits = torch.cat([teacher(part) * 8 for part in torch.split(self.texts, 1024)])

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.cuda()
        return self.texts[rows], self.logits[rows]


class Clock:
    """A training step that starts a clock after `WARM` steps, and records the losses."""

    def __init__(self) -> None:
        self.began, self.losses = 0.0, list[Tensor]()

    def __call__(
        self, module: nn.Module, batch: tuple[Tensor, Tensor], _share: float
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        if len(self.losses) == WARM:
            torch.cuda.synchronize()
            self.began = time.perf_counter()
        loss = soft_targets(module(batch[0]), batch[1], temperature=2.0)
        self.losses.append(loss.detach())
        return loss, {"soft": loss.detach()}


def trained(
    texts: Texts, profile: TrainingProfile, steps: int, folder: Path | None = None, stop: int | None = None
) -> tuple[list[float], float, float]:
    """Return the losses of a run, rows per second after the first steps, and peak MiB on the GPU.

    With `stop`, a signal ends the run at that step.
    """
    torch.manual_seed(1)
    torch.cuda.reset_peak_memory_stats()
    clock = Clock()

    def step(module: nn.Module, batch: Any, share: float) -> tuple[Tensor, Mapping[str, Tensor]]:
        if len(clock.losses) == stop:
            signal.raise_signal(signal.SIGINT)
        return clock(module, batch, share)

    settings = Settings(steps=steps, batch=BATCH, learning_rate=3e-4)
    training = Training(Encoder(384, 6), texts, step, settings, accelerator(profile), folder=folder)
    with suppress(Stopped):
        training.run()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - clock.began
    rate = (len(clock.losses) - WARM) * BATCH / seconds
    return [loss.item() for loss in clock.losses], rate, torch.cuda.max_memory_allocated() / 2**20


def measured(steps: int, folder: Path) -> list[Comparison]:
    texts = Texts()
    plain, base, memory = trained(texts, TrainingProfile(device="cuda"), steps)
    comparisons = [
        plain_figure(f"fp32 on {torch.cuda.get_device_name()}", "rows/s", base),
        plain_figure("fp32: memory of the GPU", "MiB", memory),
    ]
    for profile in (
        TrainingProfile(device="cuda", compile=True),
        TrainingProfile(device="cuda", precision="bf16"),
        TrainingProfile(device="cuda", precision="bf16", compile=True),
    ):
        losses, rate, peak = trained(texts, profile, steps)
        case = f"{profile.precision}{', compiled' if profile.compile else ''}"
        comparisons += [
            more(case, "rows/s", rate, base, "fp32"),
            less(f"{case}: memory of the GPU", "MiB", peak, memory, "fp32"),
        ]
        comparisons.append(last_loss(case, losses, plain, "fp32"))
    profile = TrainingProfile(device="cuda", precision="bf16")
    whole, _, _ = trained(texts, profile, steps)
    first, _, _ = trained(texts, profile, steps, folder, stop=steps // 2)
    rest, _, _ = trained(texts, profile, steps, folder)
    if len(first) + len(rest) != steps:
        raise RuntimeError(f"{len(first)} steps before the signal and {len(rest)} after it, not {steps} together")
    return [*comparisons, last_loss("bf16, stopped and continued", rest, whole, "bf16")]


def last_loss(case: str, losses: list[float], others: list[float], name: str) -> Comparison:
    """Compare the final losses of two runs, which may differ by 1 %."""
    close = math.isclose(losses[-1], others[-1], rel_tol=0.01)
    return Comparison(f"{case}: last loss", "", losses[-1], others[-1], name, None, None, close)


def main() -> int:
    """Run the benchmark; return 1 if a final loss differs from fp32."""
    options = options_parser(__doc__, "few steps").parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA device")
    with TemporaryDirectory(prefix="isthmus-gpu-") as folder:
        comparisons = measured(32 if options.quick else 128, Path(folder))
    return report("gpu", comparisons, as_json=options.json, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
