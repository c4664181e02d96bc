"""One interface to teachers of any kind: transformers models, torch modules, estimators and functions."""

from typing import TYPE_CHECKING

from isthmus.moved import names_in

if not TYPE_CHECKING:
    __getattr__ = names_in("isthmus.teachers", __name__)
