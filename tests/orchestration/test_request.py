"""Request transforms from the definitions to the API and the device: one function, the same values everywhere."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.features.errors import ConfigurationError
from isthmus.orchestration.models import distill, export
from isthmus.orchestration.project import Project
from isthmus.orchestration.registration import apply
from isthmus.orchestration.release import deploy
from isthmus.orchestration.tables import build
from isthmus.orchestration.materialization import materialize
from isthmus.orchestration.trainingset import training_set
from isthmus.orchestration.verification import require_passed, verify
from tests.orchestration.shop import Open, Shop

MOMENT = '''

@request_transform(
    inputs=[basket, shelf_demand],
    schema=[
        Field("hour_sin", Float32), Field("per_sold", Float64), Field("store_code", String), Field("heavy", Bool),
    ],
)
def moment(hour: Column, weight: Column, store: Column, shelf_demand__sold_1d: Column) -> dict[str, Column]:
    """What the basket and the shelf say together."""
    return {
        "hour_sin": F.sin(hour * (2 * math.pi / 24)).cast("float"),
        "per_sold": F.log1p(weight) / F.coalesce(shelf_demand__sold_1d, F.lit(1)),
        "store_code": F.upper(F.concat(store, F.lit("-"), F.when(hour < 12, "am").otherwise("pm"))),
        "heavy": weight > 3,
    }
'''


def with_moment(shop: Shop) -> Shop:
    """The shop with a request transform, which both models read."""
    shop.replace("from datetime import timedelta\n", "import math\nfrom datetime import timedelta\n")
    shop.replace("from pyspark.sql import DataFrame, Window", "from pyspark.sql import Column, DataFrame, Window")
    shop.replace("    UnixTimestamp,\n    spine,", "    UnixTimestamp,\n    request_transform,\n    spine,")
    shop.replace("\n\n@spine(entities=[customer, shelf]", MOMENT + "\n\n@spine(entities=[customer, shelf]")
    shop.replace("features=[shelf_demand, basket], description", "features=[shelf_demand, basket, moment], description")
    shop.replace('[["member", "born"]], basket],', '[["member", "born"]], basket, moment],')
    return shop
