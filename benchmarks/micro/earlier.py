"""A comparison with an earlier commit: a decode step and an optimizer step.

Both commits' contenders are loaded at once, each from its commit's tree, and take turns, so that a slow minute of the
machine happens to both. The verdict is the median of the turns' ratios. ``python -m benchmarks.micro.earlier [COMMIT]
[--repeats N] [--quick]``; six minutes. The earlier tree is a git worktree below ``.bench``, which stays there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.lib.bars import paired
from benchmarks.lib.contender import Contender
from benchmarks.lib.harness import ROOT, WORK, Result, Row, command, options
from benchmarks.lib.model import chat_ids, number_type
from benchmarks.lib.workload import questions

EARLIER = "690bba3"
"""The last one before the present layout of the packages."""
WITHIN = 0.03
"""By how much the present may be slower."""
REPEATS = 7
ROWS = (8, 64)
QUICK_ROWS = (8,)
ADAPTERS = 4
TOKENS = 48
SHAPE = (8, 128)


class Tree:
    """One commit's code, and its contenders."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self._root = name, root
        self._environment = {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]), "ROOKERY_BENCH": str(WORK)}
        self.engine = self._contender("engine")
        self.trainer = self._contender("trainer")

    def _contender(self, kind: str) -> Contender:
        script = self._root / "benchmarks" / "lib" / f"contender_{kind}.py"
        return Contender(f"{kind} {self.name}", [sys.executable, str(script)], self._environment)

    def decode_ms(self, rows: int) -> float:
        """A decode step of so many rows, after a few tokens that do not count."""
        task = {"prompts": chat_ids(questions(rows)), "adapters": ADAPTERS}
        self.engine.run(**task, tokens=4)
        return 1000 * float(self.engine.run(**task, tokens=TOKENS)["step_seconds"])

    def optimizer_step_ms(self) -> float:
        """One optimizer step, after one that does not count."""
        shapes = [[SHAPE[1]] * SHAPE[0]]
        self.trainer.run(shapes=shapes)
        return 1000 * float(self.trainer.run(shapes=shapes)["seconds"])

    def close(self) -> None:
        self.engine.close()
        self.trainer.close()


def tree_of(commit: str) -> Path:
    """The commit checked out below ``.bench``."""
    folder = WORK / f"tree-{commit}"
    if not folder.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(folder), commit], cwd=ROOT, check=True)
    return folder


def main() -> None:
    parser = options(__doc__, "8 rows only", repeats=REPEATS)
    parser.add_argument("commit", nargs="?", default=EARLIER, help="the earlier commit (default: %(default)s)")
    given = parser.parse_args()
    result = Result("earlier", f"Against {given.commit}, {number_type()}", command())
    trees = [Tree(given.commit, tree_of(given.commit)), Tree("now", ROOT)]
    counts = QUICK_ROWS if given.quick else ROWS
    measures: dict[str, Callable[[Tree], float]] = {
        **{f"decode step, {rows} rows, {ADAPTERS} adapters": partial(Tree.decode_ms, rows=rows) for rows in counts},
        f"optimizer step, {SHAPE[0]} x {SHAPE[1]}": Tree.optimizer_step_ms,
    }
    for what, measure in measures.items():
        values: dict[str, list[float]] = {tree.name: [] for tree in trees}
        for turn in range(given.repeats + 1):  # the first warms up
            for tree in trees[:: 1 if turn % 2 else -1]:
                value = measure(tree)
                if turn:
                    values[tree.name].append(value)
        earlier, now = (result.add(f"{what}: {tree.name}", values[tree.name], "ms") for tree in trees)
        _judge(result, what, earlier, now)
    for tree in trees:
        tree.close()
    result.save()


def _judge(result: Result, what: str, earlier: Row, now: Row) -> None:
    ratio = paired(now, earlier)
    assert ratio is not None  # both rows are there
    why = f"median of {len(now.values)} pairs"
    result.judge(f"{what}: at most {WITHIN:.0%} slower", f"{ratio - 1:+.1%}", ratio - 1 <= WITHIN, why)


if __name__ == "__main__":
    main()
