"""The whole flow of a Tinker client, as a program: what it got is printed as JSON. It uses what every supported version
of the SDK has; ``test_tinker_sdks.py`` runs it with the oldest and the newest.

    python sdk_flow.py URL KEY MODEL
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import urllib.request
from typing import Any

import tinker
import torch
from tinker import types

PATIENCE = 120.0
TEXT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]


def datum(tokens: list[int], **more: list[float]) -> types.Datum:
    """Each token but the last predicts the next one."""
    count = len(tokens) - 1
    inputs = {"target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[count])}
    inputs |= {name: types.TensorData(data=row, dtype="float32", shape=[count]) for name, row in more.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def logprobs(output: Any) -> list[float]:
    return [value for found in output.loss_fn_outputs for value in found["logprobs"].data]


def main(url: str, key: str, model: str) -> dict[str, Any]:
    got: dict[str, Any] = {}
    service = tinker.ServiceClient(base_url=url, api_key=key)
    got["models"] = model in [found.model_name for found in service.get_server_capabilities().supported_models]
    training = service.create_lora_training_client(model, rank=4, seed=1)
    got["rank"] = training.get_info().lora_rank
    got["decoded"] = training.get_tokenizer().decode(TEXT)
    weights = [1.0] * 11
    adam = types.AdamParams(learning_rate=0.02)

    losses = []
    for _ in range(3):
        first = training.forward_backward([datum(TEXT, weights=weights)], "cross_entropy")
        second = training.forward_backward([datum(TEXT[:5], weights=[0.5] * 4)], "cross_entropy")
        step = training.optim_step(adam)
        losses += [future.result(PATIENCE).metrics["loss:sum"] for future in (first, second)]
        step.result(PATIENCE)
    got["losses"] = losses
    old = [-5.0] * 11
    for loss in ("importance_sampling", "ppo"):
        output = training.forward_backward([datum(TEXT, logprobs=old, advantages=weights)], loss).result(PATIENCE)
        got[loss] = output.metrics["loss:sum"]
    got["forward"] = logprobs(training.forward([datum(TEXT)], "cross_entropy").result(PATIENCE))

    def squares(data: list[Any], found: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.cat(found).square().sum(), {}

    training.optim_step(types.AdamParams(learning_rate=0.0)).result(PATIENCE)
    custom = training.forward_backward_custom([datum(TEXT)], squares).result(PATIENCE)
    got["custom"] = [logprobs(custom), training.optim_step(adam).result(PATIENCE).metrics["grad_norm"]]
    many = [datum([1 + at % 200, 2, 3], weights=[1.0, 1.0]) for at in range(1100)]  # more than one request
    output = training.forward_backward(many, "cross_entropy").result(PATIENCE)
    got["many"] = [len(output.loss_fn_outputs), output.metrics["loss:sum"]]
    training.optim_step(types.AdamParams(learning_rate=0.0)).result(PATIENCE)

    sampler = training.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(TEXT[:4])
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=7, stop=[])
    answer = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result(PATIENCE)
    got["texts"] = [sequence.tokens for sequence in answer.sequences]
    got["text logprobs"] = [sequence.logprobs for sequence in answer.sequences]
    got["prompt logprobs"] = sampler.compute_logprobs(prompt).result(PATIENCE)[1:]

    state = training.save_state("state").result(PATIENCE).path
    named = training.save_weights_for_sampler("named").result(PATIENCE).path
    again = service.create_sampling_client(model_path=named)
    answer = again.sample(prompt=prompt, num_samples=2, sampling_params=params).result(PATIENCE)
    got["named texts"] = [sequence.tokens for sequence in answer.sequences] == got["texts"]
    resumed = service.create_training_client_from_state(state)
    got["resumed"] = logprobs(resumed.forward([datum(TEXT)], "cross_entropy").result(PATIENCE))
    training.load_state(state).result(PATIENCE)
    got["loaded"] = logprobs(training.forward([datum(TEXT)], "cross_entropy").result(PATIENCE))

    rest = service.create_rest_client()
    run = state.removeprefix("tinker://").split("/")[0]
    listed = rest.list_checkpoints(run).result(PATIENCE).checkpoints
    got["listed"] = sorted(found.checkpoint_id for found in listed)
    get_archive_url = getattr(rest, "get_checkpoint_archive_url_from_tinker_path", None)  # of older SDKs
    got["archive"] = get_archive_url is None or archived(get_archive_url(named).result(PATIENCE).url)
    rest.delete_checkpoint_from_tinker_path(named).result(PATIENCE)
    got["left"] = [found.checkpoint_id for found in rest.list_checkpoints(run).result(PATIENCE).checkpoints]
    try:
        training.forward_backward([datum(TEXT, weights=weights)], "no_such_loss").result(PATIENCE)  # type: ignore[arg-type]
    except tinker.RequestFailedError as error:
        got["refused"] = "no_such_loss" in str(error)
    return got


def archived(url: str) -> bool:
    """Whether there is a PEFT folder's tar at ``url``."""
    with urllib.request.urlopen(url) as reply, tarfile.open(fileobj=io.BytesIO(reply.read())) as tar:
        return tar.getnames() == ["adapter_config.json", "adapter_model.safetensors"]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
    os._exit(0)  # the SDK's threads would go on
