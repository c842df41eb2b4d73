"""Training: Rookery's trainer against PEFT + transformers and against the floor, and four tenants packed against one.

A step is forward, backward and AdamW on rank 16, loss on every token. Contenders take turns within one run, each
with an uncounted step of 8 x 128 first: training goes on step after step, and does not find caches and threads as
another process left them. PEFT gets the micro-batch that is fastest for it among the whole batch, 4, 2 and 1, as the
turn that warms up finds."""

from __future__ import annotations

import sys

from contender import Contender, ContenderFailed
from harness import HERE, Result, Row, command, ratio, repeats
from model import number_type, start_peer

WARM = (8, 128)
SHAPES = {"8 x 128": (8, 128), "8 x 512": (8, 512)}
LEAST = {"8 x 128": (2.2, 0.55), "8 x 512": (4.0, 0.45)}
TENANTS = 4
PACKED_LEAST = 0.95


def main() -> None:
    times = repeats(__doc__)
    result = Result(
        "training", f"Training, rank 16 on every linear layer, {number_type()}, loss on every token", command()
    )
    ours = Contender("trainer", [sys.executable, str(HERE / "contender_trainer.py")])
    result.versions.update({"trainer threads": str(ours.about["threads"])})
    peer: Contender | None = None
    try:
        peer = start_peer("peft", "trl", "peft_training.py")
        result.versions.update({name: peer.about[name] for name in ("peft", "transformers")})
    except ContenderFailed as error:
        result.notes.append(f"PEFT + transformers did not run: {error}")
    for name, (count, length) in SHAPES.items():
        _shape(result, ours, peer, name, count, length, times)
    alone, packed = [], []
    for _ in range(times):
        for speeds, shapes in ((alone, [[128] * 8]), (packed, [[128] * 2] * TENANTS)):
            ours.run(shapes=shapes)
            answer = ours.run(shapes=shapes)
            speeds.append(answer["tokens"] / answer["seconds"])
    solo = result.add("8 x 128, one tenant (paired with the next)", alone, "tokens/s")
    together = result.add(f"{TENANTS} tenants with 2 x 128 each, packed", packed, "tokens/s")
    share = ratio(together, solo)
    result.judge(f"{TENANTS} tenants packed >= {PACKED_LEAST:.0%} of one", f"{share:.0%}", share >= PACKED_LEAST)
    ours.close()
    if peer is not None:
        peer.close()
    result.save()


def _shape(
    result: Result, ours: Contender, peer: Contender | None, name: str, count: int, length: int, times: int
) -> None:
    speeds: dict[str, list[float]] = {}
    micro_batches: tuple[int, ...] = (count, 4, 2, 1)
    for turn in range(times + 1):  # the first warms up
        ours.run(shapes=[[WARM[1]] * WARM[0]])
        answer = ours.run(shapes=[[length] * count])
        floor = ours.run(what="floor", tokens=count * length)["seconds"]
        if turn:
            speeds.setdefault("Rookery", []).append(answer["tokens"] / answer["seconds"])
            speeds.setdefault("floor", []).append(answer["tokens"] / floor)
        if peer is None:
            continue
        peer.run(sequences=WARM[0], length=WARM[1], micro_batch=micro_batches[-1])
        theirs = {size: peer.run(sequences=count, length=length, micro_batch=size)["seconds"] for size in micro_batches}
        if not turn:
            micro_batches = (min(theirs, key=lambda size: theirs[size]),)
            continue
        for size, seconds in theirs.items():
            speeds.setdefault(f"PEFT, micro-batch {size}", []).append(count * length / seconds)
    rows: dict[str, Row] = {who: result.add(f"{name}, {who}", values, "tokens/s") for who, values in speeds.items()}
    least_ratio, least_share = LEAST[name]
    share = ratio(rows["Rookery"], rows["floor"])
    result.judge(f"{name} >= {least_share:.0%} of the floor", f"{share:.0%}", share >= least_share)
    rivals = [row for who, row in rows.items() if who.startswith("PEFT")]
    target = f"{name} >= {least_ratio} x PEFT + transformers at its best"
    if rivals:
        times_faster = ratio(rows["Rookery"], max(rivals, key=lambda row: row.median))
        result.judge(target, f"{times_faster:.2f} x", times_faster >= least_ratio)
    else:
        result.judge(target, "-", None, "the peer did not run")


if __name__ == "__main__":
    main()
