"""How a model is monitored behind the API: a declaration."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from isthmus.distill.settings import failed_checks, mistyped
from isthmus.features.definition.spec import Spine
from isthmus.features.errors import Problem, one_of

FEWEST = 100
"""Answers of a slice, at least."""


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """How recorded answers of a model find the labels that become known later: `isthmus monitor`.

    The label of an answer is that of the spine's row with the same join keys and request fields whose `event_timestamp`
    is nearest to the moment of the answer.

    Attributes:
        within: how far apart the two moments may be.
        match: the join keys and request fields by which rows are found; None for all of them that a request has. Leave
            out a field that an app may know otherwise than the spine.
        slices: the join keys and request fields by whose values quality is measured, too; None for all of them.
    """

    within: timedelta = timedelta(hours=1)
    match: Sequence[str] | None = None
    slices: Sequence[str] | None = None

    def problems(self, where: str, spine: Spine) -> list[Problem]:
        """The invalid values, each with what would be valid."""
        if wrong := mistyped(self, where):
            return wrong
        problems = failed_checks(self, where, [("within", self.within >= timedelta(0), "at least 0")])
        known = columns(spine)
        for name, chosen in (("match", self.match), ("slices", self.slices)):
            unknown = [column for column in chosen or () if column not in known]
            problems += [Problem(f"{where}: {name}", repr(column), one_of(known)) for column in unknown]
        if self.match is not None and not self.match:
            problems.append(Problem(f"{where}: match", "[]", one_of(known)))
        return problems


def columns(spine: Spine) -> list[str]:
    """The join keys and request fields of a spine, without arrays."""
    keys = [key for entity in spine.entities for key in entity.join_keys]
    fields = [field.name for field in spine.request.schema if field.dtype.element is None] if spine.request else []
    return list(dict.fromkeys([*keys, *fields]))
