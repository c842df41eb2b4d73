"""The confined process that compiles the schemas of chats, started by :mod:`rookery.server.schema_checks`."""

from __future__ import annotations

import os
from collections.abc import Callable

from rookery.environments.verifiers.pool import serve
from rookery.errors import UserError
from rookery.tokenization.grammar import ANY_OBJECT, check_followed, check_schema


def prepare() -> Callable[..., tuple[str, str]]:
    """The function that answers the questions: why a schema is refused, and its name; empty texts for none."""

    def answer(offered: dict[str, str], followed: dict[str, str]) -> tuple[str, str]:
        for check, schemas in ((check_schema, offered), (check_followed, followed)):
            for param, schema in schemas.items():
                try:
                    check(schema)
                except UserError as error:
                    return str(error), param
        return "", ""

    answer({}, {"": ANY_OBJECT})
    nowhere = os.open(os.devnull, os.O_WRONLY)

    def answer_quietly(**question: dict[str, str]) -> tuple[str, str]:
        os.dup2(nowhere, 2)  # where the library gets no memory, it writes a trace for each request
        return answer(**question)

    return answer_quietly


if __name__ == "__main__":
    serve(prepare, one_question=True)
