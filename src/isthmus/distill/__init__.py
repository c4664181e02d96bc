"""Distill a large model into a small one. The import loads no machine-learning library and sets OMP_WAIT_POLICY."""

import os

from isthmus.distill.declaration import Distillation

# OpenMP reads this when torch or scikit-learn loads it. By default its waiting threads spin: the teacher took ten times
# as long as soon as another process held one of two cores. Asleep they cost nothing on free cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = ["Distillation"]
