import pytest
import torch

from isthmus.distill.losses.regression import absolute_errors, squared_errors
from isthmus.features.errors import ConfigurationError


def test_errors_are_those_of_torch_and_teach_the_student_alone() -> None:
    student, wanted = torch.randn(9, requires_grad=True), torch.randn(9, requires_grad=True)
    for ours, theirs in (
        (squared_errors, torch.nn.functional.mse_loss),
        (absolute_errors, torch.nn.functional.l1_loss),
    ):
        loss = ours(student, wanted)
        torch.testing.assert_close(loss, theirs(student, wanted))
        assert torch.autograd.grad(loss, student, retain_graph=True)[0].any()
        loss.backward()  # type: ignore[no-untyped-call]
        assert wanted.grad is None
    assert squared_errors(student.half(), wanted.half()).dtype == torch.float32


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="squared errors: wanted: leading sizes"):
        squared_errors(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ConfigurationError, match=r"absolute errors: wanted: torch\.int64; expected floats"):
        absolute_errors(torch.zeros(3), torch.zeros(3).long())
