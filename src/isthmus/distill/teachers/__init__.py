"""The same interface to any teacher: a transformers model, a torch module, an estimator, a function.

Importing this package loads torch; transformers only where a model of it is loaded.
"""

from isthmus.distill.teachers.compatibility import agreed, compatible
from isthmus.distill.teachers.estimator import EstimatorTeacher
from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.teachers.function import FunctionTeacher
from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.distill.teachers.pretrained import PretrainedTeacher, pretrained
from isthmus.distill.teachers.teacher import Teacher

__all__ = [
    "EstimatorTeacher",
    "FunctionTeacher",
    "NetworkTeacher",
    "PretrainedTeacher",
    "Teacher",
    "agreed",
    "compatible",
    "fingerprint",
    "pretrained",
]
