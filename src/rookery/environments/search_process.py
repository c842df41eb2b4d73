"""The confined process that searches a corpus, started by :mod:`rookery.environments.search`."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

from rookery.environments.search import texts_of
from rookery.environments.verifiers.pool import serve

MEMORY = 4 << 30
"""Bytes of address space: numpy's library reserves some for each processor."""


def prepare() -> Callable[[str, int], list[str]]:
    """The function that answers queries, over an index of the corpus whose path is an argument."""
    import bm25s
    import numpy as np

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    texts = list(texts_of(Path(sys.argv[3])))
    tokens = bm25s.tokenize(texts, stopwords=None, show_progress=False)
    index = bm25s.BM25()
    index.index(tokens, show_progress=False)

    def find(query: str, most: int) -> list[str]:
        [words] = bm25s.tokenize([query], stopwords=None, return_ids=False, show_progress=False)
        known = [word for word in words if word in index.vocab_dict]
        if not known:
            return []
        scores = index.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:most]
        return [texts[number] for number in best if scores[number] > 0]

    find("a", 1)
    return find


if __name__ == "__main__":
    serve(prepare, opens_nothing=True)
