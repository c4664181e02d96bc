"""Outputs of a network's submodules."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from isthmus.features.errors import ConfigurationError, Problem, one_of


@contextmanager
def tapped(network: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Record the outputs of a network's submodules, such as hidden states, queries, keys and values, for use in a loss.

    Yields a dict from submodule name to the submodule's latest output. Each call of `network` in the `with` block fills
    it. `names` are submodule names as in `network.named_modules()`.

    Raises:
        ConfigurationError: a submodule does not exist, or, at the end of the block, an output was overwritten in place.
    """
    where = f"submodules of {type(network).__name__}"
    modules = dict(network.named_modules(remove_duplicate=False))
    absent = [Problem(name, "no submodule has this name", one_of(modules)) for name in names if name not in modules]
    if absent:
        raise ConfigurationError(where, absent)
    outputs: dict[str, Any] = {}
    versions: dict[str, int] = {}

    def record(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs[name], versions[name] = output, _version(output)

    with ExitStack() as hooks:
        for name in names:
            hooks.callback(modules[name].register_forward_hook(partial(record, name)).remove)
        yield outputs
    overwritten = [
        Problem(name, "its output was overwritten in place", "an unchanged output")
        for name, output in outputs.items()
        if _version(output) != versions[name]
    ]
    if overwritten:
        remedy = "name the submodule that overwrites it, or use inplace=False there"
        raise ConfigurationError(where, overwritten, remedy=remedy)


def _version(output: Any) -> int:
    """Return torch's count of writes to a tensor; 0 in inference mode, where torch does not count."""
    return output._version if isinstance(output, Tensor) and not output.is_inference() else 0
