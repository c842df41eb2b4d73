"""Generation: Rookery's engine against vLLM's CPU build, with the same adapters and without any, and against the floor.

All contenders are loaded at once and take turns, so that every ratio is within one run; a turn begins with a few tokens
that do not count, since the others have had caches and memory to themselves meanwhile. Time is from the first prompt's
submission to the last token. Every text has its full length. vLLM runs with its engine in the caller's process: with
one of its own, as by default, it was slower on two cores at 64 sequences (524 tokens/s where this way gave 803 without
adapters, 66 where it gave 92 with them). Without adapters it runs compiled, as by default, and eager: what is expected
is measured at its better one. With adapters its CPU build does not compile. Its manual asks for Intel's OpenMP runtime,
which it brings: with it, it is a sixth faster at 8 sequences. Rookery gains little by it."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from benchmarks.lib import bars
from benchmarks.lib.contender import Contender, ContenderFailed
from benchmarks.lib.harness import HERE, WORK, Result, command, options
from benchmarks.lib.model import adapters, attempt, chat_ids, number_type, published, start_peer
from benchmarks.lib.workload import questions

from rookery.cluster.base import PRELOAD

NEW_TOKENS = 64
COUNTS = (1, 8, 64)
QUICK_COUNTS = (64,)
PEERS = {
    "vLLM, 4 adapters": ("eager", 4), "vLLM, no adapters": ("eager", 0), "vLLM, no adapters, compiled": ("compiled", 0),
}  # fmt: skip
"""How each runs, and with how many adapters."""
QUICK_PEERS = ("vLLM, 4 adapters", "vLLM, no adapters, compiled")
"""The better way of each."""
WITHIN = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
OPENMP = WORK / "vllm" / "lib" / "libiomp5.so"
"""As vLLM's packages bring it."""
WARM_UP_PROMPTS, WARM_UP_TOKENS = 8, 4
"""Of what is not counted: the first turn, and the begin of every turn, which takes a few prompts."""


def main() -> None:
    given = options(__doc__, "64 sequences only, and only the contenders that are judged").parse_args()
    counts = QUICK_COUNTS if given.quick else COUNTS
    peer_names = QUICK_PEERS if given.quick else tuple(PEERS)
    own_ways = (4, 0)
    result = Result("generation", f"Generation, rank 16 on every linear layer, {number_type()}", command())
    ours = Contender("engine", [sys.executable, str(HERE / "lib" / "contender_engine.py")])
    result.versions.update({"engine threads": str(ours.about["threads"])})
    peers: dict[str, Contender] = {}
    published()  # before both want it at once
    ways = {name: [PEERS[name][0], *map(str, adapters(PEERS[name][1]))] for name in peer_names}
    with ThreadPoolExecutor() as pool:  # they take half a minute to load
        starting = {name: pool.submit(_vllm, name, how) for name, how in ways.items()}
    for name, started in starting.items():
        try:
            peers[name] = started.result()
            result.versions.update(vllm=peers[name].about["vllm"], **{"vllm's torch": peers[name].about["torch"]})
        except ContenderFailed as error:
            result.notes.append(f"{name} did not run: {error}")
            print(result.notes[-1], flush=True)
    for count in counts:
        speeds: dict[str, list[float]] = {}
        steps: dict[int, list[float]] = {own: [] for own in own_ways}
        floors, own_floors = [], []
        prompts = chat_ids(questions(count))
        for turn in range(given.repeats + 1):
            task = {"prompts": prompts, "tokens": NEW_TOKENS if turn else WARM_UP_TOKENS}
            warm = {"prompts": prompts[:WARM_UP_PROMPTS], "tokens": WARM_UP_TOKENS}
            for own in own_ways:
                ours.run(**warm, adapters=own)
                answer = ours.run(**task, adapters=own)
                if turn:
                    name = f"Rookery, {own or 'no'} adapters"
                    speeds.setdefault(name, []).append(answer["tokens"] / answer["seconds"])
                    steps[own].append(1000 * answer["step_seconds"])
                    if own:
                        floor = ours.run(what="floor", rows=count)
                        floors.append(1000 * floor["seconds"])
                        own_floors.append(1000 * floor["ours"])
            for name in list(peers):
                measured = attempt(result, peers, name, **warm) and attempt(result, peers, name, **task)
                if turn and measured is not None:
                    speeds.setdefault(name, []).append(measured["tokens"] / measured["seconds"])
        for name, values in speeds.items():
            result.add(f"{count} sequences, {name}", values, "tokens/s")
        result.add(f"{count} sequences, Rookery's decode step, 4 adapters", steps[4], "ms")
        result.add(f"{count} sequences, Rookery's decode step, no adapters", steps[0], "ms")
        result.add(f"{count} sequences, the linear layers of a step, by torch's linear", floors, "ms")
        result.add(f"{count} sequences, floor: the same in Rookery's layout of the weights", own_floors, "ms")
    result.judge_rows(bars.generation)
    for contender in (ours, *peers.values()):
        contender.close()
    result.save()


def _vllm(name: str, how: list[str]) -> Contender:
    """In this mode and with these adapters, loaded. Raises :class:`ContenderFailed`."""
    more = {PRELOAD: str(OPENMP)} if OPENMP.exists() else {}
    return start_peer(name, "vllm", "vllm_generation.py", *how, environment=WITHIN | more)


if __name__ == "__main__":
    main()
