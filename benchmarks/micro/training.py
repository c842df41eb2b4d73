"""Training: Rookery's trainer against PEFT + transformers and against the floor, and four tenants packed against one.

A step is forward, backward and AdamW on rank 16, loss on every token. Contenders take turns within one run, each
with an uncounted step of 8 x 128 first: training goes on step after step, and does not find caches and threads as
another process left them. PEFT gets the micro-batch that is fastest for it among the whole batch, 4, 2 and 1, as the
turn that warms up finds."""

from __future__ import annotations

import sys

from benchmarks.lib import bars
from benchmarks.lib.bars import PEFT as PEER
from benchmarks.lib.bars import TENANTS
from benchmarks.lib.contender import Contender, ContenderFailed
from benchmarks.lib.harness import HERE, Result, command, options
from benchmarks.lib.model import attempt, number_type, start_peer

WARM = (8, 128)
SHAPES = {"8 x 128": (8, 128), "8 x 512": (8, 512)}
QUICK_SHAPES = ("8 x 128",)
PACKED_WARM = 3
"""Uncounted steps before each: the trainer is a new one, and the first steps of its optimizers find no memory yet."""
PAIRS = 3
"""Of a packed and an unpacked step, for each repeat: they differ by less than two steps of the same kind may."""


def main() -> None:
    given = options(__doc__, "8 x 128 only, and a third of the packed pairs").parse_args()
    times = given.repeats
    result = Result(
        "training", f"Training, rank 16 on every linear layer, {number_type()}, loss on every token", command()
    )
    ours = Contender("trainer", [sys.executable, str(HERE / "lib" / "contender_trainer.py")])
    result.versions.update({"trainer threads": str(ours.about["threads"])})
    peers: dict[str, Contender] = {}
    try:
        peers[PEER] = start_peer("peft", "trl", "peft_training.py")
        result.versions.update({name: peers[PEER].about[name] for name in ("peft", "transformers")})
    except ContenderFailed as error:
        result.notes.append(f"{PEER} did not run: {error}")
    for name in QUICK_SHAPES if given.quick else SHAPES:
        _shape(result, ours, peers, name, *SHAPES[name], times)
    _packed(result, ours, times if given.quick else PAIRS * times)
    result.judge_rows(bars.training)
    for contender in (ours, *peers.values()):
        contender.close()
    result.save()


def _packed(result: Result, ours: Contender, pairs: int) -> None:
    """Each packed step against the unpacked one beside it, which comes first and last by turns."""
    alone: list[float] = []
    packed: list[float] = []
    for pair in range(pairs):
        both = [(alone, [[128] * 8]), (packed, [[128] * 2] * TENANTS)]
        for speeds, shapes in both if pair % 2 else both[::-1]:
            for _ in range(PACKED_WARM):
                ours.run(shapes=shapes)
            answer = ours.run(shapes=shapes)
            speeds.append(answer["tokens"] / answer["seconds"])
    result.add("8 x 128, one tenant (paired with the next)", alone, "tokens/s")
    result.add(f"{TENANTS} tenants with 2 x 128 each, packed", packed, "tokens/s")


def _shape(
    result: Result, ours: Contender, peers: dict[str, Contender], name: str, count: int, length: int, times: int
) -> None:
    """A peer that fails has no figures of this shape."""
    speeds: dict[str, list[float]] = {}
    rivals: dict[int, list[float]] = {}
    micro_batches: tuple[int, ...] = (count, 4, 2, 1)
    for turn in range(times + 1):  # the first warms up
        ours.run(shapes=[[WARM[1]] * WARM[0]])
        answer = ours.run(shapes=[[length] * count])
        floor = ours.run(what="floor", tokens=count * length)["seconds"]
        if turn:
            speeds.setdefault("Rookery", []).append(answer["tokens"] / answer["seconds"])
            speeds.setdefault("floor", []).append(answer["tokens"] / floor)
        theirs = _peer_seconds(result, peers, count, length, micro_batches)
        if theirs and not turn:
            micro_batches = (min(theirs, key=lambda size: theirs[size]),)
        for size, seconds in theirs.items() if turn else ():
            rivals.setdefault(size, []).append(count * length / seconds)
    if PEER in peers:
        speeds |= {f"PEFT, micro-batch {size}": values for size, values in rivals.items()}
    for who, values in speeds.items():
        result.add(f"{name}, {who}", values, "tokens/s")


def _peer_seconds(
    result: Result, peers: dict[str, Contender], count: int, length: int, micro_batches: tuple[int, ...]
) -> dict[int, float]:
    """By micro-batch, after a step that does not count; empty where the peer did not run."""
    attempt(result, peers, PEER, sequences=WARM[0], length=WARM[1], micro_batch=micro_batches[-1])
    answers = {
        size: attempt(result, peers, PEER, sequences=count, length=length, micro_batch=size) for size in micro_batches
    }
    return {size: answer["seconds"] for size, answer in answers.items() if answer is not None}


if __name__ == "__main__":
    main()
