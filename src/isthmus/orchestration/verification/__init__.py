"""One verdict over stores, API and model."""

from isthmus.orchestration.verification.verify import verify

__all__ = ["verify"]
