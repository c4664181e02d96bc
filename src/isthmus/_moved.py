"""Module paths of version 0.1 that users may have written: each still leads to its module, with a warning."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "isthmus.distill.account": "isthmus.distill.training.runlog",
    "isthmus.distill.checkpoint": "isthmus.distill.training.checkpoint",
    "isthmus.distill.evaluate": "isthmus.distill.evaluation.metrics",
    "isthmus.distill.interval": "isthmus.distill.evaluation.interval",
    "isthmus.distill.lessons": "isthmus.distill.training.studentrun",
    "isthmus.distill.loop": "isthmus.distill.training.loop",
    "isthmus.distill.outputs.outputs": "isthmus.distill.outputs.cache",
    "isthmus.distill.papers": "isthmus.distill.reports",
    "isthmus.distill.runtime": "isthmus.distill.onnx.runtime",
    "isthmus.distill.slices": "isthmus.distill.evaluation.slices",
    "isthmus.distill.split": "isthmus.distill.tasks.split",
    "isthmus.distill.task": "isthmus.distill.tasks.task",
    "isthmus.distill.transfer": "isthmus.distill.losses",
    "isthmus.features.feast_compute": "isthmus.features.feast.compute",
    "isthmus.features.feast_offline": "isthmus.features.feast.offline",
    "isthmus.features.feast_store": "isthmus.features.feast.online",
    "isthmus.features.manifest": "isthmus.features.package.manifest",
    "isthmus.orchestration.materialization": "isthmus.orchestration.build.materialize",
    "isthmus.orchestration.registration": "isthmus.orchestration.apply.apply",
    "isthmus.orchestration.tables": "isthmus.orchestration.build.build",
}
"""Old path to new path. Leaves with version 0.3."""

_PARTED = {
    "isthmus.distill.task": "isthmus.distill.tasks.answers",
    "isthmus.features.manifest": "isthmus.features.package.inputs",
}
"""Old path to where the rest of its module is."""

_FORMER = {new: old for old, new in MOVED.items()} | {
    "isthmus.distill.tabular.student": "isthmus.distill.student",
    "isthmus.distill.tabular.task": "isthmus.distill.tabular",
    "isthmus.distill.tabular.teacher": "isthmus.distill.boosting",
    "isthmus.distill.tasks.requestinputs": "isthmus.distill.head",
    "isthmus.distill.tasks.samples": "isthmus.distill.golden",
    "isthmus.distill.teachers.compatibility": "isthmus.distill.teachers.agreement",
    "isthmus.distill.teachers.taps": "isthmus.distill.transfer.taps",
    "isthmus.features.contract.contract": "isthmus.features.contract",
    "isthmus.features.package.golden": "isthmus.features.golden",
    "isthmus.features.values.columns": "isthmus.features.columns",
    "isthmus.transforms.preparation.steps": "isthmus.transforms.steps",
}
_RENAMED = {
    "isthmus.distill.settings.TrainingSettings": "isthmus.distill.settings.Settings",
    "isthmus.distill.tasks.requestinputs.RequestInputs": "isthmus.distill.head.Head",
    "isthmus.distill.tasks.answers.graph_answers": "isthmus.distill.task.replied_all",
    "isthmus.distill.tasks.answers.student_answers": "isthmus.distill.task.asked_all",
    "isthmus.distill.teachers.compatibility.compatible": "isthmus.distill.teachers.agreement.agreed",
    "isthmus.features.package.inputs.ModelInput": "isthmus.features.manifest.ModelInput",
    "isthmus.features.package.inputs.feeds": "isthmus.features.manifest.feeds",
    "isthmus.distill.types.spread": "isthmus.distill.golden.spread",
}


def former(module: str, name: str) -> str:
    """The dotted name in version 0.1, by which fingerprints name a class or function ever since."""
    if renamed := _RENAMED.get(f"{module}.{name}"):
        return renamed
    head, _, rest = module.rpartition(".")
    return f"{_FORMER.get(module) or (f'{_FORMER[head]}.{rest}' if head in _FORMER else module)}.{name}"


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        path = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} has moved: use {path}", DeprecationWarning, stacklevel=2)
        for part in filter(None, (_PARTED.get(module.__name__), path)):
            vars(module).update({name: value for name, value in vars(import_module(part)).items() if name[:2] != "__"})


def install() -> None:
    """Makes the old paths importable."""
    sys.meta_path.append(_Moved())
