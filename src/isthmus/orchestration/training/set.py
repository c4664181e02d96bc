"""Write the training set of a distillation (`isthmus features training-set`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from isthmus.features.contract.schema import Column, optional_fields
from isthmus.features.definition.spec import Spine
from isthmus.features.errors import RequestError
from isthmus.features.files import is_url, write_atomically
from isthmus.features.pointintime.spine import HashedSpine, SpineRows
from isthmus.features.progress import Progress, silent
from isthmus.features.values.arrow import ARROW
from isthmus.orchestration.artifacts import RECORD, TrainingSet
from isthmus.orchestration.frames import source_frames, spine_columns
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality import baseline
from isthmus.orchestration.training.data import TrainingData, TrainingOrigin, prepare_join, require_join, training_data
from isthmus.orchestration.training.record import reproduce
from isthmus.orchestration.training.requestcolumns import request_columns
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.views import executorset
from isthmus.transforms.views.compute import Frames, compute_spine


def write_training_set(  # noqa: PLR0913 - the options of the command
    project: Project,
    *,
    name: str | None = None,
    spine: str | None = None,
    features: str | None = None,
    like: str | None = None,
    out: Path | str | None = None,
    status: bool = True,
    as_served: bool = False,
    join: str = "embedded",
    progress: Progress = silent,
) -> TrainingSet:
    """Write the training set that the options of `isthmus features training-set` select.

    With `like` (folder or id of a training set), writes that training set again from the same table versions, to `out`
    or in place. With `spine` (a file or SQL), `features` and `out`, joins the features to the rows of the spine.
    Otherwise, writes the training set of the distillation `name` and makes it the latest. `name` is optional if there
    is only one. `status`, `as_served` and `join` are as in `isthmus.training_data`. Raises RequestError if the options
    cannot be combined.
    """
    kinds = {"a distillation": name, "--spine": spine, "--like": like}
    if len([kind for kind, value in kinds.items() if value is not None]) > 1:
        raise RequestError("training-set", "these options cannot be combined", expected="one of " + ", ".join(kinds))
    if like is not None and features is None and status and not as_served:
        progress(f"reproducing {like}", 0.0)
        return reproduce(project, like, out, join=join)
    if spine is not None and features is not None and out is not None:
        progress(f"joining {features} to {spine}", 0.0)
        return training_data(project, features, spine, status=status, as_served=as_served, join=join).write(out)
    if (like, spine, features, out, status) != (None, None, None, None, True):
        expected = "--spine with --features and --out, or --like with an optional --out"
        raise RequestError("training-set", "these options cannot be combined", expected=expected)
    return training_set(project, name, as_served=as_served, join=join, progress=progress)


def training_set(
    project: Project,
    name: str | None = None,
    *,
    as_served: bool = False,
    join: str = "embedded",
    progress: Progress = silent,
) -> TrainingSet:
    """Write the training set of a distillation, and make it the latest one, on which students are trained.

    Computes the spine with the project's engine, and joins the features as of each row's time. Does not join again if
    the same training set exists, but writes its statistics if they are missing. With `as_served`, joins the values that
    were readable online at each row's time, by the log of materializations. `join` is "embedded" to join in this
    process, or "engine"; the rows are the same. `as_served` needs "embedded". `name` is optional if the project has one
    distillation. Raises ContractMismatch if the definitions have not been applied.
    """
    contract = project.applied()
    require_join(join, as_served=as_served)
    declared = project.distillation(name)
    offline = project.offline_store()
    services = [service.name for service in (declared.teacher, declared.student)]
    views = dict.fromkeys(view for service in services for view, _ in contract.stored_features(service))
    transforms = {transform.name: transform for service in services for transform in contract.transforms_of(service)}
    histories = [offline.history(contract.views[view]) for view in views]
    progress(f"computing {declared.spine.name}", 0.0)
    features = {history.view.name: [column.name for column in history.view.fields] for history in histories}
    fields = {name: [column.name for column in transform.fields] for name, transform in transforms.items()}
    computed = request_columns(project, contract, fields)
    inputs = list(dict.fromkeys(column for service in services for column in contract.inputs(service)))
    spine_inputs = spine_columns(contract, declared.spine.name)
    # Inputs with a default may be missing in the spine; models read null.
    types = {column.name: ARROW[column.dtype.name] for each in transforms.values() for column in each.request}
    names = {*(column.name for column in spine_inputs), "event_timestamp", "known_at"}
    absent = {name: types[name] for name in sorted(optional_fields(list(transforms.values())) - names)}
    latest = project.state / "training" / declared.name / "latest"
    origin = TrainingOrigin(contract.hash, declared.spine.name, histories, features, status=True, computed=computed)

    def prepared(rows: SpineRows) -> TrainingData:
        return prepare_join(project, rows, origin, join=join, served=as_served)

    with source_frames(project, [declared.spine]) as frames:
        if project.cluster and join == "engine" and computed is None:
            written = _by_executors(project, declared.spine, frames, spine_inputs, absent, inputs, prepared, latest)
            spine = None
        else:
            spine = compute_spine(declared.spine, spine_inputs, frames)
    if spine is not None:
        for name, dtype in absent.items():
            spine = spine.append_column(name, pa.nulls(len(spine), dtype))
        rows = SpineRows(spine.schema, spine.to_batches)
        data = prepared(rows)
        folder = latest.with_name(data.identity(HashedSpine(rows).read()))
        if not (folder / RECORD).exists():
            progress(f"joining {', '.join(views)} to {len(spine)} rows", 0.4)
            data.write(folder)
        written = TrainingSet.read(folder)
        if not baseline.has_statistics(written):
            baseline.write_statistics(written, inputs, histories, offline)
    write_atomically(latest, written.id.encode())
    progress("the training set is written", 1.0)
    return written


def _by_executors(  # noqa: PLR0913 - what `training_set` has prepared
    project: Project, spine: Spine, frames: Frames, columns: Sequence[Column], absent: Mapping[str, pa.DataType],
    inputs: Sequence[Column], prepared: Callable[[SpineRows], TrainingData], latest: Path,
) -> TrainingSet:  # fmt: skip
    """Let executors compute the spine, and write and measure the training set in the offline store."""
    spark = next(iter(frames.values())).sparkSession
    store = Store(project.offline, project.storage_options if is_url(project.offline) else {})
    with store.scratch("_spine") as scratch:
        rows = executorset.write_spine(spine, columns, frames, scratch, absent)
        data = prepared(SpineRows(rows.schema, tuple))
        folder = latest.with_name(data.identity(rows.sha256))
        target = replace(store, folder=f"_training/{latest.parent.name}/{folder.name}")
        if not (folder / RECORD).exists():
            data.write_parts(spark, rows, target, folder)
    written = TrainingSet.read(folder)
    if written.store is not None and not baseline.has_statistics(written):
        baseline.save_statistics(written, *data.measure(spark, written.store, inputs))
    return written
