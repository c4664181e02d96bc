"""A project in Dagster. Users import it as `isthmus.dagster`; stored files name this package."""

from typing import TYPE_CHECKING

from isthmus.dagster import __all__ as __all__

if not TYPE_CHECKING:
    from isthmus.dagster import __dir__ as __dir__
    from isthmus.dagster import __getattr__ as __getattr__
