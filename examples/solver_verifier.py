"""A solver and a verifier in one job: the verifier approves or rejects an answer, and a rejected one may be replaced.

The solver picks the word of a kind out of two, the verifier judges the pick, and after a rejection the solver picks
once more. The verifier earns 1 for a right decision. The solver earns half for a right first and half for a right final
answer: with the final one alone, a verifier that rejects everything would leave the first without a reward. Held-out
questions have words that no training question has.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import rookery
from rookery.examples import learning
from rookery.examples.learning import Learned
from rookery.examples.words import KINDS, assistant, system, user

TRAINING, HELD_OUT = 480, 40
HELD_OUT_WORDS = 4
"""Of each kind, words that only held-out questions have."""
CHOICES = 2
FIRST = 0.5
"""Share of the solver's reward for its first answer."""
STEPS = 30
WARMUP_STEPS = 12
"""Steps over which the verifier's learning rate rises. At full speed from the start it learns to reject everything
while the solver is mostly wrong, and samples nothing else by the time the solver is right."""

EXAMPLES = (user("drink: tea, chair"), assistant("tea"), user("tree: six, oak"), assistant("oak"))
APPROVE, REJECT = "yes", "no"


def questions(split: str) -> list[dict[str, Any]]:
    """Words of different kinds, the kind that is asked for, and its word."""
    draw = Random(f"solver and verifier: {split}")
    names = list(KINDS)
    found = []
    for _ in range(HELD_OUT if split == "eval" else TRAINING):
        kinds = draw.sample(names, CHOICES)
        words = [draw.choice(part(kind, split)) for kind in kinds]
        order = draw.sample(range(CHOICES), CHOICES)
        found.append({"kind": kinds[0], "words": [words[place] for place in order], "answer": words[0]})
    return found


def part(kind: str, split: str) -> Sequence[str]:
    words = KINDS[kind]
    return words[:HELD_OUT_WORDS] if split == "eval" else words[HELD_OUT_WORDS:]


class SolverVerifier(rookery.Environment):
    """Solver, verifier, and after a rejection the solver once more."""

    deterministic = True

    def prompts(self, split: str) -> Iterable[dict[str, Any]]:
        return questions(split)

    def reset(self, prompt: Any, seed: int) -> rookery.Step:
        self.proposal = ""
        self.decided: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        opened = [
            system("Pick one."),
            user("drink: tea, chair"),
            assistant("tea"),
            user("tree: six, oak"),
            assistant("oak"),
        ]
        asked = f"{prompt['kind']}: {', '.join(prompt['words'])}"
        return rookery.Step(messages=[*opened, user(asked)], policy="solver")

    def step(self, reply: rookery.Reply) -> rookery.Step:
        text = reply.text.strip().strip(".").lower()
        right = text == self.prompt["answer"]
        if reply.turn == 0:
            self.proposal = text
            self.metrics["first right"] = float(right)
            asked = f"{text or 'nothing'}: {self.prompt['kind']}? {APPROVE} or {REJECT}"
            return rookery.Step(messages=[user(asked)], policy="verifier")
        if reply.turn == 1:
            was_right = self.proposal == self.prompt["answer"]
            self.decided = {"verifier": float(text == (APPROVE if was_right else REJECT))}
            self.metrics |= {"decided right": self.decided["verifier"], "rejected": float(text == REJECT)}
            if text == REJECT:
                return rookery.Step(messages=[user("Wrong, another one.")], policy="solver")
            right = was_right
        return rookery.Step(
            done=True,
            rewards={"solver": FIRST * self.metrics["first right"] + (1 - FIRST) * right, **self.decided},
            metrics={**self.metrics, "right": float(right)},
        )


def best_constants(run: Learned) -> dict[str, float]:
    """The solver's best fixed pick on the held-out questions, and the verifier's best fixed decision on the proposals
    of the last version."""
    answers = Counter(result["prompt"]["answer"] for result in run.held_out["solver"])
    first = [result["metrics"]["first right"] for result in run.held_out["verifier"] if not result["error"]]
    share = sum(first) / len(first)
    return {"solver": max(answers.values()) / answers.total(), "verifier": max(share, 1 - share)}


def job(steps: int) -> dict[str, Any]:
    """The job's fields except name and environment."""
    slowly = {"lr": 3.0e-4, "schedule": {"name": "warmup", "warmup_steps": WARMUP_STEPS}}
    return {
        "policies": {
            "solver": {"rank": 8, "optimizer": {"lr": 5.0e-4}},
            "verifier": {"rank": 8, "seed": 1, "optimizer": slowly, "sampling": {"max_tokens": 2}},
        },
        "algorithm": {"name": "grpo", "group_size": 8, "groups_per_step": 6, "max_staleness": 1},
        "sampling": {"temperature": 1.0, "max_tokens": 4},
        "evaluation": {"prompts": HELD_OUT, "every": max(1, steps // 3)},
        "stop": {"steps": steps},
    }


def report(folder: Any, run: Learned) -> bool:
    """Print and write everything; returns whether both policies learned and are above their best constants."""
    constants = best_constants(run)
    passed = True
    for name, constant in constants.items():
        line = learning.verdict(run, name, constant)
        passed &= line.endswith(": learned")
        print(line)
    metrics = run.curves["solver"][-1].metrics
    facts = {
        **{f"best constant, {name}": round(value, 4) for name, value in constants.items()},
        "first answers right, last version": round(metrics["first right"], 4),
        "final answers right, last version": round(metrics["right"], 4),
        "rejected, last version": round(metrics["rejected"], 4),
    }
    for title, value in facts.items():
        print(f"{title}: {value}")
    levels = {f"constant {name}": value for name, value in constants.items()}
    learning.write_curves(folder, "A solver and its verifier", run, levels)
    learning.write(folder, "solver-verifier", "python examples/solver_verifier.py", {"solver-verifier": run}, facts)
    return passed


def main() -> int:
    given = learning.options(__doc__, STEPS, "each policy").parse_args()
    jobs: learning.Jobs = {"solver-verifier": (SolverVerifier(), job(given.steps))}
    return learning.learn(
        "solver-verifier", given.folder, jobs, lambda folder, runs, _: report(folder, runs["solver-verifier"])
    )


if __name__ == "__main__":
    sys.exit(main())
