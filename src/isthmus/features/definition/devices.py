"""Check the `device` setting of a service: the features that devices keep."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from isthmus.features.contract.schema import SEPARATOR
from isthmus.features.definition import codehash
from isthmus.features.definition.spec import FeatureProjection, FeatureService, FeatureView, Field, RequestTransform
from isthmus.features.errors import Problem, did_you_mean, one_of
from isthmus.features.types import DataType

_MOST_KEPT = 1000
"""The greatest number of difference files of a snapshot."""

_MINUTE = timedelta(minutes=1)
"""The shortest time between two snapshots: a schedule has no seconds."""

_LONGEST = timedelta(days=36_500)
"""The greatest age: its microseconds are still exact in JavaScript's numbers."""

_BITS = {"Int32": 31, "Int64": 63}


def snapshot_problems(where: str, service: FeatureService) -> Iterator[Problem]:
    device = service.device
    if device is None:
        return
    views = {view.name: view for view, _ in _stored(service)}
    if not views:
        yield Problem(
            where, "the service has no stored feature", "no `device`: the model reads nothing but the request"
        )
    # A snapshot is on every device: it must not hold features that were not declared for devices.
    for view, field in _stored(service):
        if field.available != "device":
            yield Problem(where, f"{view.name}{SEPARATOR}{field.name} is available on the server only",
                          'available="device" in its Field, or a service without this feature')  # fmt: skip
    spans = {name: getattr(device, name) for name in ("age", "every")}
    wrong = [name for name, span in spans.items() if not isinstance(span, timedelta) or not _MINUTE <= span <= _LONGEST]
    for name in wrong:
        expected = f"a timedelta of a minute or more, up to {_LONGEST.days} days"
        yield Problem(f"{where}, {name}", repr(spans[name]), expected)
    if not wrong and device.every > device.age:
        yield Problem(f"{where}, every", str(device.every), f"at most the age, {device.age}")
    if type(device.keep) is not int or not 0 <= device.keep <= _MOST_KEPT:
        yield Problem(f"{where}, keep", repr(device.keep), f"0 to {_MOST_KEPT}")
    entities = [entity for view in views.values() for entity in view.entities]
    known = {key: dtype for entity in entities for key, dtype in entity.join_keys.items()}
    if device.owner is not None and (not isinstance(device.owner, str) or device.owner not in known):
        what = f"no join key {device.owner!r}{did_you_mean(device.owner, known)}"
        yield Problem(f"{where}, owner", what, f"{one_of(known)}: a join key of a view that the service reads")
    if not isinstance(device.keys, Mapping):
        yield Problem(f"{where}, keys", repr(device.keys), "a mapping of join keys to lists of values")
        return
    for key, values in device.keys.items():
        if key not in known:
            yield Problem(f"{where}, keys", f"no join key {key!r}{did_you_mean(key, known)}", one_of(known))
        elif not _values_of(values, known[key]):
            yield Problem(f"{where}, keys {key!r}", repr(values), f"a list of values of type {known[key]!r}")
        if key in known and key == device.owner:
            yield Problem(f"{where}, owner", f"{key!r} is also in `keys`", "the key in only one of them")


def _stored(service: FeatureService) -> list[tuple[FeatureView, Field]]:
    features: dict[tuple[str, str], tuple[FeatureView, Field]] = {}

    def add(part: object, parameters: Collection[str] | None = None) -> None:
        match part:
            case FeatureProjection(RequestTransform() as transform) | (RequestTransform() as transform):
                parameters = codehash.parameters(transform.function) if transform.function else ()
                for each in transform.inputs:
                    add(each, parameters)
            case FeatureProjection(FeatureView() as view, names):
                add_fields(view, [field for field in view.schema if field.name in names], parameters)
            case FeatureView():
                add_fields(part, part.schema, parameters)

    def add_fields(view: FeatureView, fields: Iterable[Field], parameters: Collection[str] | None) -> None:
        for field in fields:
            if parameters is None or f"{view.name}{SEPARATOR}{field.name}" in parameters:
                features[view.name, field.name] = view, field

    for part in service.features:
        add(part)
    return [*features.values()]


def _values_of(values: object, dtype: DataType) -> bool:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        return False
    kind = {"String": str, "Bytes": bytes, "Bool": bool, "UnixTimestamp": datetime}.get(dtype.name, int)
    if not all(type(value) is kind for value in values):
        return False
    if (bits := _BITS.get(dtype.name)) is not None:
        return all(-(1 << bits) <= value < 1 << bits for value in values)
    # A lone surrogate cannot be encoded in UTF-8.
    return kind is not str or not any("\ud800" <= letter <= "\udfff" for value in values for letter in value)
