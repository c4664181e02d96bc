"""Write a task of your own: subclass `Task`, and describe its batches, golden cases and splits."""

from typing import TYPE_CHECKING

from isthmus.lazy import lazily

if TYPE_CHECKING:
    from isthmus.distill.tasks.split import Split, split_by_value
    from isthmus.distill.tasks.task import Batch, Case, Material, Task
    from isthmus.distill.types import Answers, Array, Index
    from isthmus.package.inputs import Feeds

__all__ = [
    "Answers",
    "Array",
    "Batch",
    "Case",
    "Feeds",
    "Index",
    "Material",
    "Split",
    "Task",
    "split_by_value",
]
if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept misspelled names
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "isthmus.distill.tasks.split": "Split split_by_value",
            "isthmus.distill.tasks.task": "Batch Case Material Task",
            "isthmus.distill.types": "Answers Array Index",
            "isthmus.package.inputs": "Feeds",
        },
    )
