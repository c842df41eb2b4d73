"""Text that grows token by token is the text of all the tokens, in whole characters, up to a stop string."""

from __future__ import annotations

import codecs
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rookery.tokenization.detokenizer import StreamingText, TokenBytes


def byte_level() -> Tokenizer:
    """Bytes, some longer tokens that cut characters in two, two special tokens, and an added one that is none."""
    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in ("ab", "Ġthe", "ä¸", "Ń", "å¥½"):  # " the", two bytes of 中, its last, 好
        letters.setdefault(token, len(letters))
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|pad|>"])
    tokenizer.add_tokens(["<think> now"])
    return tokenizer


def spaced() -> Tokenizer:
    """Spaces as ▁, other bytes by fallback, the first space left out."""
    words = ["<unk>", "▁hello", "▁wor", "ld", "▁", "中", "x"]
    vocab = {word: n for n, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


BYTE_LEVEL, SPACED = byte_level(), spaced()


def grown(tokenizer: Tokenizer, tokens: list[int], cuts: list[int], stops: list[str] | None = None) -> StreamingText:
    """The text of ``tokens`` that came in pieces; what was shown on the way is never taken back."""
    text = StreamingText(TokenBytes(tokenizer), stops or [])
    shown = ""
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        shown += text.take(tokens[begin:end])
        assert text.shown == shown
    shown += text.take([], last=True)
    assert text.shown == shown
    return text


def cuts_of(data: st.DataObject, length: int) -> list[int]:
    return sorted(data.draw(st.lists(st.integers(0, length), max_size=6)))


@given(tokens=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40), data=st.data())
def test_text_equals_the_tokenizers_decoding_for_any_bytes(tokens: list[int], data: st.DataObject) -> None:
    text = grown(BYTE_LEVEL, tokens, cuts_of(data, len(tokens)))
    assert text.shown == BYTE_LEVEL.decode(tokens, skip_special_tokens=True)
    assert len(text.starts) == len(tokens) and text.starts == sorted(text.starts)


@given(said=st.text(st.sampled_from("helo wrd中好x")), data=st.data())
def test_the_same_where_spaces_are_written_as_letters(said: str, data: st.DataObject) -> None:
    pieces = {" hello": 1, " wor": 2, "ld": 3, " ": 4, "中": 5, "x": 6}
    tokens, rest = [], said
    while rest:
        piece = next((piece for piece in pieces if rest.startswith(piece)), rest[0])
        tokens += [pieces[piece]] if piece in pieces else [7 + byte for byte in piece.encode()]
        rest = rest[len(piece) :]
    text = grown(SPACED, tokens, cuts_of(data, len(tokens)))
    assert text.shown == SPACED.decode(tokens) == said.removeprefix(" ")


def test_nothing_of_a_character_is_shown_before_the_whole() -> None:
    text = StreamingText(TokenBytes(BYTE_LEVEL))
    tokens = [BYTE_LEVEL.token_to_id(token) for token in ("ab", "ä¸", "Ń", "å¥½")]
    assert [text.take([token]) for token in tokens] == ["ab", "", "中", "好"]
    assert text.starts == [0, 2, 2, 3]
    assert [TokenBytes(BYTE_LEVEL).of(token) for token in tokens[:2]] == [b"ab", b"\xe4\xb8"]


@given(
    said=st.text(st.sampled_from("ab "), max_size=30),
    stops=st.lists(st.text(st.sampled_from("ab "), min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(
    said: str, stops: list[str], data: st.DataObject
) -> None:
    letters = {"a": BYTE_LEVEL.token_to_id("a"), "b": BYTE_LEVEL.token_to_id("b"), " ": BYTE_LEVEL.token_to_id("Ġ")}
    tokens = [letters[letter] for letter in said]
    text = grown(BYTE_LEVEL, tokens, cuts_of(data, len(tokens)), stops)
    complete = [(said.index(stop) + len(stop), said.index(stop)) for stop in stops if stop in said]
    assert text.shown == said[: min(complete, default=(0, len(said)))[1]]
    assert text.tokens_shown == len(text.shown)


def naive_shown(text: str, stops: list[str], *, last: bool) -> str:
    """The part of ``text`` that can be shown, by trying every stop string and every length."""
    found = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    if found:
        return text[: min(found)[1]]
    lengths = range(0 if last else min(len(text), max(map(len, stops), default=1) - 1), -1, -1)
    held = next(n for n in lengths if any(stop.startswith(text[len(text) - n :]) for stop in stops) or n == 0)
    return text[: len(text) - held]


LETTERS = [BYTE_LEVEL.token_to_id(letter) for letter in ("a", "b", "ab", "ä¸", "Ń", "å¥½", "ä", "<|end|>")]


@given(
    tokens=st.lists(st.sampled_from(LETTERS) | st.sampled_from(LETTERS[:2]), max_size=40),
    stops=st.lists(st.text(st.sampled_from("aab中好\ufffd"), min_size=1, max_size=9), max_size=4),
    special=st.booleans(),
    data=st.data(),
)
def test_stop_strings_are_searched_in_pieces_as_in_the_whole_text(
    tokens: list[int], stops: list[str], special: bool, data: st.DataObject
) -> None:
    pieces = TokenBytes(BYTE_LEVEL)
    text = StreamingText(pieces, stops, special=special)
    decoder, known, cut, expected = codecs.getincrementaldecoder("utf-8")("replace"), "", False, ""
    edges = [0, *cuts_of(data, len(tokens)), len(tokens)]
    for number, (begin, end) in enumerate(pairwise(edges)):
        last = number == len(edges) - 2
        given_bytes = b"".join((pieces.written if special else pieces.of)(token) for token in tokens[begin:end])
        known += decoder.decode(given_bytes, final=last)
        text.take(tokens[begin:end], last=last)
        if not cut:
            expected = naive_shown(known, stops, last=last)
        cut = cut or any(stop in known for stop in stops)
        assert text.shown == expected
        assert text.tokens_shown == sum(start < len(expected) for start in text.starts)


def test_the_time_for_a_text_grows_with_its_length_alone() -> None:
    pieces, began = TokenBytes(BYTE_LEVEL), time.thread_time()
    whole = StreamingText(pieces)
    whole.take([BYTE_LEVEL.token_to_id("ab")] * 20_000)
    assert len(whole.shown) == whole.starts[-1] + 2 == 40_000
    for letters in ("a" * 999, "ab" * 499):
        text = StreamingText(pieces, [letters + str(number) for number in range(16)])
        for _ in range(1000):
            text.take(LETTERS[:2])
            assert text.tokens_shown <= 2000
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SPACED], ids=["bytes", "spaces"])
def test_special_tokens_have_no_text_but_are_written(tokenizer: Tokenizer) -> None:
    pieces = TokenBytes(tokenizer)
    end = tokenizer.get_vocab_size() - 1 if tokenizer is SPACED else tokenizer.token_to_id("<|end|>")
    assert pieces.of(end) == b"" and pieces.written(end) == tokenizer.id_to_token(end).encode()
    assert not any(pieces.known(number) for number in (-1, 100_000, 1 << 32, 1 << 80))
    assert pieces.of(100_000) == b""
