import pytest
import torch
from torch import Tensor, nn

from isthmus.features.errors import ConfigurationError
from isthmus.losses import Perceptual
from tests.distill.losses.support import gradient_is_right, seeded


def test_the_gradient_is_that_of_finite_differences() -> None:
    perceptual = Perceptual(network().double(), ["0", "2"])
    assert gradient_is_right(lambda x: perceptual(x, seeded(1, 2, 4, 4)), 1, 2, 4, 4)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 1, 2))
    return layers.eval().requires_grad_(False)


def test_the_perceptual_loss_is_the_distance_of_the_named_layers() -> None:
    frozen = network()
    student, teacher = torch.randn(2, 2, 5, 5, requires_grad=True), torch.randn(2, 2, 5, 5, requires_grad=True)
    expected = 0.0
    for depth in (1, 3):
        gap = (frozen[:depth](student) - frozen[:depth](teacher)).flatten().tolist()
        expected += sum(x**2 for x in gap) / len(gap)
    loss = Perceptual(frozen, ["0", "2"])(student, teacher)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert student.grad is not None
    assert teacher.grad is None


def test_a_teacher_s_images_that_were_kept_in_half_precision_are_seen_in_full() -> None:
    student, teacher = torch.rand(2, 2, 8, 8), torch.rand(2, 2, 8, 8).half()
    loss = Perceptual(network(), ["0"])
    assert loss(student, teacher).item() == pytest.approx(loss(student, teacher.float()).item())


def test_the_network_stays_as_it_was_and_its_caller_s() -> None:
    frozen = network()
    before = {name: tensor.clone() for name, tensor in frozen.state_dict().items()}
    loss = Perceptual(frozen, ["0"]).train()
    loss(torch.randn(1, 2, 5, 5, requires_grad=True), torch.randn(1, 2, 5, 5)).backward()
    with pytest.raises(ConfigurationError):
        loss(torch.randn(1, 2, 5, 5), torch.randn(1, 2, 5, 4))
    with pytest.raises(RuntimeError):
        loss(torch.randn(1, 3, 5, 5), torch.randn(1, 3, 5, 5))
    assert all(not module._forward_hooks for module in frozen.modules())
    assert not frozen.training
    assert all(parameter.grad is None for parameter in frozen.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen.state_dict().items())
    assert not loss.state_dict()
    assert not list(loss.parameters())


def test_a_network_that_is_not_frozen_and_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)training mode.*6 of its parameters.*requires_grad_\(False\)"):
        Perceptual(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 1, 2)), ["0"])
    with pytest.raises(ConfigurationError, match=r"5: no submodule has this name; expected one of .*0, 1, 2, 3"):
        Perceptual(network(), ["5"])
    with pytest.raises(ConfigurationError, match="layers: none"):
        Perceptual(network(), [])


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Conv2d(2, 1, 1), nn.Conv2d(2, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        result: Tensor = self.used(image)
        return result


def test_a_layer_whose_output_is_overwritten_is_refused_and_the_one_that_overwrites_it_is_not() -> None:
    frozen = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True)).eval().requires_grad_(False)
    student, teacher = torch.randn(1, 2, 5, 5), torch.randn(1, 2, 5, 5)
    with pytest.raises(ConfigurationError, match="0: its output was overwritten in place"):
        Perceptual(frozen, ["0"])(student, teacher)
    expected = (frozen(student) - frozen(teacher)).square().mean().item()
    assert Perceptual(frozen, ["1"])(student, teacher).item() == pytest.approx(expected)
    with torch.inference_mode():
        assert Perceptual(frozen, ["1"])(student, teacher).item() == pytest.approx(expected)


def test_a_layer_that_the_network_does_not_reach_is_refused() -> None:
    loss = Perceptual(Skipping().eval().requires_grad_(False), ["unused"])
    with pytest.raises(ConfigurationError, match="layers of the network: unused: is not called; expected a tensor"):
        loss(torch.randn(1, 2, 2, 2), torch.randn(1, 2, 2, 2))
