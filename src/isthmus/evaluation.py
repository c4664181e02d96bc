"""Metrics and latency of models, confidence intervals over seeds, and the slices in which a student is worst."""

from typing import TYPE_CHECKING

from isthmus.lazy import lazily

if TYPE_CHECKING:
    from isthmus.distill.evaluation.interval import interval
    from isthmus.distill.evaluation.metrics import agreement, auc, cosine, interleaved, metrics, sigmoid
    from isthmus.distill.evaluation.slices import worst_slices

__all__ = [
    "agreement",
    "auc",
    "cosine",
    "interleaved",
    "interval",
    "metrics",
    "sigmoid",
    "worst_slices",
]
if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept misspelled names
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "isthmus.distill.evaluation.interval": "interval",
            "isthmus.distill.evaluation.metrics": "agreement auc cosine interleaved metrics sigmoid",
            "isthmus.distill.evaluation.slices": "worst_slices",
        },
    )
