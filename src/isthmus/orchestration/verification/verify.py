"""`verify`: compares what training saw with what serving answers, value by value, and the package with its student."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.features import clock
from isthmus.features.contract.contract import RESERVED, STATUS, Column
from isthmus.features.errors import GateFailed
from isthmus.features.files import write_atomically
from isthmus.features.offline.history import ViewHistory, status_column
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.package.manifest import package_digest, read_package
from isthmus.features.package.signature import require_signature
from isthmus.features.pointintime.join import horizon, point_in_time
from isthmus.features.progress import Progress, silent
from isthmus.features.publishing.publish import key_values
from isthmus.features.redis.connection import answering, connect
from isthmus.features.types import String, UnixTimestamp
from isthmus.features.values import columns
from isthmus.features.values.columns import Values
from isthmus.features.values.entitykey import KeyValue
from isthmus.features.values.rows import Bool
from isthmus.features.verdict import FeatureVerdict, Verdict, compare, merged
from isthmus.orchestration.artifacts import Artifacts, page_file, serving_profile, verdict_file
from isthmus.orchestration.models.models import check_last_package
from isthmus.orchestration.project import Project
from isthmus.orchestration.verification.client import Client, private_api
from isthmus.orchestration.verification.page import page
from isthmus.orchestration.verification.recomputation import recompute
from isthmus.serving.deployment.deployment import Approval, Deployment
from isthmus.serving.wire.encode import LABELS

if TYPE_CHECKING:
    from isthmus.orchestration.verification.modelinputs import Newer, PackageVerdict

CHECKED_ROWS = 2000
"""Rows of the training set, if all are asked for."""
SAMPLE = 500
"""Keys per view that are compared unless all are asked for."""

EVENT = RESERVED[0]
"""Under this name a verdict says whether both sides speak of rows of one time."""

PREDICT = "/predict"
"""Under this name stands among the package's files what a server predicts with it."""


def verify(project: Project, name: str | None = None, *, every: bool = False, progress: Progress = silent) -> Verdict:
    """Compares and writes the verdict, and its page beside it.

    The offline side is the point-in-time join at the project's present; the online side is what a server of the project
    answers. What the engine computed by request transforms for the last training set is compared with what their graphs
    compute, here and behind that server. Once a package of the distillation is exported: what each of its model files
    answers, with its student; what its graph is fed by offline values, with what it is fed by served ones; and what a
    server predicts with it.

    Args:
        project: the project, materialized.
        name: the distillation; may be left out where there is only one, or none.
        every: compare every key that either side has, and every row of the training set, not a sample, and the offline
            rows with their content hashes.
        progress: told the view at hand and the share that is done.

    Raises:
        DependencyError: Redis does not answer, or no server can be started.
    """
    declared = project.distillation(name) if name or project.definitions.distillations else None
    contract = project.applied()
    offline = OfflineStore(project.offline)
    histories = [offline.history(view) for view in contract.views.values()]
    at = project.now()
    package = (
        Artifacts(project, declared).last_package()
        if declared and Artifacts(project, declared).is_exported(contract)
        else None
    )
    views, ahead, files, inputs, skipped = {}, {}, {}, {}, {}
    if declared and not package:
        skipped["the package"] = "none is exported that can run under this contract: run `isthmus export`"
    with project.redis() as url, connect(url) as client, TemporaryDirectory(prefix="isthmus-verify-") as folder:
        with answering(url):
            client.ping()
        store = OnlineStore(client, contract)
        deployment = Path(folder) / "deployment.json"
        rows = package is not None and bool(read_package(package).inputs)
        if package and rows:
            write_atomically(deployment, _trial(project, package, at).dumps())

        def newer(history: ViewHistory, keys: pa.Table) -> Bool:
            # What is not there yet is compared: training has something else.
            with answering(url):
                held = store.read(history.view, key_values(history.view, keys), at)
            pushed: Bool = (held.known > horizon(history, at)) & (held.status != clock.Status.NOT_FOUND)
            return pushed

        with private_api(project, contract, url, at, deployment) as api:
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
                features = [(view.name, column.name) for column in view.fields]
                answer = api.lookup(features, key_values(view, keys), len(keys))
                # Asked after the API: a row that is pushed between is left out, not found to differ.
                pushed = newer(history, keys)
                views[view.name] = compare_view(history, keys, trained, _served(answer, history), ~pushed)
                ahead[view.name] = int(np.count_nonzero(pushed))
            progress("comparing request transforms", 0.85)
            some, asked = (None, CHECKED_ROWS) if every else (SAMPLE, SAMPLE)
            computed, older = recompute(project, contract, declared, some, api, asked)
            views |= computed
            skipped |= older
            if declared and package:
                progress("comparing the package with its student", 0.9)
                files = check_last_package(project, declared)
            if declared and package and not rows:
                skipped["what the package is fed"] = (
                    "only its own task makes it of features, so that no server predicts"
                )
            if declared and package and rows:
                progress("comparing what the package is fed", 0.95)
                fed = _feed(project, declared, package, histories, api, at, CHECKED_ROWS if every else SAMPLE, newer)
                files[PREDICT], inputs = fed.predicted, fed.inputs
    tables = {history.view.name: history.fingerprint for history in histories}
    digest, model = (package_digest(package), merged(list(files.values()))) if package else (None, None)
    verdict = Verdict(contract.hash, at, views, tables, ahead, digest, model, files, inputs, skipped)
    write_atomically(page_file(project, name), page(verdict, project.name).encode())
    write_atomically(verdict_file(project, declared), verdict.dumps())
    progress("the verdict is written", 1.0)
    return verdict


def _trial(project: Project, package: Path, at: int) -> Deployment:
    """What a server that nobody else asks is told to deploy, so that its predictions can be compared."""
    manifest, profile = read_package(package), serving_profile(project, package)
    manifest.variant(profile.precision)
    if project.public_key is not None:
        require_signature(package, project.public_key)
    return Deployment(
        model=manifest.name,
        package=str(package.resolve()),
        digest=package_digest(package),
        contract=manifest.contract,
        service=manifest.service,
        precision=profile.precision,
        threads=profile.threads,
        deployed_at=at,
        verdict=Approval(at, 0),
        public_key=project.public_key,
    )


def _feed(
    project: Project,
    declared: Distillation,
    package: Path,
    histories: Sequence[ViewHistory],
    api: Client,
    at: int,
    rows: int,
    newer: "Newer",
) -> "PackageVerdict":
    # Only here: what runs a package is not there where none is made.
    from isthmus.orchestration.verification.modelinputs import compare_inputs

    manifest, contract = read_package(package), project.applied()
    read = {view for view, _ in contract.read(manifest.service)}
    return compare_inputs(
        package,
        manifest,
        manifest.variant(serving_profile(project, package).precision),
        contract,
        Artifacts(project, declared).training_set(manifest.training_set).table(),
        [key for key, _ in contract.spines[declared.spine.name]["keys"]],
        [history for history in histories if history.view.name in read],
        api,
        at=at,
        rows=rows,
        newer=newer,
    )


def require_passed(verdict: Verdict) -> Verdict:
    """The verdict, if it passed.

    Raises:
        GateFailed: it did not; the first differing features are named.
    """
    if verdict.passed:
        return verdict
    worst = [f"{name} ({one.differing} of {one.compared})" for name, one in verdict.named().items() if one.differing]
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
    if not any(one.differing for features in verdict.views.values() for one in features.values()):
        return "run `isthmus export`, then verify again"
    return (
        "an engine and a graph may differ in the last digits of some functions, see docs/row-functions.md: give such a "
        "field a tolerance; run `isthmus training-set` and `isthmus export` again if they are older than the engine"
    )


def compare_view(
    history: ViewHistory, keys: pa.Table, trained: Mapping[str, Values], served: Mapping[str, Values], compared: Bool
) -> dict[str, FeatureVerdict]:
    """Feature to its comparison over the rows of `compared`, status and event time included."""
    names = [str(row) for row in keys.select([column.name for column in history.view.keys]).to_pylist()]
    types = {**{column.name: column.dtype for column in history.view.fields}, STATUS: String, EVENT: UnixTimestamp}
    chosen = [name for name, there in zip(names, compared.tolist(), strict=True) if there]
    # Of a key that training does not have, the time is that of the row that is served.
    moments = [trained[EVENT].tolist(UnixTimestamp), served[EVENT].tolist(UnixTimestamp)]
    times = [a if a is not None else b for a, b, there in zip(*moments, compared.tolist(), strict=True) if there]
    return {
        name: compare(chosen, trained[name].take(compared), served[name].take(compared), dtype, times=times)
        for name, dtype in types.items()
    }


def _keys(history: ViewHistory, at: int, served: Mapping[str, Sequence[KeyValue]] | None) -> pa.Table:
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


def _trained(keys: pa.Table, history: ViewHistory) -> dict[str, Values]:
    """What training sees of keys: the features, the status, and the event time of rows that have not expired."""
    view = history.view
    # The event time is joined like a feature, and tells what of the answer is null.
    timed = replace(history, view=replace(view, fields=(*view.fields, Column(EVENT, UnixTimestamp))))
    joined = point_in_time(keys, [timed])
    values = {
        column.name: columns.from_arrow(joined[view.full_name(column.name)], column.dtype)
        for column in timed.view.fields
    }
    words = pc.cast(joined[status_column(view)], pa.string())
    empty = reduce(pc.and_, [joined[view.full_name(column.name)].is_null() for column in view.fields])
    null = pc.and_(empty, pc.equal(words, clock.Status.PRESENT.label))
    words = pc.if_else(null, clock.Status.NULL.label, words)
    return {**values, STATUS: columns.from_arrow(words, String)}


def _served(answer: pa.Table, history: ViewHistory) -> dict[str, Values]:
    """The same of an answer of the API."""
    view = history.view
    values = {
        column.name: columns.from_arrow(answer[view.full_name(column.name)], column.dtype) for column in view.fields
    }
    words = pc.cast(answer[status_column(view)], pa.string())
    labels = pa.array([status.label for status in clock.Status])
    words = labels.take(pc.index_in(words, pa.array(LABELS)).combine_chunks())
    gone = pc.is_in(words, pa.array([clock.Status.EXPIRED.label]))
    event = pc.if_else(gone, None, answer[view.full_name(EVENT)])
    return {
        **values,
        STATUS: columns.from_arrow(words, String),
        EVENT: columns.from_arrow(event, UnixTimestamp),
    }
