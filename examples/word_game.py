"""A word game for two, learned by self-play against a frozen earlier version of the same policy.

A word lies on the table. In turn the players take one, two or three letters from its end; whoever takes the last letter
wins. A reply that is no such move takes one letter and costs a little. ``player`` trains against ``rival``, its own
earlier version, which is replaced by a newer one every few steps; in held-out games the rival is the untrained version,
so that their curve has one yardstick. Who leaves a multiple of four wins, and every game is set up so that a perfect
player wins it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from random import Random
from typing import Any

import rookery
from rookery.client import Client, Job
from rookery.examples import learning
from rookery.examples.learning import Learned, Replier
from rookery.examples.words import KINDS, THINGS, assistant, system, user

MOVES = ("1", "2", "3")
CYCLE = 4
"""A player who leaves a multiple of it wins: it completes each move of the other to as many letters."""
SHORTEST, LONGEST = 4, 7
EACH = 8
"""Held-out words of each length."""
HELD_OUT = EACH * (LONGEST - SHORTEST + 1)
MAX_TOKENS = 1
WRONG = 0.2
"""Cost of a reply that is no move. Losing the game for it instead would let any legal move beat an untrained rival."""
SWAP_STEPS = 4
STEPS = 32


class WordGame(rookery.Environment):
    """``player`` against ``rival``; ``player`` begins unless that loses against a perfect rival."""

    deterministic = True

    def prompts(self, split: str) -> Iterable[dict[str, Any]]:
        known = sorted({*THINGS, *(word for kind in KINDS.values() for word in kind)})
        by_length = [[word for word in known if len(word) == length] for length in range(SHORTEST, LONGEST + 1)]
        for words in by_length:
            Random("word game").shuffle(words)
        if split == "eval":
            return [{"word": word} for words in by_length for word in words[:EACH]]
        most = max(map(len, by_length)) - EACH
        rows = [words[EACH:] * most for words in by_length]  # each length equally often
        return [{"word": words[number]} for number in range(most) for words in rows]

    def reset(self, prompt: Any, seed: int) -> rookery.Step:
        self.word = str(prompt["word"])
        self.turn = "player" if len(self.word) % CYCLE else "rival"
        self.good: list[float] = []
        self.legal: list[float] = []
        opened = [system("Take 1, 2 or 3 letters."), user("tree 4"), assistant("1")]
        return rookery.Step(messages=[*opened, self.table()], policy=self.turn)

    def step(self, reply: rookery.Reply) -> rookery.Step:
        move = reply.text.strip()
        legal = move in MOVES and int(move) <= len(self.word)
        taken = int(move) if legal else 1
        mover, other = self.turn, "rival" if self.turn == "player" else "player"
        if mover == "player":
            self.good.append(float((len(self.word) - taken) % CYCLE == 0))
            self.legal.append(float(legal))
        self.word = self.word[: len(self.word) - taken]
        if self.word:
            self.turn = other
            return rookery.Step(messages=[self.table()], policy=other)
        won = float(mover == "player")
        wrong = self.legal.count(0.0)
        means = {"good moves": statistics.fmean(self.good), "legal": statistics.fmean(self.legal)}
        return rookery.Step(done=True, rewards={"player": won - WRONG * wrong}, metrics={"won": won, **means})

    def table(self) -> dict[str, str]:
        return user(f"{self.word} {len(self.word)}")


def letters_left(messages: Sequence[dict[str, str]]) -> int:
    return int(messages[-1]["content"].split(" ")[1])


def perfect(messages: Sequence[dict[str, str]], turn: int) -> str:
    """Leaves a multiple of four where it can."""
    return str(letters_left(messages) % CYCLE or 1)


def constant(move: str, number: int = 0) -> Replier:
    """The same move in every game, or all letters where there are fewer."""
    return lambda messages, turn: str(min(int(move), letters_left(messages)))


def always(move: str, number: int = 0) -> Replier:
    """The same reply in every game."""
    return lambda messages, turn: move


def best_constant(client: Client, jobs: dict[str, Job]) -> dict[str, Any]:
    """The reply that earns most in the held-out games against the base model, whose replies are those of the untrained
    version; and the same for rules that take all letters where fewer are left, which no constant reply does."""
    environment = WordGame()
    prompts = list(environment.prompts("eval"))

    rival = learning.sampled(client, learning.MODEL, MAX_TOKENS)
    found: dict[str, Any] = {}
    for name, kind in (("constant", always), ("constant or all letters", constant)):
        earned = {}
        for move in MOVES:
            games = learning.play_all(environment, prompts, {"player": partial(kind, move), "rival": rival})
            earned[move] = round(statistics.fmean(game.rewards["player"] for game in games), 4)
        best = max(earned, key=earned.__getitem__)
        found |= {f"best {name}": [best, earned[best]], f"each {name}": earned}
    return found


def job(steps: int, swap: int) -> dict[str, Any]:
    """The job's fields except name and environment."""
    return {
        "policies": {
            "player": {"rank": 16, "optimizer": {"lr": 5.0e-4}},
            "rival": {"train": False, "follows": {"policy": "player", "every": swap}},
        },
        "algorithm": {"name": "grpo", "group_size": 8, "groups_per_step": 5, "max_staleness": 1},
        "sampling": {"temperature": 1.0, "max_tokens": MAX_TOKENS},
        "evaluation": {"prompts": HELD_OUT, "every": max(1, steps // 2)},
        "stop": {"steps": steps},
    }


def report(folder: Any, run: Learned, facts: dict[str, Any]) -> bool:
    """Print and write everything; returns whether the player learned and is above the best constant."""
    _, level = facts["best constant"]
    line = learning.verdict(run, "player", level)
    print(line)
    first, last = run.of("player")
    for name in ("won", "good moves", "legal"):
        facts[f"{name}, first and last version"] = [round(p.metrics[name], 4) for p in (first, last)]
    for title, value in facts.items():
        print(f"{title}: {value}")
    levels = {"best constant": level, "perfect player": 1.0}
    if (rule := facts.get("best constant or all letters")) is not None:
        levels |= {"constant or all letters": rule[1]}
    learning.write_curves(
        folder, "Self-play, measured against the untrained version", run, levels, "reward in held-out games"
    )
    learning.write(folder, "word-game", "python examples/word_game.py", {"word-game": run}, facts)
    return line.endswith(": learned")


def main() -> int:
    parser = learning.options(__doc__, STEPS, "the player")
    parser.add_argument("--swap", type=int, default=SWAP_STEPS, help="steps between replacements of the rival")
    given = parser.parse_args()
    jobs: learning.Jobs = {"word-game": (WordGame(), job(given.steps, given.swap))}
    return learning.learn(
        "word-game", given.folder, jobs, lambda folder, runs, facts: report(folder, runs["word-game"], facts),
        best_constant,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
