"""The gauges of what was recorded and is not collected yet."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from isthmus.serving.recorder.spool import Waiting, waiting


class SpoolGauges:
    """The folder that servers record to, as it was looked at last. Each of several workers says the same."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._found = Waiting(0, None)

    def look(self) -> None:
        """Looks at the folder. One that cannot be read stays as it was: dropped answers are counted already."""
        with suppress(OSError):
            self._found = waiting(self._folder)

    def collect(self) -> Iterator[Metric]:
        """The gauges."""
        since = self._found.since
        yield GaugeMetricFamily(
            "isthmus_spool_bytes", "Size of what was recorded of answers and lies in the spool.", value=self._found.size
        )
        yield GaugeMetricFamily(
            "isthmus_spool_limit_bytes", "Beyond that, what is recorded is dropped.", value=self._most
        )
        yield GaugeMetricFamily(
            "isthmus_spool_waiting_seconds",
            "For how long, to a minute, recorded answers have waited to be collected; 0 if none wait.",
            value=0.0 if since is None else max(time.time() - since, 0.0),
        )
