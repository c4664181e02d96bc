"""`isthmus features lookup`: look up features as the API does, without a server."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from isthmus.features.contract.schema import Column
from isthmus.features.errors import RequestError
from isthmus.features.online import loss
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.types import Bytes, String
from isthmus.orchestration.project import Project
from isthmus.serving.limits import Limits
from isthmus.serving.state import State
from isthmus.serving.wire import decode


def lookup(project: Project, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Look up features in Redis without a server. Return the JSON answer that `/get-online-features` would give.

    `name` is a feature service, or features as `view:feature`, separated by commas. `arguments` are join keys and
    request fields as `key=value`; a repeated key gives one row per value. The answer names features `view__feature`.
    Starts Redis if it is embedded. Raises RequestError for unknown names or wrong values. Raises DependencyError if no
    contract has been applied or Redis fails, and for rows that Redis lost if the setting `missing` is "refuse".
    """
    state = State(project.generations())
    features = ":" in name
    plan = state.lookup(tuple(name.split(",")), True) if features else state.service_lookup(name, True)
    texts: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise RequestError("command line", f"{argument!r} is not a key and a value", expected="key=value")
        if value.encode(errors="ignore").decode() != value:
            raise RequestError("command line", f"the value of {key} is not UTF-8", expected="text in UTF-8")
        texts.setdefault(key, []).append(value)
    columns = {**plan.request, **state.join_keys}
    raws = {key: msgspec.Raw(_json(values, columns.get(key))) for key, values in texts.items()}
    keys, fields = decode.entities(raws, state.join_keys, plan.request, plan.optional)
    inputs = plan.inputs(keys, fields, Limits())
    with project.redis() as url, translate_errors(url), connect(url) as client:
        answers = plan.plan.read(client, inputs.keys, project.now())
        if project.settings.server.missing == "refuse":
            losses = OnlineStore(client, state.contract).losses(loss.read(project.state / loss.FILE))
            loss.require_rows(losses.views, plan.plan.views, answers)
    computed = plan.compute(inputs.request, answers) if plan.computes else {}
    answer: dict[str, Any] = orjson.loads(plan.encode(inputs.keys, inputs.rows, answers, computed))
    return answer


def table(answer: Mapping[str, Any], arguments: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    columns = dict(zip(answer["metadata"]["feature_names"], answer["results"], strict=True))
    names = {argument.partition("=")[0] for argument in arguments}
    keys = [name for name in columns if name in names]
    count = len(answer["results"][0]["values"])
    rows = [
        [*(str(columns[key]["values"][row]) for key in keys), name, *_cells(columns[name], row)]
        for row in range(count)
        for name in columns
        if name not in keys
    ]
    return [*keys, "feature", "value", "status", "event time"], rows


def _cells(column: Mapping[str, list[Any]], row: int) -> list[str]:
    value, status, time = (column[part][row] for part in ("values", "statuses", "event_timestamps"))
    # As in Feast's answers, missing rows have the time 1970-01-01.
    return ["" if value is None else str(value), status, "" if status == "NOT_FOUND" else time]


def _json(texts: Sequence[str], column: Column | None) -> bytes:
    """Encode typed values as a JSON list. Values that are not JSON become strings, which a numeric column rejects."""
    quoted = column is None or column.dtype in (String, Bytes)
    items = [orjson.dumps(text) if quoted or not _is_json(text) else text.encode() for text in texts]
    return b"[" + b",".join(items) + b"]"


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
