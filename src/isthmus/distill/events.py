"""Event files of a training run, for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path


class Events:
    """Writes scalars by step."""

    def __init__(self, folder: Path, step: int) -> None:
        """Event files in a folder.

        Args:
            folder: of the run.
            step: where it begins. From 0, files that are there are of an earlier run and are removed; from later on,
                TensorBoard drops what they have from that step on.
        """
        from torch.utils.tensorboard import SummaryWriter  # a quarter of a second, for runs that write any

        if not step:
            for file in folder.glob("events.out.tfevents.*"):
                file.unlink()
        self._writer = SummaryWriter(str(folder), purge_step=step or None)

    def write(self, group: str, values: Mapping[str, float], step: int) -> None:
        """One point of each value, as `group/name`."""
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
