"""The project as Dagster assets: each calls one step and reports what it did.

Every blocking check is an op of its own: a failing check stops what is downstream only across ops.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from isthmus.distill.declaration import Distillation
from isthmus.distill.gates import figures
from isthmus.features.errors import GateFailed
from isthmus.features.offline import OfflineStore
from isthmus.features.verdict import Difference
from isthmus.orchestration import (
    materialization,
    models,
    papers,
    quality,
    registration,
    release,
    summary,
    tables,
    trainingset,
    verification,
)
from isthmus.orchestration.project import Project

CONTRACT = dg.AssetKey("contract")


def build_definitions(project: Project, watch: tables.Progress = tables.silent) -> dg.Definitions:
    """The whole asset graph of a project: contract, offline and online tables, and each distillation's chain.

    Args:
        project: the project.
        watch: told what every step tells its run's log, and the share of the step that is done.
    """
    views = list(project.definitions.views)
    assets: list[Any] = [_contract(project), _offline(project, views, watch), _online(project, views, watch)]
    checks: list[Any] = [_offline_check(project, views), _quality_check(project, views)]
    for declared in project.definitions.distillations.values():
        assets += [
            _training_set(project, declared, watch),
            _student(project, declared, watch),
            _package(project, declared, watch),
            _deployment(project, declared, views),
        ]
        checks += [
            _training_set_check(project, declared),
            _student_check(project, declared),
            _verdict_check(project, declared, views, watch),
        ]
    # One process: the engines and the models are heavy to start and light to share.
    return dg.Definitions(assets=assets, asset_checks=checks, executor=dg.in_process_executor)


def _contract(project: Project) -> dg.AssetsDefinition:
    @dg.asset(key=CONTRACT, op_tags=_tags("apply"), group_name="contract", kinds={"feast"},
              code_version=project.definitions.contract.hash[:12])  # fmt: skip
    def apply() -> dg.MaterializeResult[None]:
        """The compiled definitions: what every reader holds its data against."""
        return _result(lambda: registration.apply(project).as_dict())

    return apply


def _offline(project: Project, views: list[str], watch: tables.Progress) -> dg.AssetsDefinition:
    contract = project.definitions.contract
    specs = [
        dg.AssetSpec(
            _key("offline", name),
            deps=[CONTRACT],
            group_name="offline",
            kinds={"pyspark", "deltalake"},
            skippable=True,
            description=project.definitions.views[name].description,
            code_version=contract.views[name].hash[:12],
            metadata={
                "dagster/column_schema": _schema({c.name: c.dtype.name for c in contract.views[name].fields}),
                "dagster/uri": OfflineStore(project.offline).path(contract.views[name].table),
            },
        )
        for name in views
    ]

    @dg.multi_asset(specs=specs, can_subset=True, name="build")
    def build(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        """Runs the PySpark transforms; each result is the full history of a view."""
        chosen = [key.path[-1] for key in context.selected_asset_keys]
        started = time.perf_counter()
        built = tables.build(project, sorted(chosen, key=views.index), progress=_log(context, watch))
        seconds = time.perf_counter() - started
        for name, written in built.items():
            metadata = {"dagster/row_count": written.rows, **_metadata(written.as_dict(), seconds)}
            yield dg.MaterializeResult(asset_key=_key("offline", name), metadata=metadata)

    return build


def _offline_check(project: Project, views: list[str]) -> dg.AssetChecksDefinition:
    described = "The table can be read, was built under today's contract, and holds rows."
    specs = [
        dg.AssetCheckSpec("holds_its_contract", asset=_key("offline", name), blocking=True, description=described)
        for name in views
    ]

    @dg.multi_asset_check(specs=specs, name="check_offline", can_subset=True)
    def check_offline(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        """The table can be read, was built under today's contract, and holds rows."""
        contract = project.applied()
        for key in sorted(context.selected_asset_check_keys, key=str):
            view = contract.views[key.asset_key.path[-1]]
            history = OfflineStore(project.offline).history(view)
            rows = history.rows()
            yield dg.AssetCheckResult(
                passed=rows > 0, asset_key=key.asset_key, check_name=key.name,
                metadata={"rows": rows, "contract": view.hash, "version": history.version},
            )  # fmt: skip

    return check_offline


def _quality_check(project: Project, views: list[str]) -> dg.AssetChecksDefinition:
    described = "The rows still hold what the view promises of them, in its `expectations`."
    specs = [
        dg.AssetCheckSpec("meets_its_expectations", asset=_key("offline", name), blocking=True, description=described)
        for name in views
    ]

    @dg.multi_asset_check(specs=specs, name="check_quality", can_subset=True)
    def check_quality(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        """The table still holds what its view promises: time passes and training sets change without a build."""
        for key in sorted(context.selected_asset_check_keys, key=str):
            name = key.asset_key.path[-1]
            measured = quality.quality(project, [name], drift=False).views[name]
            broken = [finding for finding in measured.findings if not finding.passed]
            yield dg.AssetCheckResult(
                passed=not broken, asset_key=key.asset_key, check_name=key.name,
                description="\n".join(map(str, broken)) or None,
                metadata={
                    "rows": measured.statistics.rows,
                    "expectations": _table(
                        ([finding.feature, finding.expectation, finding.found] for finding in measured.findings),
                        ["feature", "expectation", "found"],
                    ),
                    "statistics": _table(summary.feature_rows(measured.statistics), summary.FEATURE_COLUMNS),
                },
            )  # fmt: skip

    return check_quality


def _online(project: Project, views: list[str], watch: tables.Progress) -> dg.AssetsDefinition:
    specs = [
        dg.AssetSpec(_key("online", name), deps=[_key("offline", name)], group_name="online", kinds={"redis"},
                     skippable=True, description=f"The latest row of every key of {name}, in Redis.")
        for name in views
    ]  # fmt: skip

    @dg.multi_asset(specs=specs, can_subset=True, name="materialize")
    def materialize(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        """Writes what each key answers with now."""
        chosen = sorted((key.path[-1] for key in context.selected_asset_keys), key=views.index)
        started = time.perf_counter()
        done = materialization.materialize(project, chosen, progress=_log(context, watch))
        seconds = time.perf_counter() - started
        for name, counts in done.items():
            metadata = _metadata(counts.as_dict(), seconds)
            yield dg.MaterializeResult(asset_key=_key("online", name), metadata=metadata)

    return materialize


def _training_set(project: Project, declared: Distillation, watch: tables.Progress) -> dg.AssetsDefinition:
    contract = project.definitions.contract
    services = (declared.teacher, declared.student)
    used = dict.fromkeys(view for service in services for view, _ in contract.read(service.name))

    @dg.asset(key=_key("training_set", declared.name), deps=[_key("offline", view) for view in used],
              group_name=declared.name, kinds={"duckdb"}, op_tags=_tags("training-set"))  # fmt: skip
    def training_set(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        """Every example with what each view answered at its moment."""
        return _result(
            lambda: trainingset.training_set(project, declared.name, progress=_log(context, watch)).as_dict()
        )

    return training_set


def _training_set_check(project: Project, declared: Distillation) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=_key("training_set", declared.name), name="loses_no_row", blocking=True)
    def loses_no_row() -> dg.AssetCheckResult:
        """As many rows came out of the join as went in."""
        examples = trainingset.last_training_set(project, declared)
        rows = len(examples.table())
        passed = examples.rows_in == examples.rows_out == rows
        return dg.AssetCheckResult(passed=passed, metadata={"rows_in": examples.rows_in, "rows_out": rows})

    return loses_no_row


def _student(project: Project, declared: Distillation, watch: tables.Progress) -> dg.AssetsDefinition:
    @dg.asset(key=_key("student", declared.name), deps=[_key("training_set", declared.name)],
              group_name=declared.name, kinds={"pytorch", "scikitlearn"}, op_tags=_tags("distill"))  # fmt: skip
    def student(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        """A small model that learned from a large one, beside its reference and its control."""
        result = _result(lambda: models.distill(project, declared.name, progress=_log(context, watch)).as_dict())
        report = models.last_report(project, declared)
        plotted = {name: value for name, value in figures(report).items() if value is not None}
        page = dg.MetadataValue.path(str(models.last_model(project, declared) / papers.PAGE))
        metadata = {**(result.metadata or {}), **plotted, "models": _models(report), "page": page}
        return dg.MaterializeResult(metadata=metadata)

    return student


def _student_check(project: Project, declared: Distillation) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=_key("student", declared.name), name="keeps_its_quality", blocking=True)
    def keeps_its_quality() -> dg.AssetCheckResult:
        """Every gate that the distillation declares holds."""
        try:
            return dg.AssetCheckResult(passed=True, metadata=models.require_quality(project, declared))
        except GateFailed as error:
            return dg.AssetCheckResult(passed=False, description=str(error))

    return keeps_its_quality


def _package(project: Project, declared: Distillation, watch: tables.Progress) -> dg.AssetsDefinition:
    @dg.asset(key=_key("package", declared.name), deps=[_key("student", declared.name)], group_name=declared.name,
              kinds={"onnx"}, op_tags=_tags("export"))  # fmt: skip
    def package(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        """The folder a mobile engineer receives."""
        return _result(lambda: models.export(project, declared.name, progress=_log(context, watch)).as_dict())

    return package


def _verdict_check(
    project: Project, declared: Distillation, views: list[str], watch: tables.Progress
) -> dg.AssetChecksDefinition:
    @dg.asset_check(asset=_key("package", declared.name), name="verdict", blocking=True,
                    additional_deps=[_key("online", view) for view in views])  # fmt: skip
    def verdict(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        """What is offline, served, computed on request and seen by the package agrees for every key."""
        started = time.perf_counter()
        outcome = verification.verify(project, declared.name, every=True, progress=_log(context, watch))
        metadata = _metadata(outcome.as_dict(), time.perf_counter() - started)
        metadata["page"] = dg.MetadataValue.path(str(verification.page_file(project, declared.name)))
        differing = {name: one for name, one in outcome.named().items() if one.differing}
        if differing:
            rows = [
                [name, f"{one.differing:,}", f"{one.compared:,}", f"{one.worst:.6g}", f"{one.tolerance:g}",
                 *_sides(next(iter(one.examples), None))]
                for name, one in differing.items()
            ]  # fmt: skip
            metadata["differs"] = _table(rows, _DIFFERS)
        return dg.AssetCheckResult(passed=outcome.passed, metadata=metadata)

    return verdict


_DIFFERS = ("", "differing", "compared", "worst", "tolerance", "first key", "event time", "offline", "online")


def _sides(example: Difference | None) -> list[str]:
    """The first value that differs, as a row of a table."""
    if example is None:
        return ["-"] * 4
    return [example.key, example.event_timestamp or "-", repr(example.offline), repr(example.online)]


def _deployment(project: Project, declared: Distillation, views: list[str]) -> dg.AssetsDefinition:
    @dg.asset(key=_key("deployment", declared.name),
              deps=[_key("package", declared.name), *(_key("online", view) for view in views)],
              group_name=declared.name, kinds={"onnx"}, op_tags=_tags("deploy"))  # fmt: skip
    def deployment() -> dg.MaterializeResult[None]:
        """The package behind the API."""
        return _result(lambda: release.deployed(release.deploy(project, declared.name)))

    return deployment


def _models(report: Mapping[str, Any]) -> dg.MetadataValue[str]:
    """The measures of all models, side by side."""
    measures = list(report["models"]["student"]["quality"])
    costs = ["parameters", "bytes", "p50_us", "p99_us"]
    rows = [
        [name, *(_figure(model["quality"].get(measure)) for measure in measures), *(_figure(model[c]) for c in costs)]
        for name, model in report["models"].items()
    ]
    return _table(rows, ["model", *measures, *costs])


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def _table(rows: Iterable[Sequence[str]], columns: Sequence[str]) -> dg.MetadataValue[str]:
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return dg.MetadataValue.md("\n".join("| " + " | ".join(line) + " |" for line in lines))


def _key(*path: str) -> dg.AssetKey:
    return dg.AssetKey(path)


def _tags(step: str) -> Mapping[str, str]:
    return {"isthmus/step": step}


def _schema(columns: Mapping[str, str]) -> dg.TableSchema:
    return dg.TableSchema([dg.TableColumn(name, dtype) for name, dtype in columns.items()])


def _log(context: dg.AssetExecutionContext | dg.AssetCheckExecutionContext, watch: tables.Progress) -> tables.Progress:
    def tell(text: str, done: float) -> None:
        context.log.info(f"{text} ({done:.0%})")
        watch(text, done)

    return tell


def _result(step: Callable[[], Mapping[str, Any]]) -> dg.MaterializeResult[None]:
    started = time.perf_counter()
    report = step()
    return dg.MaterializeResult(metadata=_metadata(report, time.perf_counter() - started))


def _metadata(report: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The whole report, and its numbers one by one: Dagster plots those over time."""
    numbers = {key: value for key, value in report.items() if isinstance(value, int | float | str) and key != "seconds"}
    return {"seconds": round(seconds, 3), "report": dg.MetadataValue.json(dict(report)), **numbers}
