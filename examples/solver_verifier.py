"""A solver and a verifier in one job: the verifier approves or rejects an answer, and a rejected one may be replaced.

The solver picks the number word out of two words. Its first pick passes a noisy channel, which replaces it with the
other word in half of the questions. The verifier says what arrived, a number or a thing: a number approves it, and
after any other reply the solver picks once more, without the channel. The verifier earns 1 for a right decision. The
solver earns half for a right first pick and half for a right final answer. Held-out questions have words that no
training question has.

Without the channel a verifier has nothing to learn from a good solver: it comes to approve everything, and is right.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import rookery
from rookery.examples import learning
from rookery.examples.learning import Learned
from rookery.examples.words import KINDS, assistant, system, user

TRAINING, HELD_OUT = 512, 48
HELD_OUT_WORDS = 4
"""Of each kind, words that only held-out questions have."""
KIND = "number"
FIRST = 0.5
"""Share of the solver's reward for its first pick. With the final answer alone, a verifier that rejects everything
would leave the first pick without a reward."""
WRONG = 0.25
"""Cost of a reply of the solver that is neither word. The first word is then taken in its place, so that the verifier
learns from every episode."""
STEPS = 20

APPROVE, REJECT = KIND, "thing"
"""Every reply other than the first one rejects. The untrained model tells numbers from things a little by these words,
and not at all by yes and no."""


def questions(split: str) -> list[dict[str, Any]]:
    """Two words, of which one is a number. In every second question the channel is noisy: a step has as many of these
    as of the others, so that neither decision of the verifier is better for all."""
    draw = Random(f"solver and verifier: {split}")
    others = [kind for kind in KINDS if kind != KIND]
    found = []
    for number in range(HELD_OUT if split == "eval" else TRAINING):
        words = [draw.choice(part(KIND, split)), draw.choice(part(draw.choice(others), split))]
        shown = draw.sample(words, len(words))
        found.append({"words": shown, "answer": words[0], "noisy": number % 2 == 1})
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
        self.cost = 0.0
        self.decided: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        opened = [
            system(f"Pick the {KIND}."),
            user("zero, oak"), assistant("oak"), user("oak is a"), assistant(REJECT),
            user("hen, one"), assistant("one"), user("one is a"), assistant(APPROVE),
        ]  # fmt: skip
        return rookery.Step(messages=[*opened, user(", ".join(prompt["words"]))], policy="solver")

    def step(self, reply: rookery.Reply) -> rookery.Step:
        if reply.turn == 0:
            self.pick = self.picked(reply)
            self.metrics["first right"] = float(self.pick == self.prompt["answer"])
            if self.prompt["noisy"]:
                (self.pick,) = {*self.prompt["words"]} - {self.pick}
            self.metrics["arrived right"] = float(self.pick == self.prompt["answer"])
            return rookery.Step(messages=[user(f"{self.pick} is a")], policy="verifier")
        if reply.turn == 1:
            approved = first_word(reply) == APPROVE
            right = approved == bool(self.metrics["arrived right"])
            self.decided = {"verifier": float(right)}
            self.metrics |= {"decided right": float(right), "rejected": float(not approved)}
            if not approved:
                return rookery.Step(messages=[user(", ".join(self.prompt["words"]))], policy="solver")
        else:
            self.pick = self.picked(reply)
        self.metrics["right"] = float(self.pick == self.prompt["answer"])
        earned = FIRST * self.metrics["first right"] + (1 - FIRST) * self.metrics["right"] - self.cost
        return rookery.Step(done=True, rewards={"solver": earned, **self.decided}, metrics=self.metrics)

    def picked(self, reply: rookery.Reply) -> str:
        """The word of the question that the reply begins with; for another reply the first word, at a cost."""
        words: list[str] = self.prompt["words"]
        word = first_word(reply)
        if word not in words:
            self.cost += WRONG
        return word if word in words else words[0]


def first_word(reply: rookery.Reply) -> str:
    return reply.text.split()[0].strip(".,").lower() if reply.text.split() else ""


def best_constants(run: Learned) -> dict[str, float]:
    """The solver's best fixed pick on the held-out questions, a word or always the first of the two, and the verifier's
    best fixed decision on what arrived of the last version."""
    asked = [result["prompt"] for result in run.held_out["solver"]]

    def earned(word: str) -> float:
        """Of one word as every reply, with the cost of one wrong reply at most."""
        rewards = [
            float(word == one["answer"]) if word in one["words"] else (one["words"][0] == one["answer"]) - WRONG
            for one in asked
        ]
        return sum(rewards) / len(asked)

    first_place = sum(one["words"][0] == one["answer"] for one in asked) / len(asked)
    solver = max(first_place, 1 - first_place, *(earned(word) for one in asked for word in one["words"]))
    first = [result["metrics"]["arrived right"] for result in run.held_out["verifier"] if not result["error"]]
    share = sum(first) / len(first)
    return {"solver": solver, "verifier": max(share, 1 - share)}


def job(steps: int) -> dict[str, Any]:
    """The job's fields except name and environment."""
    return {
        "policies": {
            "solver": {"rank": 8, "optimizer": {"lr": 3.0e-4}},
            "verifier": {"rank": 8, "seed": 1, "optimizer": {"lr": 3.0e-4}, "sampling": {"max_tokens": 2}},
        },
        "algorithm": {"name": "grpo", "group_size": 8, "groups_per_step": 8, "max_staleness": 1},
        "sampling": {"temperature": 1.0, "max_tokens": 4},
        "shuffle": False,
        "evaluation": {"prompts": HELD_OUT, "every": max(1, steps // 2)},
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
