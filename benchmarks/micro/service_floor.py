"""The cost of the service itself: a call that does nothing, and a queued sample of one token beyond its compute.

Both over one kept connection from another process. The sample's compute is the time that its worker was busy with it,
by the worker's own account; everything else (HTTP, queue, wire, scheduling, flush) is the service's. The engine alone
takes the same prompts in turns with the service, to check that account by: a difference of two processes' times would
be lost in a machine that has quick and slow seconds."""

from __future__ import annotations

import statistics
import sys

from benchmarks.lib.contender import Contender
from benchmarks.lib.harness import HERE, MODEL, Result, command, repeats
from benchmarks.lib.model import chat_ids
from benchmarks.lib.service import BEAT_SECONDS, busy, service
from benchmarks.lib.workload import questions

CALLS = 200
SAMPLES = 40


def main() -> None:
    times = repeats(__doc__)
    result = Result("service_floor", "The service's own time", command())
    calls, whole, compute, alone = [], [], [], []
    every = questions(SAMPLES * (times + 1))
    rounds = [every[i : i + SAMPLES] for i in range(0, len(every), SAMPLES)]  # a prompt seen before is cached
    engine = Contender("engine", [sys.executable, str(HERE / "lib" / "contender_engine.py")])
    client = Contender("client", [sys.executable, str(HERE / "lib" / "contender_client.py")])
    with service(heartbeat_seconds=BEAT_SECONDS) as bench:
        for texts in rounds:
            looking = {"url": f"{bench.url}/api/v1/jobs", "key": bench.key, "calls": [None] * CALLS}
            calls.append(1000 * statistics.median(client.run(**looking)["seconds"]))
            before, _ = busy(bench)
            queued, single = [], []
            for text, prompt in zip(texts, chat_ids(texts), strict=True):
                single.append(engine.run(prompts=[prompt], adapters=0, tokens=1)["seconds"])
                asked = {"target": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
                queued += client.run(url=f"{bench.url}/api/v1/sample", key=bench.key, calls=[asked])["seconds"]
            after, _ = busy(bench)
            whole.append(1000 * statistics.fmean(queued))
            compute.append(1000 * (after - before) / SAMPLES)
            alone.append(1000 * statistics.fmean(single))
    for contender in (engine, client):
        contender.close()
    call = result.add("a call that does nothing", calls[1:], "ms", f"median of {CALLS}, per repeat")
    mean = f"mean of {SAMPLES}, per repeat"
    result.add("a sample of one token on an idle engine", whole[1:], "ms", mean)
    result.add("its compute, as the worker tells", compute[1:], "ms", mean)
    result.add("the engine alone for the same, in turns", alone[1:], "ms", mean)
    beyond = [one - of_it for one, of_it in zip(whole[1:], compute[1:], strict=True)]
    more = result.add("the sample beyond its compute", beyond, "ms")
    result.judge("a no-op API call < 5 ms", f"{call.median:.2f} ms", call.median < 5)
    result.judge("a queued sample of one token < 10 ms beyond its compute", f"{more.median:.2f} ms", more.median < 10)
    result.save()


if __name__ == "__main__":
    main()
