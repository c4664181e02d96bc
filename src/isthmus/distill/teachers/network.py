"""Teachers that are torch modules."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.teachers.taps import tapped
from isthmus.distill.teachers.teacher import Teacher, by_key
from isthmus.features.errors import Problem


class NetworkTeacher(Teacher):
    """A teacher that is a torch module.

    Creating the teacher freezes the module: it is switched to eval mode, and no parameter requires a gradient. A batch
    that is a mapping becomes keyword arguments, a tuple positional arguments, anything else the only argument. Tensors
    are moved to the module's device. The module returns a mapping of outputs, a tuple with an output per key, or a
    single output. Autocast around it has no effect.

    Args:
        module: module to freeze and to call.
        keys: outputs to use.
        taps: further outputs by key, each the output of the submodule with this name.
        labels: class names in the order of the module's logits; None if unknown.
        version: text that changes the fingerprint; change it when outputs change in a way that the fingerprint misses.
        name: name for messages; by default the class name.

    Raises:
        ConfigurationError: keys or labels are not valid (see `Teacher`), or no submodule has the name of a tap.
    """

    shareable = True

    def __init__(
        self,
        module: nn.Module,
        keys: Sequence[str] = ("logits",),
        *,
        taps: Mapping[str, str] | None = None,
        labels: Sequence[str] | None = None,
        version: str = "",
        name: str | None = None,
    ) -> None:
        self.taps = dict(taps or {})
        own = [key for key in keys if key not in self.taps]
        super().__init__(name or type(module).__name__, [*own, *self.taps], labels=labels, version=version)
        with tapped(module, list(self.taps.values())):  # raises on unknown names
            self.module = module.eval()
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        self._own, self._written = own, self._state()

    def replace(self, module: nn.Module) -> None:
        """Call a copy of the module, such as one whose weights are sharded."""
        self.module = module
        self._written = self._state()

    @property
    def device(self) -> torch.device:
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def _thawed(self) -> tuple[list[Problem], str]:
        problems = []
        training = [name or "the whole" for name, part in self.module.named_modules() if part.training]
        learning = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        if training:
            found = f"is in training mode ({len(training)} modules in total)"
            problems.append(Problem(training[0], found, "evaluation mode"))
        if learning:
            problems.append(
                Problem(learning[0], f"requires a gradient ({len(learning)} parameters in total)", "no gradient")
            )
        if problems:
            return problems, "call module.eval().requires_grad_(False), and do not train the teacher"
        if self._state() != self._written:
            problems.append(Problem("weights", "were changed after the teacher was created", "unchanged weights"))
        return problems, "create a new teacher from the module"

    def _answer(self, batch: Any) -> Mapping[str, Any]:
        batch = moved(batch, self.device)
        with torch.autocast(self.device.type, enabled=False), tapped(self.module, list(self.taps.values())) as seen:
            outputs = self._outputs(batch)
        return {**outputs, **{key: seen[name] for key, name in self.taps.items() if name in seen}}

    def _outputs(self, batch: Any) -> Mapping[str, Any]:
        outputs = self._call(batch)
        # With taps only, the module may return anything.
        return by_key(outputs, self._own, self.where) if self._own else {}

    def _call(self, batch: Any, **more: Any) -> Any:
        if isinstance(batch, Mapping):
            return self.module(**batch, **more)
        return self.module(*batch, **more) if isinstance(batch, tuple) else self.module(batch, **more)

    @property
    def runtime(self) -> str:
        return f"torch {torch.__version__}"

    def _identity(self) -> Any:
        return ["network", fingerprint(self.module, versioned=bool(self.version)), self.taps]

    def _weights(self) -> Iterator[Tensor]:
        yield from self.module.parameters()

    def _state(self) -> list[Any]:
        """Return a value that changes when a parameter is written to, unless it was created in inference mode."""
        return [(p.dtype, None if p.is_inference() else p._version) for p in self.module.parameters()]


def moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, tuple):
        return tuple(moved(item, device) for item in batch)
    return {key: moved(item, device) for key, item in batch.items()} if isinstance(batch, Mapping) else batch
