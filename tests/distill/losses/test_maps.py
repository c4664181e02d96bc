import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from isthmus.features.errors import ConfigurationError
from isthmus.losses import FeatureMaps, Perceptual, attention_transfer
from tests.distill.losses.support import EXTREME, Array, finite, gradient_is_right, numbers, seeded


@st.composite
def maps(draw: st.DrawFn) -> tuple[Array, Array]:
    batch, height, width = (draw(st.integers(1, 3)) for _ in range(3))
    return draw(numbers(batch, 2, height, width)), draw(numbers(batch, 3, height, width))


def attention(image: Array) -> list[float]:
    channels, height, width = image.shape
    sums = [sum(image[c, y, x] ** 2 for c in range(channels)) for y in range(height) for x in range(width)]
    norm = max(math.sqrt(sum(value**2 for value in sums)), 1e-12)
    return [value / norm for value in sums]


@given(maps())
def test_attention_transfer_is_the_formula(data: tuple[Array, Array]) -> None:
    student, teacher = data
    found = [
        sum((x - y) ** 2 for x, y in zip(attention(a), attention(b), strict=True))
        for a, b in zip(student, teacher, strict=True)
    ]
    loss = attention_transfer(torch.from_numpy(student), torch.from_numpy(teacher))
    assert loss.item() == pytest.approx(sum(found) / len(found), rel=1e-9, abs=1e-12)


@given(maps(), st.sampled_from([("l1", 1), ("l2", 2)]))
def test_feature_maps_are_the_formula(data: tuple[Array, Array], norm: tuple[str, int]) -> None:
    student, teacher = data
    name, power = norm
    loss = FeatureMaps(2, 3, norm=name).double()  # type: ignore[arg-type]
    (weight,) = (parameter.detach().numpy()[:, :, 0, 0] for parameter in loss.parameters())
    found = []
    for image, wanted in zip(student, teacher, strict=True):
        for (channel, y, x), value in [((c, y, x), wanted[c, y, x]) for c, y, x in _places(wanted)]:
            mixed = sum(weight[channel, c] * image[c, y, x] for c in range(2))
            found.append(abs(mixed - value) ** power)
    value = loss(torch.from_numpy(student), torch.from_numpy(teacher))
    assert value.item() == pytest.approx(sum(found) / len(found), rel=1e-9, abs=1e-12)


def _places(image: Array) -> list[tuple[int, int, int]]:
    channels, height, width = image.shape
    return [(c, y, x) for c in range(channels) for y in range(height) for x in range(width)]


def test_the_gradients_are_those_of_finite_differences() -> None:
    loss = FeatureMaps(2, 3).double()
    assert gradient_is_right(lambda x: loss(x, seeded(2, 3, 2, 2)), 2, 2, 2, 2)
    assert gradient_is_right(lambda x: attention_transfer(x, seeded(2, 3, 2, 2)), 2, 2, 2, 2)
    perceptual = Perceptual(network().double(), ["0", "2"])
    assert gradient_is_right(lambda x: perceptual(x, seeded(1, 2, 4, 4)), 1, 2, 4, 4)


@pytest.mark.parametrize("size", [EXTREME, 0.0])
def test_extreme_maps_and_zeros_stay_finite(size: float) -> None:
    student, teacher = torch.full((1, 2, 2, 2), size), torch.full((1, 3, 2, 2), -size)
    assert finite(lambda x: attention_transfer(x, teacher), student)
    assert finite(lambda x: FeatureMaps(2, 3)(x, teacher), student)


def test_channels_that_agree_need_no_convolution() -> None:
    assert not list(FeatureMaps(3, 3).parameters())
    same = seeded(1, 3, 2, 2)
    assert FeatureMaps(3, 3)(same, same + 2).item() == pytest.approx(4)


def test_maps_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="teacher: height 3; expected 2, as in student"):
        attention_transfer(seeded(1, 2, 2, 2), seeded(1, 2, 3, 2))
    with pytest.raises(
        ConfigurationError, match=r"student: shape \(1, 2, 2, 2\); expected \(batch, 4, height, width\)"
    ):
        FeatureMaps(4, 2)(seeded(1, 2, 2, 2), seeded(1, 2, 2, 2))
    with pytest.raises(ConfigurationError, match="norm: 'l3'"):
        FeatureMaps(4, 2, norm="l3")  # type: ignore[arg-type]


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
