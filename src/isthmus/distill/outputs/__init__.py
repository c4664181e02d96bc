"""A teacher's outputs as data: computed once, stored in shards, read through memory maps."""

from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.outputs.form import Form, OutputFormat
from isthmus.distill.outputs.identity import identities

__all__ = ["Form", "OutputFormat", "TeacherOutputs", "identities"]
