"""An import hook for former private modules: its errors name the public module to import instead."""

import sys

PUBLIC = {
    "isthmus.distill.decoding": "isthmus.inference",
    "isthmus.distill.device": "isthmus.training",
    "isthmus.distill.export.decoding": "isthmus.inference",
    "isthmus.distill.task": "isthmus.tasks",
    "isthmus.features.contract.contract": "isthmus.training",
    "isthmus.features.feast_compute": "isthmus.feast",
    "isthmus.features.feast_offline": "isthmus.feast",
    "isthmus.features.feast_store": "isthmus.feast",
    "isthmus.features.head": "isthmus.inference",
    "isthmus.features.package": "isthmus.tasks",
    "isthmus.features.verdict": "isthmus.project",
    "isthmus.orchestration.api": "isthmus",
    "isthmus.orchestration.build": "isthmus.project",
}
"""Former private module to the public module that has its names."""


class _Moved:
    def find_spec(self, name: str, path: object, target: object = None, /) -> None:
        del path, target
        if name in PUBLIC:
            raise ModuleNotFoundError(
                f"{name} was private and has moved. Import from {PUBLIC[name]} instead.", name=name
            )


def install() -> None:
    """Add an import hook to `sys.meta_path`, behind the existing ones. Each call adds another hook.

    Importing a former private module (a key of `PUBLIC`) then raises a ModuleNotFoundError that names the public one.
    """
    sys.meta_path.append(_Moved())
