"""One interface to teachers of any kind: transformers models, torch modules, estimators and functions.

Importing this package loads torch, but transformers only when a model is loaded from it.
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
