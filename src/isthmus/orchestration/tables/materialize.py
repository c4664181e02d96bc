"""`isthmus materialize`: write the latest row of every key to Redis."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from isthmus.features.online import loss
from isthmus.features.online.store import OnlineStore
from isthmus.features.progress import Progress, silent
from isthmus.features.publishing.publish import Publication, publish, require_same
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.orchestration.apply.switch import forget, switch
from isthmus.orchestration.frames import view_names
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality import gate
from isthmus.orchestration.server.collect import collect
from isthmus.transforms import engine
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.views import onlinewrite


def materialize(
    project: Project, views: Sequence[str] | None = None, *, full: bool = False, progress: Progress = silent
) -> dict[str, Publication]:
    """Write the changed rows of views (default: all) to Redis, and remove keys that no longer exist.

    Returns counts of keys by view. Collects pushed rows into the offline tables first. Afterward switches servers to
    the next contract if all of its rows are online. Also deletes contracts that were replaced long enough ago, with
    their rows. Starts Redis if it is embedded. For each view, waits up to ten minutes for another run that writes it.

    With `full`, compares every row with Redis, overwrites all rows that differ, even if the row in Redis
    is newer, and removes all rows that the view lacks.

    Raises:
        ContractMismatch: the definitions have not been applied, or a table was built under another contract.
        DataError: a table is missing or damaged.
        DependencyError: Redis does not answer, or another run of a view does not end in time.
        GateFailed: a table breaks an expectation of its view; no row was written to Redis.
        RequestError: a view is unknown.
    """
    contract = project.applied()
    names = view_names(project, views)
    # Pushed rows that are not in a table yet would be overwritten by rows that became known later.
    collect(project, names if views else None, progress=lambda text, _: progress(text, 0.0))
    offline = project.offline_store()
    # Open every table before writing the first row, to find errors early.
    histories = {name: offline.history(contract.views[name]) for name in names}
    written = {}
    with ExitStack() as stack:
        find, spark, settings = None, None, project.settings
        if settings.engine != "sail":
            spark = stack.enter_context(engine.session(settings.engine, settings.profiles.training.threads))
        gate.require_online(project, offline, histories, spark=spark)
        url = stack.enter_context(project.redis())
        store = OnlineStore(stack.enter_context(connect(url)), contract)
        if spark is not None:
            find = onlinewrite.finder(spark, Store(offline.root, offline.storage_options or {}), contract, url)
        with translate_errors(url):
            servers, policy = store.servers(), store.losses({}).policy
        if policy:
            progress(policy, 0.0)
        for n, (name, history) in enumerate(histories.items()):
            progress(f"writing {name}", n / len(names))
            waiting = partial(progress, f"waiting for another run that writes {name}", n / len(names))
            written[name] = publish(store, url, offline, history, project.now, full=full, find=find, waiting=waiting)
            with translate_errors(url), project.locked("materialized"):
                record = store.published(history.view)
                if record is not None and not record.pending:
                    loss.record_materialization(project.state / loss.FILE, history.view, record)
        with translate_errors(url):
            require_same(url, servers, store.servers())
            progress("all rows are written", 1.0)
            if switch(project, store):
                progress(f"contract {contract.hash[:12]} is current", 1.0)
            forget(project, store)
    return written
