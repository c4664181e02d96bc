"""A teacher's outputs as data: computed once, stored in shards, read through memory maps."""

from typing import TYPE_CHECKING

from isthmus.moved import names_in

if not TYPE_CHECKING:
    __getattr__ = names_in("isthmus.teachers", __name__)
