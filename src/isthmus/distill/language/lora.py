"""The declaration of low-rank updates (LoRA) of a base."""

from dataclasses import dataclass

from isthmus.distill.settings import failed_checks
from isthmus.features.definition.failure import type_problems
from isthmus.features.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Train two narrow matrices per linear layer, whose product is added to the layer's frozen weights.

    The method is LoRA (Hu et al., ICLR 2022, arXiv:2106.09685), by the library PEFT. The optimizer needs far less
    memory. The product is merged before export, so the package is as large and as fast as the base.

    Attributes:
        rank: rank of each product.
        alpha: scale; the product is multiplied by `alpha` / `rank`.
        dropout: dropout on the input of the first matrix.
        layers: names of the linear layers, such as "q_proj"; empty for all except the output layer.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    layers: tuple[str, ...] = ()

    def problems(self, where: str) -> list[Problem]:
        if wrong := type_problems(self, f"{where}: "):
            return wrong
        checks = [
            ("rank", self.rank >= 1, "at least 1"),
            ("alpha", self.alpha >= 1, "at least 1"),
            ("dropout", 0 <= self.dropout < 1, "at least 0, less than 1"),
        ]
        return failed_checks(self, where, checks)
