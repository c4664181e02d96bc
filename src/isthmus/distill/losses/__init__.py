"""Distillation losses. `isthmus.losses` is the public module."""
