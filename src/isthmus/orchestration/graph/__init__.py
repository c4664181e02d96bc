"""Dagster integration. The names of `isthmus.dagster` are also here, because projects on disk name them so."""

from isthmus.dagster import __all__ as __all__
from isthmus.dagster import __dir__ as __dir__
from isthmus.dagster import __getattr__ as __getattr__
