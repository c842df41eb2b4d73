"""Losses of the Tinker API through the wire, against float64: values and gradients, sums that are sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import peft
import pytest
import tinker
import torch
import transformers
from tests.support.tinkered import PATIENCE, client, datum, logprobs, trainer
from tinker import types

from rookery.server.launcher import EmbeddedService

GRADIENT_TOLERANCE = 0.02
"""Relative, of a gradient's norm: the base model's activations are bfloat16 (8 bits of mantissa)."""

Loss = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def training(service: EmbeddedService, root: Path) -> Iterator[tinker.TrainingClient]:
    with client(service) as visitor:
        yield trainer(visitor)


STILL = types.AdamParams(learning_rate=0.0)
"""A step that moves nothing, but tells the gradient's norm."""

TEXTS = [[10, 20, 30, 40, 50, 60], [70, 80, 90, 15, 25, 35, 45, 55], [5, 6, 7, 8]]


def norm(training: tinker.TrainingClient) -> float:
    metrics = training.optim_step(STILL).result(PATIENCE).metrics
    assert metrics is not None and metrics["skipped"] == 0
    return metrics["grad_norm"]


def inputs(seed: int) -> list[dict[str, list[float]]]:
    """Sampler's log-probs around the model's own (about log 1/261), so that ratios fall on both sides of the clip."""
    draw = np.random.default_rng(seed)
    found = []
    for text in TEXTS:
        count = len(text) - 1
        found.append({
            "logprobs": (draw.normal(-math.log(261), 0.4, count)).tolist(),
            "advantages": draw.normal(0.0, 1.0, count).tolist(),
        })  # fmt: skip
    return found


def ppo(logp: torch.Tensor, q: torch.Tensor, a: torch.Tensor, low: float = 0.8, high: float = 1.2) -> torch.Tensor:
    ratio = (logp - q).exp()
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()


def gspo(logp: torch.Tensor, q: torch.Tensor, a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mean = ((logp.detach() - q) * mask).sum() / mask.sum()
    ratio = (mean + logp - logp.detach()).exp()
    return -(torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)).sum()


LOSSES: dict[str, tuple[Loss, dict[str, float]]] = {
    "importance_sampling": (lambda logp, q, a: -((logp - q).exp() * a).sum(), {}),
    "ppo": (ppo, {}),
    "ppo narrow": (
        lambda logp, q, a: ppo(logp, q, a, 0.95, 1.05),
        {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05},
    ),
    "cispo": (lambda logp, q, a: -((logp - q).exp().detach().clamp(0.8, 1.2) * logp * a).sum(), {}),
    "dro": (lambda logp, q, a: -(logp * a - 0.3 / 2 * (logp - q).square()).sum(), {"beta": 0.3}),
    "gspo": (gspo, {}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula_in_value_and_gradient(training: tinker.TrainingClient, name: str) -> None:
    formula, config = LOSSES[name]
    masks = [[0.0, *[1.0] * (len(text) - 2)] for text in TEXTS]
    data, given = [], inputs(3)
    for text, values, mask in zip(TEXTS, given, masks, strict=True):
        more: dict[str, Any] = {}
        if name == "gspo":
            values["advantages"][0] = 0.0
            more["sequence_ratio_mask"] = mask
        data.append(datum(text, **values, **more))
    output = training.forward_backward(data, name.split()[0], config).result(PATIENCE)  # type: ignore[arg-type]
    mine = norm(training)
    total, weighted = 0.0, []
    for text, logp, values, mask in zip(TEXTS, logprobs(output), given, masks, strict=True):
        leaf = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
        parts = [torch.tensor(values[key], dtype=torch.float64) for key in ("logprobs", "advantages")]
        if name == "gspo":
            parts.append(torch.tensor(mask, dtype=torch.float64))
        value = formula(leaf, *parts)
        value.backward()
        total += float(value.detach())
        assert leaf.grad is not None
        weighted.append(datum(text, (-leaf.grad).tolist()))
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4, abs=1e-4)
    only = training.forward(data, name.split()[0], config).result(PATIENCE)  # type: ignore[arg-type]
    assert only.metrics["loss:sum"] == pytest.approx(total, rel=1e-3, abs=1e-3)
    training.forward_backward(weighted, "cross_entropy").result(PATIENCE)
    assert mine == pytest.approx(norm(training), rel=1e-3)


def test_the_gradient_of_cross_entropy_is_that_of_float64(
    training: tinker.TrainingClient, service: EmbeddedService, root: Path, tmp_path: Path
) -> None:
    rest = tinker.RestClient(base_url=f"{service.url}/tinker", api_key=service.key)
    saved = training.save_weights_external("reference").result(PATIENCE)
    urls = rest.get_external_weights_urls(saved.path).result(PATIENCE).urls
    assert saved.path == f"tinker://{training.model_id}/external_weights/reference"
    for version, kinds in (("0.22.3", {"training", "sampler"}), ("0.38.0", {"training", "sampler", "external"})):
        headers = {"X-API-Key": service.key, "X-Stainless-Package-Version": version}
        for path in ("checkpoints", f"training_runs/{training.model_id}/checkpoints"):
            listed = (
                httpx.get(f"{service.url}/tinker/api/v1/{path}", headers=headers, timeout=60).raise_for_status().json()
            )
            (found,) = [row for row in listed["checkpoints"] if row["tinker_path"] == saved.path]
            assert found["checkpoint_type"] in kinds and ("external" in kinds) == (
                found["checkpoint_type"] == "external"
            )
    for name, url in urls.items():
        (tmp_path / name).write_bytes(httpx.get(url, timeout=60).raise_for_status().content)
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "small", dtype=torch.float64)
    exact = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True, autocast_adapter_dtype=False).double()
    weights = [[1.0, 0.5, 0.0, 2.0, -1.0], [1.0] * 7, [0.25] * 3]
    total = torch.zeros((), dtype=torch.float64)
    scored = []
    for text, row in zip(TEXTS, weights, strict=True):
        logits = exact(torch.tensor([text[:-1]])).logits[0].log_softmax(-1)
        logp = logits.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
        scored.append(logp.detach().numpy())
        total = total - (logp * torch.tensor(row, dtype=torch.float64)).sum()
    total.backward()
    reference = math.sqrt(sum(float(p.grad.square().sum()) for p in exact.parameters() if p.grad is not None))
    data = [datum(text, row) for text, row in zip(TEXTS, weights, strict=True)]
    output = training.forward_backward(data, "cross_entropy").result(PATIENCE)
    assert output.metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=0.01)
    for mine, theirs in zip(logprobs(output), scored, strict=True):
        assert np.abs(mine - theirs).max() < 0.05  # bfloat16
    assert norm(training) == pytest.approx(reference, rel=GRADIENT_TOLERANCE)


def test_losses_are_sums_and_gradients_add_up(training: tinker.TrainingClient) -> None:
    data = [datum(text, [1.0] * (len(text) - 1)) for text in TEXTS]
    once = training.forward_backward(data, "cross_entropy").result(PATIENCE).metrics["loss:sum"]
    one = norm(training)
    heavy = [datum(text, [2.0] * (len(text) - 1)) for text in TEXTS]
    twice = training.forward_backward(heavy, "cross_entropy").result(PATIENCE).metrics["loss:sum"]
    assert twice == pytest.approx(2 * once, rel=1e-5)
    assert norm(training) == pytest.approx(2 * one, rel=1e-3)
    training.forward_backward(data * 4, "cross_entropy").result(PATIENCE)
    assert norm(training) == pytest.approx(4 * one, rel=1e-3)
    for _ in range(3):
        training.forward_backward(data, "cross_entropy").result(PATIENCE)
    training.forward(data, "cross_entropy").result(PATIENCE)  # adds nothing
    assert norm(training) == pytest.approx(3 * one, rel=1e-3)
    assert norm(training) == 0.0


def test_soft_targets_dense_and_sparse(training: tinker.TrainingClient) -> None:
    tokens, width = TEXTS[0], 4
    targets = np.array([[token, 0, 99, 100] for token in tokens[1:]], np.int64)
    shares = np.array([[0.5, 0.0, 0.25, 0.0]] * 5, np.float32)
    shares[1] = [0.0, 0.7, 0.0, 0.0]  # the target with id 0, which a sparse tensor does not list

    def soft(sparse: bool) -> types.Datum:
        made = types.TensorData.from_torch_sparse if sparse else types.TensorData.from_torch
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": made(torch.tensor(targets * (shares > 0) if sparse else targets)),
                "weights": made(torch.tensor(shares)),
            },
        )

    dense = training.forward_backward([soft(False)], "cross_entropy").result(PATIENCE)
    [scored] = logprobs(dense)
    assert scored.shape == (5, width)
    assert dense.metrics["loss:sum"] == pytest.approx(-(scored * shares).sum(), rel=1e-4)
    one = norm(training)
    mixed = training.forward_backward([soft(True), datum(TEXTS[1], [0.0] * 7)], "cross_entropy").result(PATIENCE)
    assert mixed.metrics["loss:sum"] == pytest.approx(dense.metrics["loss:sum"], rel=1e-4)
    np.testing.assert_allclose(logprobs(mixed)[0] * (shares > 0), scored * (shares > 0), atol=1e-3)
    assert logprobs(mixed)[1].shape == (7,)
    assert norm(training) == pytest.approx(one, rel=1e-3)


def test_custom_losses_in_two_passes(training: tinker.TrainingClient) -> None:
    data = [datum(text) for text in TEXTS]

    def squares(data: list[types.Datum], logps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = torch.cat(logps).square().sum()
        return loss, {"squares:sum": float(loss.detach())}

    output = training.forward_backward_custom(data, squares).result(PATIENCE)
    flat = np.concatenate(logprobs(output))
    assert output.metrics["loss:sum"] == pytest.approx(float((flat**2).sum()), rel=1e-3)
    assert output.metrics["squares:sum"] == output.metrics["loss:sum"]
    mine = norm(training)
    same = [datum(text, (-2 * logp).tolist()) for text, logp in zip(TEXTS, logprobs(output), strict=True)]
    training.forward_backward(same, "cross_entropy").result(PATIENCE)
    assert norm(training) == pytest.approx(mine, rel=1e-3)


@pytest.mark.parametrize(
    ("loss", "config", "given", "said"),
    [
        ("stable_reinforce", None, {}, "use importance_sampling, ppo, cispo or gspo"),
        ("ppo", {"beta": 1.0}, {"logprobs": [0.0] * 5, "advantages": [0.0] * 5}, "no such parameter"),
        ("ppo", None, {"logprobs": [0.0] * 5}, "needs loss_fn_inputs advantages"),
        ("cross_entropy", None, {"advantages": [0.0] * 5}, "takes no loss_fn_inputs advantages"),
        ("cross_entropy", None, {"weights": [0.0] * 4}, "weights have shape [4]"),
    ],
)
def test_unsupported_loss_is_refused_and_the_model_continues(
    training: tinker.TrainingClient, loss: str, config: Any, given: dict[str, list[float]], said: str
) -> None:
    weights = given.pop("weights", None)
    wrong = training.forward_backward([datum(TEXTS[0], weights, **given)], loss, config)  # type: ignore[arg-type]
    step = training.optim_step(STILL)
    with pytest.raises(tinker.RequestFailedError, match=said.replace("[", r"\[").replace("]", r"\]")):
        wrong.result(PATIENCE)
    with pytest.raises(tinker.RequestFailedError, match="no step was taken"):
        step.result(PATIENCE)
    good = [datum(TEXTS[0], [1.0] * 5)]
    assert training.forward_backward(good, "cross_entropy").result(PATIENCE).metrics["loss:sum"] > 0
    assert norm(training) > 0
