"""Teachers for a distillation, digests that identify them, and a cache of their outputs on disk."""

from typing import TYPE_CHECKING

from isthmus.lazy import lazily

if TYPE_CHECKING:
    from isthmus.distill.outputs.cache import OutputCache
    from isthmus.distill.outputs.form import OutputFormat
    from isthmus.distill.outputs.identity import identities
    from isthmus.distill.teachers.compatibility import compatible
    from isthmus.distill.teachers.estimator import EstimatorTeacher
    from isthmus.distill.teachers.fingerprint import fingerprint
    from isthmus.distill.teachers.function import FunctionTeacher
    from isthmus.distill.teachers.network import NetworkTeacher
    from isthmus.distill.teachers.pretrained import PretrainedTeacher, pooled, pretrained
    from isthmus.distill.teachers.teacher import Teacher

__all__ = [
    "EstimatorTeacher",
    "FunctionTeacher",
    "NetworkTeacher",
    "OutputCache",
    "OutputFormat",
    "PretrainedTeacher",
    "Teacher",
    "compatible",
    "fingerprint",
    "identities",
    "pooled",
    "pretrained",
]
if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept misspelled names
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "isthmus.distill.outputs.cache": "OutputCache",
            "isthmus.distill.outputs.form": "OutputFormat",
            "isthmus.distill.outputs.identity": "identities",
            "isthmus.distill.teachers.compatibility": "compatible",
            "isthmus.distill.teachers.estimator": "EstimatorTeacher",
            "isthmus.distill.teachers.fingerprint": "fingerprint",
            "isthmus.distill.teachers.function": "FunctionTeacher",
            "isthmus.distill.teachers.network": "NetworkTeacher",
            "isthmus.distill.teachers.pretrained": "PretrainedTeacher pooled pretrained",
            "isthmus.distill.teachers.teacher": "Teacher",
        },
    )
