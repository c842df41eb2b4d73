"""One step of AdamW, as PyTorch's optimizer takes it."""

from __future__ import annotations

import pytest
import torch
from tests.test_imports import loaded_by

from rookery import protocol
from rookery.worker.trainer.optim import apply_adamw


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.0, 0.95)])
def test_steps_have_the_bits_of_pytorchs_optimizer(decay: float, beta1: float, beta2: float) -> None:
    adam = protocol.Adam(lr=0.05, beta1=beta1, beta2=beta2, weight_decay=decay)
    weight = torch.randn(1000)
    wanted, first, second = weight.clone(), torch.zeros(1000), torch.zeros(1000)
    optimizer = torch.optim.AdamW(
        [wanted], lr=adam.lr, betas=(beta1, beta2), eps=adam.eps, weight_decay=decay, fused=True
    )
    for step in range(4):
        gradient = torch.randn(1000)
        before, wanted.grad = gradient.clone(), gradient
        optimizer.step()
        apply_adamw(adam, step, (weight, gradient, first, second))
        state = optimizer.state[wanted]
        assert torch.equal(weight, wanted) and torch.equal(gradient, before)
        assert torch.equal(first, state["exp_avg"]) and torch.equal(second, state["exp_avg_sq"])


def test_a_step_imports_no_compiler() -> None:
    """Importing it would take longer than the rest of a worker's first step."""
    loaded = loaded_by(
        "import torch\nfrom rookery import protocol\nfrom rookery.worker.trainer.optim import apply_adamw\n"
        "apply_adamw(protocol.Adam(lr=0.1), 0, tuple(torch.ones(3) for _ in range(4)))"
    )
    assert not loaded & {"torch._dynamo", "torch._inductor", "sympy"}
