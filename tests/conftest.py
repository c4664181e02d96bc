"""Hypothesis profiles: `HYPOTHESIS_PROFILE=thorough pytest` looks harder."""

import gc
import os
import signal
import zlib

import pytest
from hypothesis import HealthCheck, settings

# What modules consist of is no garbage: half of the time of importing them would go into looking for it.
gc.disable()

settings.register_profile("default", max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure() -> None:
    """Lets SIGINT end what tests start: shells ignore it for what runs in the background, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rooms with long files first, short files last; between them, files that wait among files that compute."""
    long, short = {"transforms", "rollout", "verification", "graph"}, {"features", "repository"}

    def turn(item: pytest.Item) -> tuple[bool, bool, int]:
        file = item.nodeid.partition("::")[0]
        rooms = set(file.split("/"))
        return long.isdisjoint(rooms), not short.isdisjoint(rooms), zlib.crc32(file.encode())

    items.sort(key=turn)


def pytest_collection_finish() -> None:
    """Looks for garbage from here on, and never among what was imported."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup() -> None:
    """Forget the width of a terminal: workers have none, but readline exports one to their environment."""
    os.environ.pop("COLUMNS", None)
