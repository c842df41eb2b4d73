"""Advantages of one group, and how a step's token losses are weighed against each other.

An advantage says how much better an episode did than its group. The weight of a token is the algorithm's normalisation;
it multiplies the token's loss term, so losses stay pure sums. It has two factors: :func:`token_weights`, known as soon
as the trajectory is, and :func:`step_scale`, known when the step's last group is. Sources:

* ``grpo``: DeepSeekMath (arXiv 2402.03300): (r − mean) / std; token mean per episode, then mean over episodes.
* ``dr_grpo``: Understanding R1-Zero-like training (arXiv 2503.20783): r − mean; every token weighs the same constant,
  one over (episodes × the longest that an episode may be), so that long replies are not favoured.
* ``rloo``: Back to basics (arXiv 2402.14740): r − mean of the others; sum over tokens, mean over episodes.
* ``mean``: LlamaRL (arXiv 2505.24034): r − mean; mean over all tokens of the step.

The sources' outputs are episodes here. A chat template may cut an episode into several trajectories; they are parts of
one output, so the cuts change no token's weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

STD_FLOOR = 1e-6
"""Added to a group's standard deviation (GRPO): a group that is nearly constant must not explode."""

REWARD_ROUNDING = 1e-12
"""Rewards whose relative difference is smaller are equal: the same terms, summed in another order."""


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _standardised(rewards: Sequence[float]) -> list[float]:
    centred = _centred(rewards)
    deviation = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (deviation + STD_FLOOR) for value in centred]


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    scale = len(rewards) / (len(rewards) - 1)
    return [value * scale for value in _centred(rewards)]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "grpo": _standardised,
    "dr_grpo": _centred,
    "rloo": _leave_one_out,
    "mean": _centred,
}


def has_variance(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ by more than rounding."""
    return max(rewards) - min(rewards) > REWARD_ROUNDING * max(abs(reward) for reward in rewards)


def advantages(name: str, rewards: Sequence[float]) -> list[float]:
    """One advantage per reward of a group (at least two, all finite; raises ValueError otherwise). Equal rewards give
    exact zeros: the group carries no gradient."""
    if len(rewards) < 2 or not all(math.isfinite(reward) for reward in rewards):
        raise ValueError("a group has at least two rewards, all finite")
    if not has_variance(rewards):
        return [0.0] * len(rewards)
    return ADVANTAGES[name](rewards)


def token_weights(name: str, lengths: Sequence[int], longest: int) -> list[float]:
    """Weight of every sampled token of each episode, up to what :func:`step_scale` says of the whole step: it depends
    on the episode alone, so a step can be differentiated part by part. ``lengths`` counts the tokens that the policy
    sampled in an episode, over all its trajectories; ``longest`` is the most that there may be. Episodes without tokens
    weigh 0."""
    if name == "grpo":
        return [1.0 / length if length else 0.0 for length in lengths]
    if name == "dr_grpo":
        return [1.0 / longest if length else 0.0 for length in lengths]
    if name in ("rloo", "mean"):
        return [1.0 if length else 0.0 for length in lengths]
    raise ValueError(f"no algorithm {name!r}; known: {', '.join(ADVANTAGES)}")


def step_scale(name: str, lengths: Sequence[int]) -> float:
    """Factor of all token weights of a step: one over its episodes, or (``mean``) over its tokens. ``lengths`` are
    those of all its episodes."""
    return 1.0 / max(1, sum(lengths) if name == "mean" else len(lengths))
