"""Checks of a built-in environment's options and rows, in confined processes.

A stranger's pattern can take all memory to compile, and a dataset minutes to parse. Both happen in a child process with
a limit of processor time and of memory, at a low priority, and not in the service, nor in the host that runs every
tenant's built-in environments. The check is the very construction that a host does. The result for a stored dataset is
kept: its path names its content.

:class:`EnvironmentChecks` asks; :mod:`rookery.environments.check_process` is the child, within a
:class:`~rookery.environments.verifiers.pool.VerifierPool`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachetools import LRUCache, TTLCache

from rookery.environments.base import SplitSizes
from rookery.environments.rules import NOTHING_NAMED, EnvironmentRules
from rookery.environments.verifiers.pool import VerifierError, VerifierPool, VerifierTimeout
from rookery.errors import Unavailable, UserError

OPTIONS_SECONDS, OPTIONS_BYTES = 2.0, 32 << 20
"""Processor time and memory for the options alone: patterns that people write compile in milliseconds, and the host
compiles them again."""

ROWS_SECONDS, ROWS_BYTES = 300.0, 1 << 30
"""Processor time and memory for all rows: five million small ones take a minute or two, and inline rows are in
memory."""

KEPT_BYTES = 16 << 20
"""Of the results of checks that are kept: tens of thousands of usual ones, and hundreds of datasets with many forms of
rows."""

SMALL_BYTES = 500
"""Of a result without its texts, with the hash by which it is found."""

REFUSALS, REFUSED_SECONDS = 4096, 60.0
"""Refusals that are kept, and for how long one is: its reason may be a file that is away."""

MEMORY = "MemoryError"


class EnvironmentChecks:
    """Thread-safe; every method blocks."""

    def __init__(self, rules: EnvironmentRules = NOTHING_NAMED) -> None:
        """``rules`` are those under which the environments will run."""
        self._pool = VerifierPool("check", rules.argument(), module="rookery.environments.check_process")
        self._lock = threading.Lock()
        self._fitting: LRUCache[str, SplitSizes | None] = LRUCache(KEPT_BYTES, getsizeof=bytes_of)
        """Hashes of options, with the names of their files, that were found right."""
        self._refused: TTLCache[str, str] = TTLCache(REFUSALS, REFUSED_SECONDS)
        """Why others were refused."""

    def validate(self, id: str, options: Mapping[str, Any]) -> SplitSizes | None:
        """The sizes of a built-in environment's splits. Raises :class:`UserError` for one that cannot be made with
        these options; reads the files that they name. :class:`Unavailable` where the check itself failed."""
        question = json.dumps({"id": id, "options": options}, default=str)
        digest = hashlib.sha256(question.encode("utf-8", "replace")).hexdigest()
        with self._lock:
            if digest in self._fitting:
                return self._fitting[digest]
            if digest in self._refused:
                raise UserError(self._refused[digest])
        try:
            alone = {**options, **_without_rows(options)}
            self._ask("options", OPTIONS_SECONDS, OPTIONS_BYTES, id=id, options=alone)
            found = self._ask("rows", ROWS_SECONDS, ROWS_BYTES, id=id, options=options)
        except UserError as error:
            with self._lock:
                self._refused[digest] = str(error)
            raise
        with self._lock:
            sizes = self._fitting[digest] = SplitSizes(**found) if found is not None else None
        return sizes

    def index(self, id: str, options: Mapping[str, Any]) -> dict[str, array[int]]:
        """The offsets of the rows in each of the files that an environment's options name, by the field. Raises as
        :meth:`validate` does."""
        found = self._ask("index", ROWS_SECONDS, ROWS_BYTES, id=id, options=dict(options))
        return {field: array("Q", base64.b64decode(offsets)) for field, offsets in found.items()}

    def count_rows(self, path: Path, row_bytes: int, rows: int) -> int:
        """Checks a whole JSONL file, of any environment of files, and returns the number of its rows. Raises as
        :meth:`validate` does."""
        limits = {"row_bytes": row_bytes, "rows": rows}
        return int(self._ask("count", ROWS_SECONDS, ROWS_BYTES, options={"path": str(path), **limits}))

    def close(self) -> None:
        """End the children; a check that runs fails."""
        self._pool.close()

    def _ask(self, what: str, seconds: float, memory: int, **question: Any) -> Any:
        try:
            answer = self._pool.score({"what": what, **question}, limit=seconds, memory=memory)
        except VerifierTimeout:
            raise UserError(
                f"checking it takes more than {seconds:g} s of processor time; make the pattern simpler, or the dataset"
                " smaller"
            ) from None
        except VerifierError as error:
            if MEMORY in str(error):
                raise UserError(
                    f"checking it takes more than {memory >> 20} MB of memory; make the pattern simpler, or the rows"
                    " smaller"
                ) from None
            raise Unavailable(f"the environment could not be checked: {error}") from None
        except RuntimeError as error:
            raise Unavailable(f"the environment could not be checked: {error}") from None
        if "refused" in answer:
            raise UserError(answer["refused"])
        return answer.get("result")


def bytes_of(sizes: SplitSizes | None) -> int:
    """The memory of a kept result."""
    texts = [text for roles, where in sizes.forms for text in (*roles, where)] if sizes is not None else []
    return sys.getsizeof(sizes) + SMALL_BYTES + sum(map(sys.getsizeof, texts))


def _without_rows(options: Mapping[str, Any]) -> dict[str, Any]:
    """One row in the place of those of an environment of files, so that the other options are checked alone."""
    if not {"rows", "path", "dataset"} & options.keys():
        return {}
    return {"rows": [{"prompt": "-"}], "path": None, "eval_rows": None, "eval_path": None, "eval_last": 0}
