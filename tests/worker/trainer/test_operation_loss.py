"""The loss of an operation: the same sum for every trainer."""

from __future__ import annotations

import math

import pytest
import torch

from rookery import protocol
from rookery.algorithms.losses import cross_entropy, dpo, kl_penalty
from rookery.worker.trainer.operation_loss import agreement, compares, operation_loss

PARENT = protocol.AdapterRef(policy="p", version=1, hash="v1", rank=8, alpha=8.0)

LOGP, SAMPLED, REFERENCE = torch.tensor([[-1.0, -2.0, -0.5, -3.0], [-1.5, -2.0, -1.0, -2.0], [-1.2, -0.4, -2.0, -3.5]])
ADVANTAGES, WEIGHTS = torch.tensor([[1.0, 1.0, -1.0, -1.0], [0.5, 0.5, 0.5, 0.5]])
TRAJECTORIES = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "kl_weight", "forward_only", "needed"),
    [
        ("cross_entropy", 0.0, False, False),
        ("cross_entropy", 0.0, True, False),
        ("cross_entropy", 0.25, False, True),
        ("cross_entropy", 0.25, True, False),  # a penalty is of training only
        ("dpo", 0.0, False, True),
        ("dpo", 0.0, True, True),
        ("dpo", 0.25, True, True),
        ("dpo", 0.25, False, True),
    ],
)
def test_the_loss_reads_the_reference_where_it_compares(
    name: str, kl_weight: float, forward_only: bool, needed: bool
) -> None:
    loss = protocol.Loss(name=name, params={"beta": 0.1} if name == "dpo" else {})
    op = protocol.ForwardBackward(
        op="o", policy="p", lease=1, parent=PARENT, steps=0, batch_ticket="", loss=loss, temperature=1.0,
        kl_weight=kl_weight, forward_only=forward_only,
    )  # fmt: skip
    assert compares(op) == needed
    columns = SAMPLED, ADVANTAGES, WEIGHTS, TRAJECTORIES
    found = operation_loss(op, LOGP, *columns, REFERENCE if needed else None)
    if name == "dpo":
        plain = dpo(LOGP, REFERENCE, ADVANTAGES, WEIGHTS, TRAJECTORIES, beta=0.1)
    else:
        plain = cross_entropy(LOGP, *columns)
    expected, metrics = plain.total, plain.metrics
    if kl_weight and not forward_only:
        penalty = kl_penalty(LOGP, REFERENCE, WEIGHTS)
        expected, metrics = expected + kl_weight * penalty.total, metrics | penalty.metrics
    assert torch.equal(found.total, expected)
    against = agreement(LOGP, REFERENCE if name == "dpo" else SAMPLED)
    assert found.metrics == {"loss:sum": float(expected)} | metrics | against


def test_ratio_of_a_token_far_from_its_sampler_is_counted() -> None:
    found = agreement(torch.tensor([-2.0, -1.0]), torch.tensor([-2.0, -101.0]))
    assert found["ratio:sum"] == pytest.approx(1 + math.exp(100.0))
    assert (found["logp_diff:sum"], found["logp_diff:max"], found["tokens"]) == (100.0, 100.0, 2.0)
