"""`isthmus pushes collect`: move pushed rows from Redis to the offline tables, once (`collect`) or often (`follow`)."""

import time
from collections.abc import Callable, Collection, Iterator
from threading import Event

from isthmus.features import clock
from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import IsthmusError, first_line
from isthmus.features.online import pushes
from isthmus.features.progress import Progress, silent
from isthmus.features.publishing.collect import CollectedPushes
from isthmus.features.publishing.collect import collect as collect_table
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.orchestration.project import Project
from isthmus.serving.log import place


def collect(
    project: Project, views: Collection[str] | None = None, *, wait: bool = True, again: bool = False,
    progress: Progress = silent,
) -> dict[str, CollectedPushes]:  # fmt: skip
    """Move pushed rows of views (default: all) from Redis to the offline tables. Return counts of rows by table.

    Includes rows that were pushed under earlier contracts. Ignores unknown names in `views`. Unreadable rows go to a
    separate stream in Redis, and `progress` reports them. With `again`, first puts back the rows that earlier runs
    moved to that stream. If a table is being built, waits for the build or, if `wait` is False, skips the table. If a
    table fails, its rows stay in Redis, and the first error is raised after all tables. Starts Redis if it is embedded.
    """
    tables = _tables(project, views)
    offline, collected = project.offline_store(), dict[str, CollectedPushes]()
    failure: Exception | None = None
    with project.redis() as url, connect(url) as client:
        for table in tables if again else ():
            with translate_errors(url):
                pushes.put_back(client, project.name, table)
        turns = [(table, False) for table in tables]
        while turns:
            table, late = turns.pop(0)
            done = len(collected) / len(tables)
            progress(f"collecting pushed rows of {table}{', after its build' if late else ''}", done)
            try:
                with project.adding_to(table, wait=late), translate_errors(url):
                    counts = collected[table] = collect_table(client, project.name, offline, table, tables[table])
                for problem in _problems(project, table, counts):
                    progress(problem, done)
            except BlockingIOError:
                turns += [(table, True)] if wait else []
            except Exception as error:  # noqa: BLE001 - raised at the end, after the other tables
                failure = failure or error
    if failure is not None:
        raise failure
    progress("collected all pushed rows", 1.0)
    return collected


def follow(project: Project, say: Callable[[str], None], stopped: Event | None = None) -> None:
    """Collect pushed rows of all views every `history_seconds` (a setting) until `stopped` is set; None means forever.

    Calls `say` with counts of rows, problems and errors, and raises no error. Skips a table while it is being built.
    """

    def turn() -> str:
        # Do not wait for builds, because other views would wait too.
        for table, counts in collect(project, wait=False).items():
            for problem in _problems(project, table, counts):
                say(problem)
            if counts.rows:
                say(f"collected {counts.rows:,} pushed rows of {table}")
        return ""

    run_every(turn, project.settings.stores.history_seconds, say, stopped)


def run_every(
    action: Callable[[], str], seconds: float, say: Callable[[str], None], stopped: Event | None = None
) -> None:
    """Call `action` every `seconds` until the event `stopped` is set, or forever if it is None.

    `action` returns a problem as text, or "". Catches its errors. Calls `say` with each problem or error, unless the
    previous call of `action` ended with the same one.
    """
    stopped, before = stopped or Event(), ""
    while not stopped.is_set():
        began = time.monotonic()
        try:
            problem = action()
        except Exception as error:  # noqa: BLE001 - the next turn may succeed
            problem = describe_error(error)
        if problem and problem != before:
            say(problem)
        before = problem
        stopped.wait(max(0.0, seconds - (time.monotonic() - began)))


def describe_error(error: Exception) -> str:
    if isinstance(error, IsthmusError):
        return str(error)
    return f"{type(error).__name__} at {place(error)}: {first_line(error)}"


def _problems(project: Project, table: str, counts: CollectedPushes) -> Iterator[str]:
    if counts.lost_after is not None:
        since = clock.moment(counts.lost_after).isoformat(timespec="seconds")
        yield f"Redis has lost pushed rows of {table}: rows pushed after {since} may be missing from the table"
    if counts.aside:
        where = f"they are set aside in Redis as {pushes.unreadable_stream(project.name, table).decode()}"
        yield (
            f"{counts.aside:,} pushed rows of {table} cannot be collected (the last one {counts.why}): {where}; "
            "`isthmus pushes collect --again` retries them"
        )


def _tables(project: Project, views: Collection[str] | None) -> dict[str, list[ViewContract]]:
    """Return, by offline table, all view definitions that rows may have been pushed under, newest first."""
    generations = project.generations()
    newest = generations.newest()
    tables: dict[str, list[ViewContract]] = {}
    for contract in (*([newest] if newest else ()), *generations.contracts(), *generations.forgotten):
        for view in contract.views.values():
            if views is not None and view.name not in views:
                continue
            known = tables.setdefault(view.table, [])
            if view.hash not in {item.hash for item in known}:
                known.append(view)
    return tables
