"""`lookup`: the features of a service for some keys, as the API answers them, without a server."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from isthmus.features.contract.schema import Column
from isthmus.features.errors import RequestError
from isthmus.features.online import loss
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import answering, connect
from isthmus.features.types import Bytes, String
from isthmus.orchestration.project import Project
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.request import LookupInputs
from isthmus.serving.state import State
from isthmus.serving.wire import decode


def lookup(project: Project, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The answer of `/get-online-features`, with features named `view__feature`.

    `name` is a feature service, or features as `view:feature`, separated by commas. Each argument is a join key or a
    request field and its value, as `key=value`; a name that stands twice has two values, for two rows.

    Raises:
        RequestError: there is no such service or feature, or a key is missing, unknown, or of another type.
        DependencyError: Redis does not answer.
    """
    state = State(project.generations())
    features = ":" in name
    wanted = state.lookup(tuple(name.split(",")), True) if features else state.service_lookup(name, True)
    texts: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise RequestError("command line", f"{argument!r} is no key and value", expected="key=value")
        if value.encode(errors="ignore").decode() != value:
            raise RequestError("command line", f"the value of {key} is not UTF-8", expected="text in UTF-8")
        texts.setdefault(key, []).append(value)
    columns = {**wanted.request, **state.join_keys}
    raws = {key: msgspec.Raw(_json(values, columns.get(key))) for key, values in texts.items()}
    keys, fields = decode.entities(raws, state.join_keys, wanted.request, wanted.optional)
    inputs = LookupInputs.of(wanted, keys, fields, Limits())
    with project.redis() as url, answering(url):
        client = connect(url)
        answers = wanted.plan.read(client, inputs.keys, project.now())
        if project.settings.server.missing == "refuse":
            losses = OnlineStore(client, state.contract).losses(loss.read(project.state / loss.FILE))
            loss.require_rows(losses.views, wanted.plan.views, answers)
        client.close()
    computed = wanted.compute(inputs.request, answers) if wanted.computes else {}
    answer: dict[str, Any] = orjson.loads(wanted.encode(inputs.keys, inputs.rows, answers, computed))
    return answer


def table(answer: Mapping[str, Any], arguments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a table of the answer to some arguments: a row for each feature of each entity row."""
    columns = dict(zip(answer["metadata"]["feature_names"], answer["results"], strict=True))
    asked = {argument.partition("=")[0] for argument in arguments}
    keys = [name for name in columns if name in asked]
    count = len(answer["results"][0]["values"])
    rows = [
        [*(str(columns[key]["values"][row]) for key in keys), name, *_answered(columns[name], row)]
        for row in range(count)
        for name in columns
        if name not in keys
    ]
    return [*keys, "feature", "value", "status", "event time"], rows


def _answered(column: Mapping[str, list[Any]], row: int) -> list[str]:
    value, status, time = (column[part][row] for part in ("values", "statuses", "event_timestamps"))
    # As in Feast's answers, what is not there has the first moment of 1970.
    return ["" if value is None else str(value), status, "" if status == "NOT_FOUND" else time]


def _json(texts: Sequence[str], column: Column | None) -> bytes:
    """A column whose values were typed: what is neither text nor JSON is text, which the column will refuse."""
    quoted = column is None or column.dtype in (String, Bytes)
    items = [orjson.dumps(text) if quoted or not _is_json(text) else text.encode() for text in texts]
    return b"[" + b",".join(items) + b"]"


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
