"""Verify that stores, API, package and devices agree."""

from isthmus.orchestration.verification.verify import verify

__all__ = ["verify"]
