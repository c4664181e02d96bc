"""Weights that several processes share out with torch's FSDP2, for students and teachers that exceed one device."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, distributed, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from isthmus.distill.training.processes import Processes


def shard(module: nn.Module, device: torch.device) -> nn.Module:
    """Divide the weights of a module, those of rank 0, among all processes in place, and return the module.

    A process holds all weights of a block only during its forward and its backward pass. Blocks are the elements of the
    outermost ModuleLists or, without any, of the outermost Sequentials. All other weights form one more block. Scalars
    are not divided.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.contiguous()  # FSDP2 takes no other memory layout
        distributed.broadcast(tensor.data, 0)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    scalars = {weights for weights in module.parameters() if not weights.ndim}
    for weights in scalars:
        weights.data = weights.data.to(device)
    for block in (*_blocks(module), module):
        # Otherwise the whole module, unlike its blocks, would show its gathered weights after each forward pass.
        fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)
    return module


def _blocks(module: nn.Module) -> list[nn.Module]:
    uses = _uses(module)
    for kind in (nn.ModuleList, nn.Sequential):
        lists = {f"{name}." * bool(name): part for name, part in module.named_modules() if isinstance(part, kind)}
        outermost = [part for name, part in lists.items() if not any(name != n and name.startswith(n) for n in lists)]
        found = [block for part in outermost for block in part.children() if [*block.parameters()]]
        if found:  # weights that a block shares with another one stay with the whole module
            return [block for block in found if all(uses[name] == n for name, n in _uses(block).items())]
    return []


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(id(weights) for _, weights in module.named_parameters(remove_duplicate=False))


def is_sharded(module: nn.Module) -> bool:
    return any(map(_is_sharded, module.parameters()))


def _is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    return hasattr(tensor, "device_mesh")  # importing DTensor takes a second


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or a tensor that is not sharded."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def whole(tensors: Mapping[str, Tensor], *, keep: bool = True) -> dict[str, Tensor]:
    """Gather sharded tensors on the CPU. All processes must call it; those without `keep` get nothing."""
    found = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if _is_sharded(tensor) else tensor
        if keep:
            found[name] = full.cpu().contiguous()
    return found


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of a whole tensor, sharded as `like` is; `tensor` itself if `like` is not sharded."""
    if not _is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def average_gradients(parameters: Iterable[nn.Parameter], processes: int) -> None:
    """Average the gradients of the weights that are not sharded, which FSDP2 leaves alone, over the processes."""
    for weights in parameters:
        if not _is_sharded(weights):
            gradient = torch.zeros_like(weights) if weights.grad is None else weights.grad
            distributed.all_reduce(gradient)
            weights.grad = gradient.div_(processes) if weights.grad is not None or gradient.any() else None


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients, some of them sharded, so that their norm does not exceed `limit`, and return the norm before."""
    gradients = [weights.grad for weights in parameters if weights.grad is not None]
    squares = [torch.zeros((), device=local(gradients[0]).device) for _ in range(2)]
    for gradient in gradients:
        squares[_is_sharded(gradient)] += local(gradient).square().sum()
    distributed.all_reduce(squares[True])
    norm = (squares[False] + squares[True]).sqrt()
    for gradient in gradients:
        local(gradient).mul_((limit / (norm + 1e-6)).clamp(max=1))
    return norm


class Lockstep:
    """Runs a sharded module in all processes at the same time, since each holds weights that the others need.

    Each call waits until all processes call the module. A process without rows of its own calls `follow`.
    """

    def __init__(self, module: nn.Module, processes: "Processes") -> None:
        self._processes, self._follows = processes, False
        module.register_forward_pre_hook(self._meet, prepend=True)

    def _meet(self, *_: Any) -> None:
        follows, self._follows = self._follows, False
        if not follows:
            self._processes.meet({"calls": "1"})

    def follow(self, call: Callable[[], Any]) -> None:
        """Make `call`, whose outputs nobody needs, whenever another process calls the module, until all follow."""
        while any(self._processes.meet()):
            self._follows = True
            call()
