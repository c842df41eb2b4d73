"""Text that grows token by token is the text of all the tokens, in whole characters, up to a stop string."""

from __future__ import annotations

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


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SPACED], ids=["bytes", "spaces"])
def test_special_tokens_have_no_text_but_are_written(tokenizer: Tokenizer) -> None:
    pieces = TokenBytes(tokenizer)
    end = tokenizer.get_vocab_size() - 1 if tokenizer is SPACED else tokenizer.token_to_id("<|end|>")
    assert pieces.of(end) == b"" and pieces.written(end) == tokenizer.id_to_token(end).encode()
    assert not any(pieces.known(number) for number in (-1, 100_000, 1 << 32, 1 << 80))
    assert pieces.of(100_000) == b""
