"""Grammars of a worker: compiled once, elsewhere than it computes, and one reply's failure is no other's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.tiny import smollm2_folder
from tests.worker.engine.test_engine import finish, order
from tests.worker.engine.test_logits import real

from rookery import protocol
from rookery.errors import UserError
from rookery.tokenization.chat import Chat
from rookery.tokenization.grammar import ANY_OBJECT, Grammar, GrammarLost, GrammarTokenizer, ReplyGrammar
from rookery.worker.grammars import KEPT_BYTES, Grammars

PATTERNS = "|".join(f"[a-z]*{chr(97 + i % 26)}[a-z]{{{i + 3}}}" for i in range(60))
BRITTLE = json.dumps({"type": "string", "pattern": f"^(ok|x({PATTERNS}))$"})
"""Compiles in a millisecond; after an ``x`` its lexer fails."""


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat.load(smollm2_folder())


def tokens_of(chat: Chat) -> Callable[[], GrammarTokenizer]:
    return lambda: chat.grammars(49152)


def test_replies_to_a_tenants_schema_share_one_grammar_and_little_is_kept(chat: Chat) -> None:
    async def run() -> None:
        grammars = Grammars(tokens_of(chat))
        begun = chat.encode('{"a":')
        replies = await asyncio.gather(*(grammars.reply("ada", ANY_OBJECT, begun[: n % 3]) for n in range(8)))
        assert len({id(reply.grammar) for reply in replies}) == 1
        assert all(reply.ready(begun[: n % 3]) for n, reply in enumerate(replies))
        assert (await grammars.reply("bob", ANY_OBJECT, [])).grammar is not replies[0].grammar
        with pytest.raises(UserError, match="banana"):
            await grammars.reply("ada", '{"type": "banana"}', [])
        for length in range(150):
            await grammars.reply("ada", json.dumps({"type": "string", "maxLength": length}), [])
        used, budget = grammars.memory()
        assert budget // 2 < used <= budget == KEPT_BYTES
        assert (await grammars.reply("ada", ANY_OBJECT, [])).grammar is not replies[0].grammar

    asyncio.run(run())


def test_the_estimate_of_a_grammars_memory_does_not_grow_with_its_use(chat: Chat) -> None:
    grammar = Grammar(chat.grammars(49152), json.dumps({"type": "string", "pattern": "^([a-z]*b[a-z]{9}|[a-z]*)$"}))
    tokens = chat.encode('"' + "abcdefghij" * 4)
    begun = grammar.bytes
    for _ in range(150):
        reply = ReplyGrammar(grammar)
        for end in range(1, len(tokens)):
            reply.prepare(tokens[:end])
    assert grammar.bytes < begun + (2 << 20)
    grammar.count(0.5, hash(b"a mask"))
    used = grammar.bytes
    grammar.count(0.5, hash(b"a mask"))
    assert grammar.bytes == used > begun + (50 << 20)


def test_grammars_are_compiled_elsewhere_and_a_request_that_leaves_holds_up_no_other(chat: Chat) -> None:
    open_now, asked = threading.Event(), threading.Event()

    def tokens() -> GrammarTokenizer:
        asked.set()
        open_now.wait(10)
        return chat.grammars(49152)

    async def run() -> None:
        grammars = Grammars(tokens)
        first, second, other = (asyncio.create_task(grammars.reply(name, ANY_OBJECT, [])) for name in "aab")
        await asyncio.to_thread(asked.wait, 10)  # the loop runs on while the first is compiled
        first.cancel()
        second.cancel()
        open_now.set()
        assert (await other).ready([])
        assert (await grammars.reply("a", ANY_OBJECT, [])).grammar is not (await other).grammar
        assert grammars.prepared == 2  # the second one never began

    asyncio.run(run())


def test_a_lexer_that_fails_ends_one_reply_and_the_others_continue_with_another(chat: Chat) -> None:
    text = '"ok"'

    async def grammar() -> tuple[Grammars, ReplyGrammar, ReplyGrammar]:
        grammars = Grammars(tokens_of(chat))
        return grammars, await grammars.reply("", BRITTLE, []), await grammars.reply("", BRITTLE, [])

    async def again(grammars: Grammars, tokens: list[int]) -> ReplyGrammar:
        return await grammars.reply("", BRITTLE, tokens)

    grammars, bad, good = asyncio.run(grammar())
    engine = real(chat)
    bias = [(token, 100.0) for token in chat.encode("ok")]
    common: dict[str, Any] = {
        "prompt": chat.encode("Say"), "shared_prefix": 0, "max_tokens": 8, "stop_tokens": chat.stop_tokens,
        "logits": protocol.LogitsParams(schema=BRITTLE, logit_bias=bias), "temperature": 0.0,
    }  # fmt: skip
    engine.submit(order(name="good", **common), good)
    engine.step()
    begun = [token for chunk in engine.drain() for token in chunk.tokens]
    for _ in range(2):  # its own failure stays its own
        with pytest.raises(UserError, match="lexer"):
            bad.allowed(chat.encode('"xab'), 49152)
    assert finish(engine)["good"][1].finish == "abort"
    with pytest.raises(GrammarLost):
        good.allowed(begun, 49152)
    resumed = asyncio.run(again(grammars, begun))
    assert resumed.grammar is not bad.grammar
    engine.submit(order(name="good", **common, prefix_tokens=begun), resumed)
    tokens, last = finish(engine)["good"]
    assert last.finish == "stop" and chat.decode(begun + tokens) == text
