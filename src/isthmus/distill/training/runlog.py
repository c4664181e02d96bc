"""The log of a training run: progress lines for people, event files for TensorBoard."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.features.progress import Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Time between points of a plot and between progress lines, unless an evaluation comes first.
PLOT_SECONDS, LINE_SECONDS = 1.0, 10.0


class RunLog:
    """Writes progress lines, and event files to `folder`. Call `begin` before the first step, `end` after the last."""

    def __init__(self, progress: Progress, total: int, folder: Path | None) -> None:
        self.progress, self._total, self._folder = progress, total, folder
        self._writer: SummaryWriter | None = None
        self._rows = 0

    def begin(self, step: int) -> None:
        """Open the TensorBoard event files and start timing. Call this once, before the first step.

        `step` is the number of finished steps. If it is 0, delete event files of earlier runs. If a run continues at a
        later step, TensorBoard no longer shows what the earlier process logged after that step.
        """
        if self._folder:
            from torch.utils.tensorboard import SummaryWriter  # takes a quarter of a second

            if not step:
                for file in self._folder.glob("events.out.tfevents.*"):
                    file.unlink()
            self._writer = SummaryWriter(str(self._folder), purge_step=step + 1 if step else None)
        self._first, self._began = step, time.monotonic()
        self._last_line = self._last_point = self._began

    def step(self, step: int, new_rows: int, values: Mapping[str, float], prefix: str) -> None:
        self._rows += new_rows
        now = time.monotonic()
        if self._writer and now - self._last_point >= PLOT_SECONDS:
            self._last_point = now
            self._write("step", step, values)
        if now - self._last_line >= LINE_SECONDS:
            self._report(step, {"loss": values["loss"]}, prefix)

    def paused(self, seconds: float) -> None:
        self._began += seconds

    def evaluation(self, step: int, means: Mapping[str, float], metrics: Mapping[str, float], place: str) -> None:
        self._report(step, {"loss": means["loss"], **metrics}, place)
        self._write("evaluation", step, {**means, **metrics})

    def end(self) -> None:
        if self._writer:
            self._writer.close()

    def _report(self, step: int, values: Mapping[str, float], place: str) -> None:
        self._last_line = time.monotonic()
        seconds = self._last_line - self._began
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        remaining = (self._total - step) * seconds / (step - self._first)
        self.progress(
            f"{place}: {shown}, {self._rows / seconds:,.0f} rows/s, {remaining:,.0f} s left", step / self._total
        )

    def _write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)
