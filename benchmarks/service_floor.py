"""What the service itself costs: a call that does nothing, and a queued sample of one token beyond its compute.

Both over one kept connection from another process. The sample's compute is what the engine alone takes for the same
prompt and one token; everything else (HTTP, queue, wire, scheduling, flush) is the service's."""

from __future__ import annotations

import statistics
import sys
import time

import httpx
from contender import Contender
from harness import HERE, MODEL, Result, command, repeats
from model import chat_ids
from service import service
from workload import questions

CALLS = 200
SAMPLES = 40


def main() -> None:
    times = repeats(__doc__)
    result = Result("service_floor", "The service's own time", command())
    calls, whole, compute = [], [], []
    every = questions(SAMPLES * (times + 1))
    rounds = [every[i : i + SAMPLES] for i in range(0, len(every), SAMPLES)]  # a prompt seen before is cached
    engine = Contender("engine", [sys.executable, str(HERE / "contender_engine.py")])
    for texts in rounds:
        single = [engine.run(prompts=[prompt], adapters=0, tokens=1)["seconds"] for prompt in chat_ids(texts)]
        compute.append(1000 * statistics.median(single))
    engine.close()
    with service() as bench, httpx.Client(headers={"Authorization": f"Bearer {bench.key}"}) as http:
        for texts in rounds:
            spent = []
            for _ in range(CALLS):
                began = time.perf_counter()
                http.get(f"{bench.url}/api/v1/jobs").raise_for_status()
                spent.append(time.perf_counter() - began)
            calls.append(1000 * statistics.median(spent))
            spent = []
            for text in texts:
                question = {"target": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
                began = time.perf_counter()
                http.post(f"{bench.url}/api/v1/sample", json=question).raise_for_status()
                spent.append(time.perf_counter() - began)
            whole.append(1000 * statistics.median(spent))
    call = result.add("a call that does nothing", calls[1:], "ms", f"median of {CALLS}, per repeat")
    sample = result.add("a sample of one token on an idle engine", whole[1:], "ms", f"median of {SAMPLES}, per repeat")
    alone = result.add("the engine alone for it", compute[1:], "ms")
    result.judge("a no-op API call < 5 ms", f"{call.median:.2f} ms", call.median < 5)
    beyond = sample.median - alone.median
    result.judge("a queued sample of one token < 10 ms beyond its compute", f"{beyond:.2f} ms", beyond < 10)
    result.save()


if __name__ == "__main__":
    main()
