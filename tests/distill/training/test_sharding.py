"""Weights that processes share out: which ones, and what is done to them. Here one process has all shards."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.utils import clip_grad_norm_

from isthmus.distill.training.checkpoint import pack, restore
from isthmus.distill.training.sharding import (
    average_gradients,
    clip_gradients,
    is_sharded,
    local,
    shard,
    sharded_like,
    whole,
)

CPU = torch.device("cpu")


class Layered(nn.Module):
    """A model whose first and last weights are the same, with a list of lists, a scalar and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(2)])
        self.norm, self.scale = nn.BatchNorm1d(6), nn.Parameter(torch.tensor(2.0))

    def forward(self, numbers: Tensor) -> Tensor:
        hidden = self.first(numbers)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        result: Tensor = self.last(self.norm(hidden)) * self.scale
        return result


class Tied(nn.Module):
    """Its two blocks have the same weights, and a third one has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, numbers: Tensor) -> Tensor:
        return self.blocks(numbers)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def sharded_modules(module: nn.Module) -> set[str]:
    return {name for name, part in module.named_modules() if type(part).__name__.startswith("FSDP")}


def test_layers_are_sharded_one_by_one_and_the_rest_together() -> None:
    plain, module = made(Layered), shard(made(Layered), CPU)
    assert sharded_modules(module) == {"", "layers.0", "layers.1"}
    assert is_sharded(module)
    assert not is_sharded(plain)
    assert local(module.scale) is module.scale  # type: ignore[arg-type]
    assert module.first.weight is module.last.weight  # type: ignore[union-attr]
    numbers = torch.randn(5, 6)
    torch.testing.assert_close(module(numbers), plain(numbers))
    assert sharded_modules(shard(made(Tied), CPU)) == {"", "blocks.2"}
    assert sharded_modules(shard(nn.Linear(2, 2), CPU)) == {""}


def test_gradients_are_clipped_as_torch_does_it() -> None:
    plain, module = made(Layered), shard(made(Layered), CPU)
    numbers = torch.randn(5, 6)
    for each in (plain, module):
        each(numbers).square().sum().backward()
    average_gradients(module.parameters(), 1)
    norm = clip_grad_norm_(plain.parameters(), 0.5)
    torch.testing.assert_close(clip_gradients(module.parameters(), 0.5), norm)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(local(ours.grad), theirs.grad)


def test_a_checkpoint_has_whole_tensors_and_goes_into_shards_or_not() -> None:
    plain, module = made(Layered), shard(made(Layered), CPU)
    groups = [[w for w in module.parameters() if (local(w) is w) is kind] for kind in (False, True)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.1)
    module(torch.randn(5, 6)).square().sum().backward()
    optimizer.step()
    best = module.state_dict()
    tensors = pack(module, optimizer, best)
    assert not any(hasattr(tensor, "device_mesh") for tensor in tensors.values())
    assert pack(module, optimizer, best, keep=False) == {}
    other = shard(made(Layered), CPU)
    groups = [[w for w in other.parameters() if (local(w) is w) is kind] for kind in (False, True)]
    resumed = torch.optim.AdamW([{"params": group} for group in groups], lr=0.1)
    found = restore(tensors, other, resumed)
    for name, value in whole(best).items():
        torch.testing.assert_close(whole(other.state_dict())[name], value, rtol=0, atol=0)
        torch.testing.assert_close(whole(found)[name], value, rtol=0, atol=0)
    again = pack(other, resumed, found)
    assert all(torch.equal(again[name], value) for name, value in tensors.items())
    plain.load_state_dict(whole(module.state_dict()))
    assert sharded_like(plain.first.weight, plain.last.weight) is plain.first.weight  # type: ignore[union-attr, arg-type]
