"""Distillation losses and their weighted sum.

A loss is a function or a torch module that reduces tensors to a scalar. It raises a `ConfigurationError` for empty
tensors, for data types, shapes or devices that do not fit together, and for a temperature of 0 or below. Half precision
is converted to float32. No gradient flows to the teacher's outputs. A mask is True for the elements that count; if it
is False everywhere, the loss is 0. `tapped` records the outputs of a network's submodules, for losses of hidden states.
"""

from typing import TYPE_CHECKING

from isthmus.lazy import lazily

if TYPE_CHECKING:
    from isthmus.distill.losses.adversarial import (
        Adversarial,
        PatchDiscriminator,
        hinge_discriminator,
        hinge_generator,
    )
    from isthmus.distill.losses.embeddings import cosine, info_nce, similarities
    from isthmus.distill.losses.hidden import HiddenStates
    from isthmus.distill.losses.logits import (
        binary_hard_targets,
        binary_soft_targets,
        generalized,
        hard_targets,
        soft_targets,
        top_k_tail,
        top_k_targets,
    )
    from isthmus.distill.losses.objective import Objective, Outputs, Schedule, Term
    from isthmus.distill.losses.perceptual import Perceptual
    from isthmus.distill.losses.ranking import graded_lists, grouped_lists, lists
    from isthmus.distill.losses.regression import absolute_errors, squared_errors
    from isthmus.distill.teachers.taps import tapped

__all__ = [
    "Adversarial",
    "HiddenStates",
    "Objective",
    "Outputs",
    "PatchDiscriminator",
    "Perceptual",
    "Schedule",
    "Term",
    "absolute_errors",
    "binary_hard_targets",
    "binary_soft_targets",
    "cosine",
    "generalized",
    "graded_lists",
    "grouped_lists",
    "hard_targets",
    "hinge_discriminator",
    "hinge_generator",
    "info_nce",
    "lists",
    "similarities",
    "soft_targets",
    "squared_errors",
    "tapped",
    "top_k_tail",
    "top_k_targets",
]
if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept misspelled names
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "isthmus.distill.losses.adversarial": (
                "Adversarial PatchDiscriminator hinge_discriminator hinge_generator"
            ),
            "isthmus.distill.losses.embeddings": "cosine info_nce similarities",
            "isthmus.distill.losses.hidden": "HiddenStates",
            "isthmus.distill.losses.logits": (
                "binary_hard_targets binary_soft_targets generalized hard_targets soft_targets top_k_tail top_k_targets"
            ),
            "isthmus.distill.losses.perceptual": "Perceptual",
            "isthmus.distill.losses.objective": "Objective Outputs Schedule Term",
            "isthmus.distill.losses.ranking": "graded_lists grouped_lists lists",
            "isthmus.distill.losses.regression": "absolute_errors squared_errors",
            "isthmus.distill.teachers.taps": "tapped",
        },
    )
