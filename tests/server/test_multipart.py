"""Forms as clients send them: however a body is cut, a file is the same; others are refused in one line."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rookery.errors import UserError
from rookery.server.multipart import Multipart

KIND = "multipart/form-data; boundary=abc"
CONTENT = b"one\r\n--ab\r\n--abx\r\n\x00two"


def body(content: bytes = CONTENT) -> bytes:
    return (
        b'--abc\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        b'--abc\r\nContent-Disposition: form-data; name="file"; filename="rows \\"a\\".jsonl"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n--abc--\r\n"
    )


async def cut(content: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize("content", [CONTENT, b"", b"\r\n", b"-" * 100])
async def test_a_file_is_the_same_however_the_body_is_cut(size: int, content: bytes) -> None:
    form = await Multipart(KIND, cut(body(content), size)).form()
    assert (form.fields, form.filename) == ({"purpose": "fine-tune"}, 'rows "a".jsonl')
    assert form.content is not None
    assert b"".join([piece async for piece in form.content]) == content


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ('filename="a b;c.jsonl"', "a b;c.jsonl"),
        ("filename=plain.jsonl", "plain.jsonl"),
        ('filename="größe-数.jsonl"', "größe-数.jsonl"),
        ("filename*=utf-8''gr%C3%B6%C3%9Fe.jsonl", "größe.jsonl"),
        ("filename=\"old.jsonl\"; filename*=UTF-8'en'new%20one.jsonl", "new one.jsonl"),
        ('filename="%22a%22.jsonl"', '"a".jsonl'),
        ('filename="../../etc/rows.jsonl"', "rows.jsonl"),
        ('filename="C:\\data\\rows.jsonl"', "rows.jsonl"),
        ('filename="a%0D%0Ab\x1b[1m.jsonl"', "ab[1m.jsonl"),
        (f'filename="{"x" * 300}"', "x" * 200),
        ('filename=""', ""),
    ],
)
async def test_a_file_keeps_its_name_without_folders(sent: str, name: str) -> None:
    given = body().replace(b'filename="rows \\"a\\".jsonl"', sent.encode())
    assert given != body()
    assert (await Multipart(KIND, cut(given, 10_000)).form()).filename == name


async def test_a_form_without_a_file_has_none() -> None:
    form = await Multipart(KIND, cut(body().partition(b'--abc\r\nContent-Disposition: form-data; name="file"')[0]
                                     + b"--abc--\r\n", 9)).form()  # fmt: skip
    assert form.content is None


@pytest.mark.parametrize(
    "sent",
    [b"", b"nonsense", body()[:30], b"--abc\r\n" + b"x" * 70_000, body().replace(b'name="file"', b'name="other"')],
)
async def test_other_bodies_are_refused(sent: bytes) -> None:
    with pytest.raises(UserError):
        await Multipart(KIND, cut(sent, 100)).form()


FORMS = {
    "repeated": ([b"p"] * 100_000, "the field 'p' twice"),
    "many": ([b"%d" % number for number in range(100_000)], "more than 16 fields"),
    "unknown": ([b"a", b"p", b"wrong", *[b"%d" % number for number in range(1000)]], "wrong: unknown"),
}


@pytest.mark.parametrize("kind", FORMS)
async def test_fields_are_counted_and_checked_as_they_come(kind: str) -> None:
    names, problem = FORMS[kind]
    given = b"".join(b'--abc\r\ncontent-disposition: form-data; name="%s"\r\n\r\nx\r\n' % name for name in names)
    read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal read
        async for piece in cut(given, 1000):
            read += len(piece)
            yield piece

    def check(name: str, value: str) -> None:
        if name == "wrong":
            raise UserError("wrong: unknown")

    with pytest.raises(UserError, match=problem):
        await Multipart(KIND, pieces(), check).form()
    assert read <= 2000


async def test_a_file_that_is_cut_off_is_refused() -> None:
    form = await Multipart(KIND, cut(body()[:-8], 10)).form()
    assert form.content is not None
    with pytest.raises(UserError, match="cut off"):
        async for _ in form.content:
            pass


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary="])
def test_a_body_without_a_boundary_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match="boundary"):
        Multipart(kind, cut(b"", 1))
