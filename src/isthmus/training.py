"""Train a model with Isthmus's training loop, without a `Distillation` in `definitions.py`."""

from typing import TYPE_CHECKING

from isthmus.lazy import lazily

if TYPE_CHECKING:
    from isthmus.distill.accelerator import accelerator, threads
    from isthmus.distill.settings import TrainingSettings
    from isthmus.distill.training.checkpoint import discard
    from isthmus.distill.training.loop import Training
    from isthmus.features.contract.schema import sha256
    from isthmus.features.errors import Stopped
    from isthmus.features.profiles import TrainingProfile
    from isthmus.features.progress import Progress

__all__ = [
    "Progress",
    "Stopped",
    "Training",
    "TrainingProfile",
    "TrainingSettings",
    "accelerator",
    "discard",
    "sha256",
    "threads",
]
if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept misspelled names
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "isthmus.distill.accelerator": "accelerator threads",
            "isthmus.distill.settings": "TrainingSettings",
            "isthmus.distill.training.checkpoint": "discard",
            "isthmus.distill.training.loop": "Training",
            "isthmus.features.contract.schema": "sha256",
            "isthmus.features.errors": "Stopped",
            "isthmus.features.profiles": "TrainingProfile",
            "isthmus.features.progress": "Progress",
        },
    )
