"""Distillation losses. `isthmus.losses` is the public module."""

from typing import TYPE_CHECKING

from isthmus.moved import names_in

if not TYPE_CHECKING:
    __getattr__ = names_in("isthmus.losses", __name__)
