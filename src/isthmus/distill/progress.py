"""What a training run tells of itself: lines of progress for people, event files for TensorBoard."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Progress = Callable[[str, float], None]
"""Is told what is done, and the share that is done."""

WRITTEN_SECONDS, TOLD_SECONDS = 1.0, 10.0
"""Between two points of a plot and between two lines of progress, unless an evaluation comes first."""


class Account:
    """Tells where a run stands, at most so often that it costs nothing."""

    def __init__(self, progress: Progress, total: int, folder: Path | None) -> None:
        """Of a run of so many steps; without a folder there are no event files."""
        self.progress, self._total, self._folder = progress, total, folder
        self._writer: SummaryWriter | None = None
        self._rows = 0

    def begin(self, step: int) -> None:
        """From this step on: TensorBoard drops what it has of later ones, and what an earlier run left is removed."""
        if self._folder:
            from torch.utils.tensorboard import SummaryWriter  # takes a quarter of a second

            if not step:
                for file in self._folder.glob("events.out.tfevents.*"):
                    file.unlink()
            self._writer = SummaryWriter(str(self._folder), purge_step=step or None)
        self._first, self._began = step, time.monotonic()
        self._told = self._written = self._began

    def step(self, step: int, rows: int, values: Mapping[str, float], place: str) -> None:
        """A step was made, of so many rows."""
        self._rows += rows
        now = time.monotonic()
        if self._writer and now - self._written >= WRITTEN_SECONDS:
            self._written = now
            self._write("step", step, values)
        if now - self._told >= TOLD_SECONDS:
            self._tell(step, {"loss": values["loss"]}, place)

    def paused(self, seconds: float) -> None:
        """For so long nothing was done, which makes no step slower."""
        self._began += seconds

    def evaluation(self, step: int, means: Mapping[str, float], metrics: Mapping[str, float], place: str) -> None:
        """The module was evaluated."""
        self._tell(step, {"loss": means["loss"], **metrics}, place)
        self._write("evaluation", step, {**means, **metrics})

    def end(self) -> None:
        """Writes what is left."""
        if self._writer:
            self._writer.close()

    def _tell(self, step: int, values: Mapping[str, float], place: str) -> None:
        self._told = time.monotonic()
        seconds = self._told - self._began
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        left = (self._total - step) * seconds / (step - self._first)
        self.progress(f"{place}: {shown}, {self._rows / seconds:,.0f} rows/s, {left:,.0f} s left", step / self._total)

    def _write(self, group: str, step: int, values: Mapping[str, float]) -> None:
        if self._writer:
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)
