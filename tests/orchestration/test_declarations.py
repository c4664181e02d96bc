"""Every declaration of the public surface, with every argument wrong in many ways: a sentence, never a traceback."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import isthmus
from isthmus import (
    Avro,
    Bag,
    Causal,
    Classes,
    Count,
    Distillation,
    Embedding,
    Encoder,
    Entity,
    Expect,
    FeatureService,
    FeatureView,
    Field,
    FileStream,
    Gate,
    Image,
    Int64,
    IsthmusError,
    Json,
    Kafka,
    Lora,
    Max,
    Mean,
    Min,
    MobileNet,
    Monitor,
    Onnx,
    Picture,
    Pretrained,
    Protobuf,
    PrunedEncoder,
    Rank,
    RedisStream,
    RequestSource,
    RequestTransform,
    Search,
    Settings,
    Snapshot,
    Source,
    Spine,
    String,
    Sum,
    Tabular,
    TeacherFunction,
    TeacherOutputs,
    Text,
    UNet,
    aggregate,
    request_transform,
    spine,
    transform,
)
from isthmus.orchestration.project import Project


def orders(payments: Any) -> Any:
    """Orders."""
    return payments


CUSTOMER, PAYMENTS = Entity("customer", {"id": Int64}), Source("payments", path="payments.csv")
BASKET = RequestSource("basket", [Field("items", Int64)])
VIEW = FeatureView("orders", [CUSTOMER], [Field("total", Int64, "device")], [PAYMENTS], None, function=orders)
SERVICE, SPINE = (
    FeatureService("phone", [VIEW]),
    Spine("bought", [CUSTOMER], Field("late", Int64), [PAYMENTS], None, orders),
)
VALUES: list[Any] = [
    5, -1, 1.5, math.nan, True, None, "x", "", b"x", [], ["x"], [5], [None], {}, {"x": 5}, {5: "x"}, object(), int, len,
    orders, timedelta(days=1), datetime(2026, 1, 1), CUSTOMER, [CUSTOMER], VIEW, [VIEW], SERVICE, PAYMENTS, Int64,  # noqa: DTZ001
    Field("y", Int64), [Field("y", Int64)], BASKET, SPINE, Tabular(), Gate("x"), {"x": [Int64]}, [["x"]], ["\ud800"],
    Expect.rows(at_least=1), [Expect.present("total")], partial(orders), lambda: None, {"x": lambda: None}, 10**400,
]  # fmt: skip
PARTS: dict[Any, dict[str, Any]] = {
    Field: {"name": "total", "dtype": Int64, "available": "device", "description": "", "tolerance": 0.0, "size": None},
    Entity: {"name": "customer", "join_keys": {"id": Int64}, "description": ""},
    Source: {"name": "payments", "path": "payments.csv", "timestamp": None, "known": None, "null_values": [""],
             "delta": "", "iceberg": "", "sql": "", "connection": "", "version_sql": "", "stream": None,
             "lateness": timedelta(0)},
    Kafka: {"topic": "payments", "servers": "localhost:9092", "format": Json(), "properties": {}},
    RedisStream: {"key": "payments", "format": Json(), "connection": "", "member": "event"},
    FileStream: {"folder": "incoming", "format": Json()},
    Json: {"times": "iso", "schema": "", "registry": ""},
    Avro: {"schema": "payment.avsc", "registry": ""},
    Protobuf: {"descriptors": "payments.pb", "message": "Payment", "framed": False, "times": "iso", "registry": ""},
    FeatureView: {"name": "orders", "entities": [CUSTOMER], "schema": [Field("total", Int64)], "sources": [PAYMENTS],
                  "ttl": None, "delay": timedelta(0), "function": orders, "description": "", "expectations": [],
                  "lookback": None, "lateness": timedelta(0), "version": 1, "owner": "", "tiling": None},
    RequestSource: {"name": "basket", "schema": [Field("items", Int64)], "description": "", "expectations": [],
                    "defaults": {"items": 1}},
    RequestTransform: {"name": "twice", "inputs": [BASKET], "schema": [Field("y", Int64)], "function": orders},
    FeatureService: {"name": "phone", "features": [VIEW], "description": "", "device": None},
    Snapshot: {"age": timedelta(days=1), "every": timedelta(hours=1), "keys": {}, "keep": 6, "owner": None},
    Spine: {"name": "bought", "entities": [CUSTOMER], "label": Field("late", Int64), "sources": [PAYMENTS],
            "request": None, "function": orders, "description": ""},
    transform: {"entities": [CUSTOMER], "sources": [PAYMENTS], "schema": [Field("total", Int64)], "ttl": None,
                "delay": timedelta(0), "expectations": [], "lookback": None, "lateness": timedelta(0), "version": 1,
                "owner": ""},
    aggregate: {"entities": [CUSTOMER], "sources": [PAYMENTS], "tiles": [Count()], "windows": [timedelta(days=1)],
                "tick": timedelta(hours=1), "ttl": None, "available": "server", "expectations": [], "lookback": None,
                "lateness": timedelta(0), "version": 1, "owner": ""},
    Count: {"column": "total", "name": ""},
    Sum: {"column": "total", "name": ""},
    Mean: {"column": "total", "name": ""},
    Min: {"column": "total", "name": ""},
    Max: {"column": "total", "name": ""},
    spine: {"entities": [CUSTOMER], "sources": [PAYMENTS], "label": Field("late", Int64), "request": None},
    request_transform: {"inputs": [BASKET], "schema": [Field("y", Int64)]},
    Distillation: {"name": "late", "spine": SPINE, "teacher": SERVICE, "student": SERVICE, "task": Tabular(),
                   "settings": None, "split": (0.7, 0.15, 0.15), "split_by": None, "seeds": 1, "seed": 0, "shape": {},
                   "search": None, "gates": None, "bounds": (), "stale": None, "owner": "", "monitor": Monitor(),
                   "runtimes": ("onnxruntime",)},
    Tabular: {"label": Classes(), "teacher": None, "calibration": None, "hidden": (8,), "dropout": 0.1,
              "temperature": 2.0,
              "soft_weight": 0.5, "teacher_rounds": 8, "teacher_learning_rate": 0.1, "preparation": {}},
    Settings: {"epochs": 1, "steps": None, "batch": 8, "learning_rate": 1e-3, "schedule": "cosine", "clip": None},
    Gate: {"metric": "taught", "at_least": 0.0, "at_most": None},
    Search: {"shape": {"width": [8]}, "trials": 1, "settings": None, "most_bytes": None, "seed": 0},
    Monitor: {"within": timedelta(hours=1), "match": None, "slices": None},
    Rank: {"within": "id", "at": 10},
    Lora: {"rank": 4},
    TeacherFunction: {"function": "fraud:booster", "files": [], "version": "", "missing": "refuse"},
    Onnx: {"path": "large.onnx", "output": None, "gives": None, "classes": None, "missing": "refuse"},
    TeacherOutputs: {"path": "teacher.parquet", "classes": None, "missing": "refuse"},
    Pretrained: {"source": "large", "column": None, "classes": None, "revision": None, "tokens": None},
    Text: {"teacher": "fraud:booster", "predicts": Classes(), "column": None, "student": Bag(), "vocabulary": 8000,
           "tokens": 128, "dropout": 0.1, "temperature": 2.0, "soft_weight": 0.7, "calibration": None, "weight": None,
           "class_weight": None, "start": None},
    Embedding: {"pooling": "mean", "index": 0},
    PrunedEncoder: {"layers": (0, 2), "heads": None, "inner": None, "rank": None, "vocabulary": None},
    Bag: {"vocabulary": 10_000, "width": 48},
    Encoder: {"layers": 2, "width": 128, "heads": 4, "inner": 256, "rank": None, "vocabulary": 8000},
    Image: {"teacher": "fraud:booster", "predicts": Classes(), "column": None, "student": MobileNet(), "side": 64,
            "augment": 0, "mirror": True, "temperature": 2.0, "soft_weight": 0.7, "calibration": None, "weight": None,
            "class_weight": None},
    MobileNet: {"width": 0.5, "depth": 1.0},
    UNet: {"width": 16, "depth": 4, "expand": 3},
    Picture: {"features": None, "perceptual": 0.1, "adversarial": 0.0},
    Causal: {"prompt": 8},
    Expect.present: {"feature": "total", "share": 1.0},
    Expect.between: {"feature": "total", "low": 1, "high": 2},
    Expect.length: {"feature": "total", "low": 1, "high": 2},
    Expect.one_of: {"feature": "total", "values": [1, 2]},
    Expect.unique: {"feature": "total"},
    Expect.rows: {"at_least": 1, "at_most": None},
    Expect.fresh: {"within": timedelta(days=1)},
    Expect.drift: {"psi": 0.2},
}  # fmt: skip


def _declared(value: Any, kind: Any) -> list[Any]:
    """What a module declares that uses a value."""
    view = FeatureView("orders", [CUSTOMER], [Field("total", Int64, "device")], [PAYMENTS], None, function=orders)
    late = Distillation(name="late", spine=SPINE, teacher=SERVICE, student=SERVICE)
    if kind in (transform, aggregate, spine, request_transform):
        return [view, value(orders)] if kind not in (transform, aggregate) else [value(orders)]
    teachers = (TeacherFunction, Pretrained, Onnx, TeacherOutputs)
    images = (Image, MobileNet, UNet, Picture)
    students = (Bag, Embedding, Encoder, PrunedEncoder)
    if kind in (Tabular, Causal, Text, *students, Rank, Lora, *images, *teachers):
        task = {Rank: lambda: Tabular(label=value), Lora: lambda: Causal(lora=value)}
        task |= dict.fromkeys((Bag, Encoder), lambda: Text(teacher="fraud:booster", student=value))
        task[PrunedEncoder] = lambda: Text(teacher=Pretrained("large"), student=value)
        task[Embedding] = lambda: Text(teacher=Pretrained("large"), predicts=value)
        drawing = Image(teacher="fraud:booster", predicts=Picture(), student=UNet())
        task |= {MobileNet: lambda: Image(teacher="fraud:booster", student=value)}
        task |= {UNet: lambda: replace(drawing, student=value), Picture: lambda: replace(drawing, predicts=value)}
        task |= dict.fromkeys(teachers, lambda: Tabular(teacher=[value, (value, 2.0)]))
        task_of: Callable[[], Any] = task.get(kind, lambda: value)
        return [view, Distillation(name="late", spine=SPINE, teacher=SERVICE, student=SERVICE, task=task_of())]
    uses: dict[Any, Callable[[], Any]] = {
        Field: lambda: FeatureView("more", [CUSTOMER], [value], [PAYMENTS], None, function=orders),
        Snapshot: lambda: FeatureService("phone", [view], device=value),
        Settings: lambda: Distillation(name="late", spine=SPINE, teacher=SERVICE, student=SERVICE, settings=value),
        Gate: lambda: Distillation(name="late", spine=SPINE, teacher=SERVICE, student=SERVICE, gates=[value]),
        Search: lambda: Distillation(name="late", spine=SPINE, teacher=SERVICE, student=SERVICE, search=value),
        Monitor: lambda: Distillation(name="late", spine=SPINE, teacher=SERVICE, student=SERVICE, monitor=value),
    }
    if kind in (Json, Avro, Protobuf, Kafka, RedisStream, FileStream):
        stream = Kafka("payments", "localhost:9092", value) if kind in (Json, Avro, Protobuf) else value
        return [view, Source("events", path="events.parquet", timestamp="at", stream=stream)]
    if kind in vars(Expect).values():
        return [FeatureView("more", [CUSTOMER], [Field("total", Int64)], [PAYMENTS], None, function=orders,
                            expectations=[value])]  # fmt: skip
    if kind is FeatureView:
        return [value]
    return [view, late, uses.get(kind, lambda: value)()]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    root = tmp_path_factory.mktemp("shop")
    (root / "isthmus.toml").write_text('[project]\nname = "shop"\n')
    (root / "definitions.py").write_text("")
    return Project(root)


def _sentence(project: Project, kind: Any, parts: dict[str, Any]) -> str:
    """The message of an error, if there is one; anything but an IsthmusError is raised."""
    module = ModuleType("definitions")
    module.__file__ = str(project.root / "definitions.py")
    try:
        vars(module).update({f"_{n}": each for n, each in enumerate(_declared(kind(**parts), kind))})
        project._compiled(module)
    except IsthmusError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("part", [16, pytest.param(1, marks=pytest.mark.accept)])
def test_no_wrong_value_of_an_argument_ends_in_a_traceback(project: Project, kind: Any, part: int) -> None:
    """Every value for every argument; beside the other tests, one in 16."""
    for turn, name in enumerate(PARTS[kind]):
        for value in VALUES[5 * turn % part :: part]:
            try:
                _sentence(project, kind, {**PARTS[kind], name: value})
            except Exception as error:  # noqa: BLE001 - which one it is
                pytest.fail(f"{kind.__name__}({name}={value!r:.80}): {type(error).__name__}: {error}")


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__name__)
def test_an_unknown_or_missing_argument_is_named(kind: Any) -> None:
    first = next(iter(PARTS[kind]))
    with pytest.raises(IsthmusError, match=f"takes no argument '{first}x'.*did you mean"):
        kind(**PARTS[kind], **{f"{first}x": 1})
    with pytest.raises(IsthmusError, match=r"takes named arguments|takes no argument|is called without|positional"):
        kind(*[1] * 50)


@pytest.mark.parametrize(
    ("kind", "name", "value", "sentence"),
    [
        (Entity, "join_keys", ["id"], "entity customer, join_keys: ['id']; expected a dict: join_keys={'id': String}"),
        (transform, "entities", CUSTOMER, "an Entity: entities=[customer]"),
        (transform, "entities", ["customer"], "each item an Entity: entities=[customer], without quotes"),
        (transform, "ttl", 30, "view orders, ttl: 30; expected a timedelta or None: ttl=timedelta(days=30)"),
        (Monitor, "within", 3, "monitor: within: 3; expected a timedelta: within=timedelta(days=3)"),
        (Tabular, "hidden", 16, "hidden: 16; expected a list, each item a whole number: hidden=[16]"),
        (Entity, "name", ["customer"], "name: ['customer']; expected a text"),
        (FeatureView, "function", partial(orders), "its function is a partial; expected a def that calls it"),
        (Expect.one_of, "values", 5, "values=5; expected a list: [5]"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_answered_with_the_line_to_write(
    project: Project, kind: Any, name: str, value: Any, sentence: str
) -> None:
    assert sentence in _sentence(project, kind, {**PARTS[kind], name: value})


def test_a_partial_is_no_function_of_a_view(project: Project) -> None:
    module = ModuleType("definitions")
    module.__file__ = str(Path(project.root) / "definitions.py")
    vars(module)["view"] = transform(**PARTS[transform])(partial(orders))
    with pytest.raises(IsthmusError, match=r"view partial.* its function is a partial; expected a def that calls it"):
        project._compiled(module)
    with pytest.raises(
        IsthmusError, match=re.escape("transform: takes named arguments; expected entities=..., schema")
    ):
        transform(orders)  # type: ignore[call-arg, arg-type]


def test_every_declaration_of_the_surface_is_tried() -> None:
    tried = {kind.__name__ for kind in PARTS} | {"TrainingSettings", "Settings"}
    steps = {"Binary", "Classes", "Number", "Isotonic", "Temperature", "DecodingSettings", "Clip", "Embed", "Hashed",
             "Impute", "Log1p", "OneHot", "Ordinal", "Standardize"}  # fmt: skip
    kinds = {name for name in isthmus.__all__ if hasattr(getattr(isthmus, name), "__dataclass_fields__")}
    types = {name for name in kinds if not isinstance(getattr(isthmus, name), type)} | {"Array"}
    assert kinds - types - steps <= tried
    for name in steps & kinds:
        with pytest.raises(IsthmusError, match="takes no argument 'siz'"):
            getattr(isthmus, name)(siz=1)
    assert String.name == "String"
