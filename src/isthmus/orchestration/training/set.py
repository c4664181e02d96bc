"""`training-set`: the examples of a distillation, each with what every view answered at its moment."""

from pathlib import Path

import pyarrow as pa

from isthmus.features.contract.contract import Column, Contract, optional
from isthmus.features.errors import RequestError
from isthmus.features.files import write_atomically
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.spine import SpineRows
from isthmus.features.progress import Progress, silent
from isthmus.features.types import TYPES
from isthmus.features.values.columns import ARROW
from isthmus.orchestration.artifacts import DATA, RECORD, TrainingSet, records_folder
from isthmus.orchestration.frames import source_frames
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality import baseline
from isthmus.orchestration.training.data import HashedSpine, TrainingData, join_engine, repeat, training_data
from isthmus.orchestration.training.requestcolumns import request_columns
from isthmus.transforms.views.compute import compute_spine


def training_set(
    project: Project,
    name: str | None = None,
    *,
    as_served: bool = False,
    join: str = "embedded",
    progress: Progress = silent,
) -> TrainingSet:
    """Joins the views of a distillation to its spine by the time rules.

    Args:
        project: the project, applied and built.
        name: the distillation; may be left out where there is only one.
        as_served: whether to answer with what was readable online at each moment, by the log of materializations.
        join: "embedded" in this process, or "engine" by the engine of the project. The rows are the same.
        progress: told what is being done and the share that is done.
    """
    contract = project.applied()
    engine = join_engine(project, join, as_served=as_served)
    declared = project.distillation(name)
    offline = OfflineStore(project.offline)
    services = [service.name for service in (declared.teacher, declared.student)]
    views = dict.fromkeys(view for service in services for view, _ in contract.read(service))
    computed = {one.name: [column.name for column in one.fields] for name in services for one in contract.used(name)}
    histories = [offline.history(contract.views[view]) for view in views]
    progress(f"computing {declared.spine.name}", 0.0)
    with source_frames(project, [declared.spine]) as frames:
        spine = compute_spine(declared.spine, spine_columns(contract, declared.spine.name), frames)
    # A model is fed what has a default, too: of rows that say nothing of it, as null.
    used = [transform for service in services for transform in contract.used(service)]
    types = {column.name: ARROW[column.dtype.name] for transform in used for column in transform.request}
    for absent in sorted(optional(used).difference(spine.schema.names)):
        spine = spine.append_column(absent, pa.nulls(len(spine), types[absent]))
    rows = SpineRows(spine.schema, spine.to_batches)
    data = TrainingData(
        offline,
        histories,
        rows,
        {history.view.name: [column.name for column in history.view.fields] for history in histories},
        status=True,
        threads=project.settings.profiles.training.threads,
        contract=contract.hash,
        named=declared.spine.name,
        records=records_folder(project),
        served=as_served,
        engine=engine,
        request_columns=request_columns(project, contract, computed),
    )
    folder = project.state / "training" / declared.name
    identity = data.identity(HashedSpine(rows).read())
    if not (folder / identity / RECORD).exists():
        progress(f"joining {', '.join(views)} to {len(spine)} rows", 0.4)
        data.write(folder / identity)
    made = TrainingSet.read(folder / identity)
    if not (folder / identity / baseline.FILE).exists():
        columns = dict.fromkeys(column for service in services for column in contract.inputs(service))
        baseline.write(folder / identity, folder / identity / DATA, made, list(columns), histories, offline)
    write_atomically(folder / "latest", identity.encode())
    progress("the training set is written", 1.0)
    return made


def chosen(
    project: Project,
    name: str | None = None,
    *,
    spine: str | None = None,
    features: str | None = None,
    like: str | None = None,
    out: Path | None = None,
    status: bool = True,
    as_served: bool = False,
    join: str = "embedded",
    progress: Progress = silent,
) -> TrainingSet:
    """The training set that a command line describes: of a distillation, of a spine of one's own, or one made before.

    Raises:
        RequestError: what is named does not go together.
    """
    told = {"a distillation": name, "--spine": spine, "--like": like}
    if len([what for what, value in told.items() if value is not None]) > 1:
        raise RequestError("training-set", "more than one of them is given", expected="one of " + ", ".join(told))
    if like is not None and features is None and status and not as_served:
        progress(f"making {like} again", 0.0)
        return repeat(project, like, out, join=join)
    if spine is not None and features is not None and out is not None:
        progress(f"joining {features} to {spine}", 0.0)
        return training_data(project, features, spine, status=status, as_served=as_served, join=join).write(out)
    if like is not None or spine is not None or features is not None or out is not None or not status:
        expected = "--spine with --features and --out, or --like, with --out or without"
        raise RequestError("training-set", "its options do not go together", expected=expected)
    return training_set(project, name, as_served=as_served, join=join, progress=progress)


def spine_columns(contract: Contract, name: str) -> list[Column]:
    """Keys, request fields and label of a spine. A request field named like a key is that key."""
    spine = contract.spines[name]
    known = {name: (dtype, *size) for name, dtype, *size in (*spine["keys"], *spine["request"], spine["label"])}
    return [Column(name, TYPES[dtype], size=next(iter(size), None)) for name, (dtype, *size) in known.items()]
