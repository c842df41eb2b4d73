"""Signatures of reads: who may read which artifact, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rookery.protocol import ReadKey, may_read, read_key, sign_read

DIGEST = "ab" * 32
KEY, FOREIGN = read_key("hash of a key"), read_key("hash of another key")
SECRETS = {KEY.id: KEY.secret, FOREIGN.id: FOREIGN.secret}
NOW = 1_700_000_030.0


def permitted(header: str, digest: str = DIGEST, now: float = NOW, known: dict[str, bytes] = SECRETS) -> bool:
    return may_read(header, digest, now, known.get)


@given(st.floats(-1000, 1000))
def test_signature_is_valid_for_minutes_around_its_time(drift: float) -> None:
    """For every drift under two minutes, and for none above three."""
    valid = permitted(sign_read(KEY, DIGEST, NOW + drift))
    assert valid or abs(drift) > 120
    assert not valid or abs(drift) < 180


def test_signature_is_bound_to_artifact_and_key() -> None:
    good = sign_read(KEY, DIGEST, NOW)
    assert permitted(good)
    assert permitted(sign_read(FOREIGN, DIGEST, NOW)), "each known key is valid"
    assert not permitted(good, "cd" * 32)
    assert not permitted(good, known={FOREIGN.id: FOREIGN.secret})
    assert not permitted(sign_read(ReadKey(id=KEY.id, secret=FOREIGN.secret), DIGEST, NOW))
    assert not permitted(sign_read(ReadKey(id=FOREIGN.id, secret=KEY.secret), DIGEST, NOW))
    for name in ("..", "", DIGEST.upper(), DIGEST[:-1], f"{DIGEST}0", f"../{DIGEST}"):
        assert not permitted(sign_read(KEY, name, NOW), name), "no hash"


@given(st.text(max_size=100) | st.from_regex(r"[0-9a-f]{16}\.[0-9²]{0,20}\.[0-9a-f]{0,70}", fullmatch=True))
def test_other_texts_are_no_signatures(text: str) -> None:
    assert not permitted(text)
    assert not permitted(f"{KEY.id}.{text}")
    assert not permitted(f"{sign_read(KEY, DIGEST, NOW)}{text}" if text else text)


def test_key_is_the_same_after_a_restart_and_its_id_reveals_no_secret() -> None:
    assert read_key("hash of a key") == KEY
    assert KEY.id not in KEY.secret.hex() and KEY.id != FOREIGN.id
