"""`verify`: compares what training saw with what serving answers, value by value, and the package with its student."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.features import clock, columns
from isthmus.features.columns import Values
from isthmus.features.connection import answering, connect
from isthmus.features.entitykey import KeyValue
from isthmus.features.errors import GateFailed
from isthmus.features.files import write_atomically
from isthmus.features.lookupplan import ViewAnswer
from isthmus.features.offline import OfflineStore
from isthmus.features.online import OnlineStore
from isthmus.features.pointintime import History, horizon, point_in_time, status_column
from isthmus.features.publishing import key_values
from isthmus.features.rows import Bool
from isthmus.features.types import String
from isthmus.features.verdict import FeatureVerdict, Verdict, compare
from isthmus.orchestration.models import check_last_package, is_exported
from isthmus.orchestration.project import Project
from isthmus.orchestration.recomputation import recompute
from isthmus.orchestration.tables import Progress, silent
from isthmus.orchestration.trainingset import distillation

SAMPLE = 500
"""Keys per view that are compared unless all are asked for."""

STATUS = "status"


def verify(project: Project, name: str | None = None, *, every: bool = False, progress: Progress = silent) -> Verdict:
    """Compares and writes the verdict.

    The offline side is the point-in-time join at the project's present; the online side is read from Redis. What the
    engine computed by request transforms for the last training set is compared with what their graphs compute; once a
    package of the distillation is exported, its output with its student's.

    Args:
        project: the project, materialized.
        name: the distillation; may be left out where there is only one, or none.
        every: compare every key that either side has, and every row of the training set, not a sample, and the offline
            rows with their content hashes.
        progress: told the view at hand and the share that is done.
    """
    declared = distillation(project, name) if name or project.definitions.distillations else None
    contract = project.applied()
    offline = OfflineStore(project.offline)
    histories = [offline.history(view) for view in contract.views.values()]
    at = project.now()
    views, ahead = {}, {}
    with project.redis() as url, connect(url) as client:
        store = OnlineStore(client, contract)
        for n, history in enumerate(histories):
            view = history.view
            progress(f"comparing {view.name}", n / len(histories))
            with answering(url):
                served_keys = store.keys(view) if every else None
            if every:
                offline.check(history)
            with offline.reading(view.table):
                keys = _keys(history, at, served_keys)
                trained = _trained(keys, history)
            with answering(url):
                served = store.read(view, key_values(view, keys), at)
            # What is not there yet is compared: training has something else.
            pushed = (served.known > horizon(history, at)) & (served.status != clock.Status.NOT_FOUND)
            views[view.name] = compare_view(history, keys, trained, served, ~pushed)
            ahead[view.name] = int(np.count_nonzero(pushed))
    if declared:
        progress("comparing request transforms", 0.85)
        views |= recompute(project, contract, declared, None if every else SAMPLE)
    package = outputs = None
    if declared and is_exported(project, declared, contract):
        progress("comparing the package with its student", 0.9)
        package, outputs = check_last_package(project, declared)
    tables = {history.view.name: offline.fingerprint(history) for history in histories}
    verdict = Verdict(contract.hash, at, views, tables, ahead, package, outputs)
    write_atomically(verdict_file(project, declared), verdict.dumps())
    progress("the verdict is written", 1.0)
    return verdict


def verdict_file(project: Project, declared: Distillation | None) -> Path:
    """Where the last verdict of a distillation, or of a project without any, is."""
    return project.state / "verdicts" / f"{declared.name if declared else 'features'}.json"


def require_passed(verdict: Verdict) -> Verdict:
    """The verdict, if it passed.

    Raises:
        GateFailed: it did not; the first differing features are named.
    """
    if verdict.passed:
        return verdict
    worst = [
        f"{view}.{feature} ({result.differing} of {result.compared})"
        for view, features in verdict.views.items()
        for feature, result in features.items()
        if result.differing
    ]
    if verdict.model is not None and verdict.model.differing:
        worst.append(f"the package's output ({verdict.model.differing} of {verdict.model.compared})")
    named = ", ".join(worst[:5]) or "none compared"
    raise GateFailed(
        "verdict",
        f"{verdict.differing} of {verdict.compared} values differ: {named}",
        expected="0 differing",
        remedy=_remedy(verdict),
    )


def _remedy(verdict: Verdict) -> str:
    stored = any(one.differing for name in verdict.tables for one in verdict.views[name].values())
    if stored or not verdict.differing:
        return "run `isthmus build` and `isthmus materialize --full`, then verify again"
    return (
        "an engine and a graph may differ in the last digits of some functions, see docs/row-functions.md: give such a "
        "field a tolerance; run `isthmus training-set` and `isthmus export` again if they are older than the engine"
    )


def compare_view(
    history: History, keys: pa.Table, trained: dict[str, Values], served: ViewAnswer, compared: Bool
) -> dict[str, FeatureVerdict]:
    """Feature to its comparison over the rows of `compared`, the status of the view included."""
    names = [str(row) for row in keys.select([column.name for column in history.view.keys]).to_pylist()]
    labels = np.array([clock.Status(code).label for code in served.status], dtype=object)
    online = {**served.columns, STATUS: Values(labels, np.ones(len(labels), bool))}
    types = {**{column.name: column.dtype for column in history.view.fields}, STATUS: String}
    chosen = [name for name, there in zip(names, compared.tolist(), strict=True) if there]
    return {
        name: compare(chosen, _rows(trained[name], compared), _rows(online[name], compared), dtype)
        for name, dtype in types.items()
    }


def _rows(values: Values, chosen: Bool) -> Values:
    return Values(values.data[chosen], values.valid[chosen])


def _keys(history: History, at: int, served: Mapping[str, Sequence[KeyValue]] | None) -> pa.Table:
    """The keys of a view as questions at time `at`: all, with those served, or a sample that is the same each time."""
    names = [column.name for column in history.view.keys]
    data = history.data if isinstance(history.data, pa.Table) else history.data.to_table(columns=names)
    keys = data.select(names)
    if served is not None:
        more = pa.table([pa.array(served[name], keys[name].type) for name in names], keys.schema)
        keys = pa.concat_tables([keys, more])
    keys = keys.group_by(names).aggregate([]).sort_by([(name, "ascending") for name in names])
    if served is None and len(keys) > SAMPLE:
        seed = int.from_bytes(hashlib.sha256(history.view.name.encode()).digest()[:8], "little")
        keys = keys.take(pa.array(np.sort(np.random.default_rng(seed).choice(len(keys), SAMPLE, replace=False))))
    moment = pa.array(np.full(len(keys), at), pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    return keys.append_column("event_timestamp", moment)


def _trained(keys: pa.Table, history: History) -> dict[str, Values]:
    joined = point_in_time(keys, [history])
    view = history.view
    values = {
        column.name: columns.from_arrow(joined[view.full_name(column.name)], column.dtype) for column in view.fields
    }
    return {**values, STATUS: columns.from_arrow(pc.cast(joined[status_column(view)], pa.string()), String)}
