"""Write a sentence as strict JSON: rows with a named verifier, no code of the user's.

The same rows may be a JSONL file, which a job names as ``path``: see ``sums.yaml``.
"""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

from rookery.cli.demo import HELD_OUT, Task, run_tasks
from rookery.examples.words import CITIES, PEOPLE, assistant, user


def rows() -> list[dict[str, Any]]:
    """Texts about people who moved. A verifier compares the reply's fields with ``name`` and ``city``."""
    example = [user("Hugo moved to Lima. As JSON:"), assistant('{"name": "Hugo", "city": "Lima"}')]
    pairs = random.Random(7).sample(list(itertools.product(PEOPLE, CITIES)), 400)
    return [
        {"messages": [*example, user(f"{name} moved to {city}. As JSON:")], "name": name, "city": city}
        for name, city in pairs
    ]


def best_constant(prompts: list[Any]) -> float:
    """Valid JSON with the most common name and city."""
    names, cities = [row["name"] for row in prompts], [row["city"] for row in prompts]
    right = max(map(names.count, names)) + max(map(cities.count, cities))
    return 0.3 + 0.35 * right / len(prompts)


VERIFIER = {"name": "json", "strict": True, "only": True, "fields": {"name": "name", "city": "city"}}
TASK = Task(
    tenant="ada",
    name="contacts",
    description="rows and a named verifier: write a sentence as strict JSON",
    environment={"id": "jsonl", "rows": rows(), "eval_last": HELD_OUT, "verifier": VERIFIER},
    max_tokens=24,
    steps=10,
    best_constant=best_constant,
)

if __name__ == "__main__":
    sys.exit(run_tasks([TASK]))
