"""Clients of a Tinker-compatible service, timed: the same program and SDK for every contender.

python tinker_client.py URL KEY MODEL
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from benchmarks.lib.child import serve
from tinker import types

RANK = 8
DATUMS, LENGTH = 8, 32
"""Of a gradient: little enough that what is timed is the service, not the arithmetic."""
NEW_TOKENS = 16
PATIENCE = 120.0
STILL = types.AdamParams(learning_rate=1e-4)


class Client:
    def __init__(self, url: str, key: str, model: str, seed: int) -> None:
        service = tinker.ServiceClient(base_url=url, api_key=key)
        self.training = service.create_lora_training_client(model, rank=RANK, seed=seed)
        tokens = [[(7 * seed + 3 * row + at) % 200 + 10 for at in range(LENGTH + 1)] for row in range(DATUMS)]
        self.data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={
                    "target_tokens": types.TensorData(data=row[1:], dtype="int64", shape=[LENGTH]),
                    "weights": types.TensorData(data=[1.0] * LENGTH, dtype="float32", shape=[LENGTH]),
                },
            )
            for row in tokens
        ]
        self.prompt = types.ModelInput.from_ints(tokens[0][:LENGTH])
        self.pair()
        self.sampler: Any = self.training.save_weights_and_get_sampling_client()
        self.sample()

    def pair(self) -> None:
        """One forward_backward and the step on it, sent together, as the SDK's own examples do."""
        gradient = self.training.forward_backward(self.data, "cross_entropy")
        step = self.training.optim_step(STILL)
        gradient.result(PATIENCE)
        step.result(PATIENCE)

    def sample(self) -> None:
        params = types.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, seed=1, stop=["\x00never"])
        answer = self.sampler.sample(prompt=self.prompt, num_samples=1, sampling_params=params).result(PATIENCE)
        assert len(answer.sequences) == 1


if __name__ == "__main__":
    logging.getLogger("tinker").setLevel(logging.ERROR)
    url, key, model = sys.argv[1:]
    clients: list[Client] = []

    def timed(count: int, calls: int, call: Callable[[Client], None]) -> list[float]:
        """Seconds of each call, of so many clients that call at once, over and over."""
        begin = threading.Barrier(count)

        def work(client: Client) -> list[float]:
            begin.wait()
            spent = []
            for _ in range(calls):
                began = time.perf_counter()
                call(client)
                spent.append(time.perf_counter() - began)
            return spent

        with ThreadPoolExecutor(count) as pool:
            return [second for spent in pool.map(work, clients[:count]) for second in spent]

    def run(count: int, calls: int) -> dict[str, Any]:
        while len(clients) < count:
            clients.append(Client(url, key, model, len(clients)))
        timed(count, 2, Client.pair)  # whatever is compiled for such batches is compiled now
        timed(count, 2, Client.sample)
        return {"pair": timed(count, calls, Client.pair), "sample": timed(count, calls, Client.sample)}

    serve({"sdk": tinker.__version__}, run)
    sys.stdout.flush()
    os._exit(0)  # the SDK's threads would go on
