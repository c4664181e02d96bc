"""What the submodules of a network give, seen while it computes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from isthmus.features.contract.contract import one_of
from isthmus.features.errors import ConfigurationError, Problem


@contextmanager
def tapped(network: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The latest outputs of named submodules, by name, as they are computed inside the context.

    After it the network is as it was, also after an error. So a model gives its hidden states, or its queries, keys
    and values, without another line in it.

    Args:
        network: any module.
        names: of submodules, as `network.named_modules()` has them.

    Raises:
        ConfigurationError: the network has no submodule of a name, or, at the end, has written over an output.
    """
    where = f"submodules of {type(network).__name__}"
    modules = dict(network.named_modules(remove_duplicate=False))
    absent = [Problem(name, "no submodule has this name", one_of(modules)) for name in names if name not in modules]
    if absent:
        raise ConfigurationError(where, absent)
    outputs: dict[str, Any] = {}
    versions: dict[str, int] = {}

    def keeper(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs[name], versions[name] = output, _version(output)

        return keep

    with ExitStack() as hooks:
        for name in names:
            hooks.callback(modules[name].register_forward_hook(keeper(name)).remove)
        yield outputs
    lost = [
        Problem(name, "its output was overwritten in place", "an output that stays as it was")
        for name, output in outputs.items()
        if _version(output) != versions[name]
    ]
    if lost:
        raise ConfigurationError(
            where, lost, remedy="name the submodule that overwrites it, or give that inplace=False"
        )


def _version(output: Any) -> int:
    """How often a tensor was written to; torch does not count for what is made in inference mode."""
    return output._version if isinstance(output, Tensor) and not output.is_inference() else 0
