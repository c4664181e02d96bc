"""Outputs of a teacher as data: computed once, stored in shards, read from memory maps."""

from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.outputs.form import Form
from isthmus.distill.outputs.identity import identities

__all__ = ["Form", "TeacherOutputs", "identities"]
