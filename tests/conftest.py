"""Hypothesis profiles: `HYPOTHESIS_PROFILE=thorough pytest` looks harder."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure() -> None:
    """Lets SIGINT end what tests start: shells ignore it for what runs in the background, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines and rollouts first: their files take the longest, and at the end a worker would be alone with one."""
    items.sort(key=lambda item: {"transforms", "rollout"}.isdisjoint(item.path.parts))
