"""`materialize`: writes the latest row of every key to Redis."""

from collections.abc import Sequence

from isthmus.features.offline import OfflineStore
from isthmus.features.online import OnlineStore, connect
from isthmus.features.publishing import Materialized, publish
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables import Progress, selected, silent


def materialize(
    project: Project, views: Sequence[str] | None = None, *, full: bool = False, progress: Progress = silent
) -> dict[str, Materialized]:
    """Writes what each key answers with now, and removes keys that are gone; what Redis holds already is not written.

    Args:
        project: the project, applied and built.
        views: names of the views, or None for all.
        full: compare every row with Redis, replace whatever differs and remove what the view lacks, also what claims to
            be newer.
        progress: told the view at hand and the share that is done.
    """
    contract = project.applied()
    names = selected(project, views)
    offline = OfflineStore(project.offline)
    # Every table is opened before the first row is written.
    histories = {name: offline.history(contract.views[name]) for name in names}
    done = {}
    with project.redis() as url, connect(url) as client:
        store = OnlineStore(client, contract)
        for n, (name, history) in enumerate(histories.items()):
            share, text = n / len(names), f"waiting for another run that writes {name}"
            progress(f"writing {name}", share)
            done[name] = publish(
                store, url, offline, history, project.now, full=full,
                waiting=lambda text=text, share=share: progress(text, share),  # type: ignore[misc]
            )  # fmt: skip
    progress("all rows are written", 1.0)
    return done
