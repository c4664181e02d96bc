"""Distillation losses, their weighted sum, and initialization with the teacher's layers.

Every loss is a function or a module that reduces tensors to a scalar. It first raises a `ConfigurationError` for
tensors that are empty or whose types, sizes or devices do not fit together. Half precision is converted to float32. The
teacher's tensors get no gradient. Temperatures are above 0. Masks are True where a position counts; if no position
counts, the loss is 0.
"""

from isthmus.distill.losses.adversarial import (
    Adversarial,
    PatchDiscriminator,
    hinge_discriminator,
    hinge_generator,
    least_squares_discriminator,
    least_squares_generator,
)
from isthmus.distill.losses.embeddings import cosine, similarities, squared
from isthmus.distill.losses.hidden import HiddenStates
from isthmus.distill.losses.initialization import Copied, drop_layers
from isthmus.distill.losses.logits import (
    binary_hard_targets,
    binary_soft_targets,
    decoupled,
    generalized,
    hard_targets,
    soft_targets,
    standardized,
    top_k_tail,
    top_k_targets,
)
from isthmus.distill.losses.maps import FeatureMaps, Perceptual, attention_transfer
from isthmus.distill.losses.objective import Objective, Outputs, Term
from isthmus.distill.losses.ranking import graded_lists, grouped_lists, lists, margins
from isthmus.distill.losses.regression import absolute_errors, squared_errors
from isthmus.distill.losses.relations import attention_relations
from isthmus.distill.losses.schedule import Schedule
from isthmus.distill.teachers.taps import tapped

__all__ = [
    "Adversarial",
    "Copied",
    "FeatureMaps",
    "HiddenStates",
    "Objective",
    "Outputs",
    "PatchDiscriminator",
    "Perceptual",
    "Schedule",
    "Term",
    "absolute_errors",
    "attention_relations",
    "attention_transfer",
    "binary_hard_targets",
    "binary_soft_targets",
    "cosine",
    "decoupled",
    "drop_layers",
    "generalized",
    "graded_lists",
    "grouped_lists",
    "hard_targets",
    "hinge_discriminator",
    "hinge_generator",
    "least_squares_discriminator",
    "least_squares_generator",
    "lists",
    "margins",
    "similarities",
    "soft_targets",
    "squared",
    "squared_errors",
    "standardized",
    "tapped",
    "top_k_tail",
    "top_k_targets",
]
