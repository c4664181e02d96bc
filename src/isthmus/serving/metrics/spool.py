"""Gauges of recorded answers that are not collected yet."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric

from isthmus.serving.recorder.spool import SpoolBacklog, waiting


class SpoolGauges:
    """Gauges of the spool folder, as last read. All workers of a server report the same values."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._backlog = SpoolBacklog(0, None)

    def look(self) -> None:
        """Read the folder; keep the last values if that fails, since dropped answers are counted elsewhere."""
        with suppress(OSError):
            self._backlog = waiting(self._folder)

    def collect(self) -> Iterator[Metric]:
        since = self._backlog.since
        yield GaugeMetricFamily(
            "isthmus_spool_bytes", "Size of recorded answers in the spool.", value=self._backlog.size
        )
        yield GaugeMetricFamily(
            "isthmus_spool_limit_bytes", "Size of the spool above which recorded answers are dropped.", value=self._most
        )
        yield GaugeMetricFamily(
            "isthmus_spool_waiting_seconds",
            "Time that recorded answers have been waiting to be collected, exact to a minute; 0 without any.",
            value=0.0 if since is None else max(time.time() - since, 0.0),
        )
