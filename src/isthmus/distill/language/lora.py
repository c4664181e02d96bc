"""The declaration of low-rank changes to a base."""

from dataclasses import dataclass

from isthmus.distill.settings import failed_checks
from isthmus.features.definition.failure import mistyped
from isthmus.features.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A base's weights stay, and the product of two narrow matrices is learned for each linear layer and added to it.

    Hu et al., ICLR 2022 (arXiv:2106.09685), by the library PEFT. Of 135 M weights a rank of 16 trains 4.9 M, so that
    the optimizer needs 39 MB, not 1.1 GB. What is shipped has them added: it is as large as its base, and as fast.

    Attributes:
        rank: of each product.
        alpha: the product counts `alpha` / `rank` times.
        dropout: of what the first matrix reads.
        layers: names of the linear layers, as "q_proj"; none for all but the last, which gives the logits.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    layers: tuple[str, ...] = ()

    def problems(self, where: str) -> list[Problem]:
        """The invalid values, each with what would be valid."""
        if wrong := mistyped(self, f"{where}: "):
            return wrong
        checks = [
            ("rank", self.rank >= 1, "at least 1"),
            ("alpha", self.alpha >= 1, "at least 1"),
            ("dropout", 0 <= self.dropout < 1, "at least 0, less than 1"),
        ]
        return failed_checks(self, where, checks)
