"""A small real project: orders of a shop, and whether they came late. Written afresh for every test that asks."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.orchestration.project import Project

Open = Callable[["Shop"], Project]
"""Opens a project as a new process would."""

VIEWS = ["customer_orders", "shelf_demand", "customer_facts"]
NOW = "2024-03-01T00:00:00Z"
START = 1_704_067_200_000_000
"""2024-01-01 in microseconds: the first order."""

HOUR = 3_600_000_000
ORDERS = 2400

SETTINGS = f"""\
[project]
name = "shop"
now = {NOW}

[profiles.training]
batch = 256
epochs = 2
"""

DEFINITIONS = '''\
"""Will this order come late? Asked when it is placed."""

from datetime import timedelta

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from isthmus import (
    Array,
    Bool,
    Bytes,
    Distillation,
    Entity,
    FeatureService,
    Field,
    Float32,
    Float64,
    Gate,
    Int32,
    Int64,
    RequestSource,
    Source,
    String,
    Tabular,
    UnixTimestamp,
    spine,
    transform,
)

orders = Source("orders", path="data/orders.parquet", timestamp="ordered_at", known="delivered_at")
customers = Source(
    "customers", path="data/customers.csv", timestamp="joined_at",
    types={"customer": Int64, "member": Bool, "born": Int64, "last_call": UnixTimestamp},
)

customer = Entity("customer", join_keys={"customer": Int64}, description="Who buys")
shelf = Entity("shelf", join_keys={"store": String, "product": Int32}, description="A product in a store")

SLOW = 60


@transform(
    entities=[customer],
    sources=[orders],
    schema=[Field("orders_7d", Int64), Field("mean_amount_7d", Float64), Field("late_rate_7d", Float32)],
    ttl=timedelta(days=7),
)
def customer_orders(orders: DataFrame) -> DataFrame:
    """What a customer bought in seven days."""
    second = F.unix_seconds("ordered_at")
    week = Window.partitionBy("customer").orderBy(second).rangeBetween(1 - 7 * 86400, 0)
    return orders.select(
        "customer",
        "ordered_at",
        "delivered_at",
        F.count("*").over(week).alias("orders_7d"),
        F.avg("cents").over(week).alias("mean_amount_7d"),
        F.avg("late").over(week).cast("float").alias("late_rate_7d"),
    )


@transform(
    entities=[shelf],
    sources=[orders],
    schema=[Field("sold_1d", Int64, "device"), Field("distance", Float32, "device")],
    ttl=timedelta(days=3),
    delay=timedelta(hours=1),
)
def shelf_demand(orders: DataFrame) -> DataFrame:
    """How much of a product a store sold in a day, and how far its customers live."""
    second = F.unix_seconds("ordered_at")
    day = Window.partitionBy("store", "product").orderBy(second).rangeBetween(1 - 86400, 0)
    return orders.select(
        "store",
        "product",
        F.col("ordered_at").alias("event_timestamp"),
        F.count("*").over(day).alias("sold_1d"),
        F.when(F.col("distance") < SLOW, F.col("distance").cast("float")).alias("distance"),
    )


@transform(
    entities=[customer],
    sources=[customers],
    schema=[
        Field("city", String),
        Field("member", Bool),
        Field("born", Int32),
        Field("last_call", UnixTimestamp),
        Field("token", Bytes),
        Field("trips", Array(Float64)),
        Field("words", Array(String)),
    ],
    ttl=None,
)
def customer_facts(customers: DataFrame) -> DataFrame:
    """Who a customer is."""
    return customers.select(
        "customer",
        "joined_at",
        "city",
        "member",
        F.col("born").cast("int").alias("born"),
        "last_call",
        F.col("city").cast("binary").alias("token"),
        F.when(F.col("born") % 3 > 0, F.array(F.col("born") / 7, F.lit(float("inf")))).alias("trips"),
        F.when(F.col("city").isNotNull(), F.split("city", "e")).alias("words"),
    )


basket = RequestSource(
    "basket",
    schema=[Field("store", String), Field("product", Int32), Field("hour", Int64), Field("weight", Float64)],
    description="What is known when an order is placed",
)


@spine(entities=[customer, shelf], sources=[orders], request=basket, label=Field("late", Int64))
def placed(orders: DataFrame) -> DataFrame:
    """Every order, when it was placed."""
    return orders.select(
        "customer",
        "store",
        "product",
        F.col("ordered_at").alias("event_timestamp"),
        F.col("delivered_at").alias("known_at"),
        F.hour("ordered_at").cast("bigint").alias("hour"),
        "weight",
        "late",
    )


on_device = FeatureService("late_order_device", features=[shelf_demand, basket], description="What a phone has")
on_server = FeatureService(
    "late_order_server",
    features=[customer_orders, shelf_demand, customer_facts[["member", "born"]], basket],
    description="Everything",
)

late_order = Distillation(
    "late_order", spine=placed, teacher=on_server, student=on_device, task=Tabular(teacher_rounds=8, hidden=(16,)),
    seeds=1, gates=[Gate("lift_kept", at_least=0.95)],
)
'''


@dataclass(frozen=True)
class Shop:
    """The folder of the project, and shortcuts for spoiling what is in it."""

    root: Path

    @property
    def toml(self) -> Path:
        return self.root / "isthmus.toml"

    @property
    def definitions(self) -> Path:
        return self.root / "definitions.py"

    @property
    def orders(self) -> Path:
        return self.root / "data" / "orders.parquet"

    @property
    def state(self) -> Path:
        return self.root / ".isthmus"

    def replace(self, old: str, new: str, file: str = "definitions.py") -> None:
        """Edits a file at the one place where `old` stands."""
        path = self.root / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        path.write_text(text.replace(old, new))

    def append(self, text: str, file: str = "definitions.py") -> None:
        with (self.root / file).open("a") as end:
            end.write(text)


def write(root: Path, rows: int = ORDERS) -> Shop:
    """Writes isthmus.toml, definitions.py and the data into a folder."""
    (root / "data").mkdir(parents=True)
    shop = Shop(root)
    shop.toml.write_text(SETTINGS)
    shop.definitions.write_text(DEFINITIONS)
    pq.write_table(order_rows(rows), shop.orders)
    (root / "data" / "customers.csv").write_text(customer_rows())
    return shop


def write_with_helper(root: Path, rows: int = ORDERS) -> Shop:
    """The same, with part of the definitions in a module beside them."""
    shop = write(root, rows)
    (root / "helpers.py").write_text(
        "from pyspark.sql import Column\n"
        "from pyspark.sql import functions as F\n\n"
        "SLOW = 60\n\n\n"
        "def near(distance: Column) -> Column:\n"
        "    # Far customers are somebody else's.\n"
        '    return F.when(distance < SLOW, distance.cast("float"))\n'
    )
    shop.replace('F.when(F.col("distance") < SLOW, F.col("distance").cast("float"))', 'helpers.near(F.col("distance"))')
    shop.replace("from isthmus import (", "import helpers\nfrom isthmus import (")
    return shop


def order_rows(rows: int = ORDERS, seed: int = 0) -> pa.Table:
    """Orders over two months, no two at one moment. Late depends on weight, hour, customer and chance."""
    chance = np.random.default_rng(seed)
    step = 59 * 24 * HOUR // rows
    ordered = START + np.arange(rows) * step + chance.integers(0, step // 2, rows)
    customer = chance.integers(0, 60, rows)
    distance = chance.gamma(2.0, 15.0, rows)
    hour = ordered // HOUR % 24
    weight = np.round(chance.gamma(2.0, 1.5, rows), 2)
    score = 0.8 * (weight - 3) + 1.2 * (hour >= 16) + 1.0 * (customer % 3 == 0) - 0.7
    time = pa.timestamp("us", tz="UTC")
    columns = {
        "customer": pa.array(customer * 1_000_003, pa.int64()),
        "store": pa.array([f"s{n}" for n in chance.integers(0, 4, rows)]),
        "product": pa.array(chance.integers(1, 16, rows), pa.int32()),
        "ordered_at": pa.array(ordered, pa.int64()).cast(time),
        "delivered_at": pa.array(ordered + chance.integers(HOUR, 40 * HOUR, rows), pa.int64()).cast(time),
        "cents": pa.array(chance.integers(100, 9_000, rows), pa.int64()),
        "weight": pa.array(weight),
        "distance": pa.array(distance),
        "late": pa.array((chance.random(rows) < 1 / (1 + np.exp(-score))).astype(np.int64)),
    }
    return pa.table(columns)


def customer_rows() -> str:
    """Fifty of the sixty customers as CSV; some know nothing of themselves."""
    lines = ["customer,joined_at,city,member,born,last_call"]
    for n in range(50):
        key, joined = n * 1_000_003, f"2023-{n % 12 + 1:02}-01T00:00:00Z"
        facts = ",,," if n % 7 == 0 else f"Zürich,{'true' if n % 2 else 'false'},{1950 + n},2023-12-24T18:30:00.123456Z"
        lines.append(f"{key},{joined},{facts}")
    return "\n".join(lines) + "\n"


def files(folder: Path) -> dict[str, str]:
    """Every file of a folder, with the hash of its bytes."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def data_file(shop: Shop, view: str) -> Path:
    """The file of the first day."""
    return min((shop.state / "offline" / view).glob("event_day=*/*.parquet"))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


MOMENT = '''

@request_transform(
    inputs=[basket, shelf_demand],
    schema=[
        Field("hour_sin", Float32),
        Field("per_sold", Float64, tolerance=1e-15),
        Field("store_code", String),
        Field("heavy", Bool),
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
    imports = "import math\nfrom datetime import timedelta\nfrom functools import reduce\n"
    shop.replace("from datetime import timedelta\n", imports)
    shop.replace("from pyspark.sql import DataFrame, Window", "from pyspark.sql import Column, DataFrame, Window")
    shop.replace("    UnixTimestamp,\n    spine,", "    UnixTimestamp,\n    request_transform,\n    spine,")
    shop.replace("\n\n@spine(entities=[customer, shelf]", MOMENT + "\n\n@spine(entities=[customer, shelf]")
    shop.replace("features=[shelf_demand, basket], description", "features=[shelf_demand, basket, moment], description")
    shop.replace('[["member", "born"]], basket],', '[["member", "born"]], basket, moment],')
    return shop


def with_device(shop: Shop, keys: str = "{}") -> Shop:
    """The shop whose student's stored features are kept by devices."""
    kept = f"device=Snapshot(age=timedelta(hours=6), every=timedelta(hours=1), keys={keys}, keep=3)"
    shop.replace('description="What a phone has")', f'description="What a phone has", {kept})')
    shop.replace("    RequestSource,\n", "    RequestSource,\n    Snapshot,\n")
    return shop


def with_owner(shop: Shop) -> Shop:
    """The shop with a device whose customers have their own orders, and nobody else's, beside what all have."""
    for name, kind in (("orders_7d", "Int64"), ("mean_amount_7d", "Float64"), ("late_rate_7d", "Float32")):
        shop.replace(f'Field("{name}", {kind})', f'Field("{name}", {kind}, "device")')
    service = 'FeatureService("late_order_device", features=['
    shop.replace(service, f"{service}customer_orders, ")
    shop.replace("keep=3)", 'keep=3, owner="customer")')
    return shop


def learnable(shop: Shop) -> Shop:
    """The shop whose student is exported whatever it has learned."""
    shop.replace('Gate("lift_kept", at_least=0.95)', "")
    shop.append("\n[profiles.serving]\nlatency_objective_ms = 1000\n", "isthmus.toml")
    return shop
