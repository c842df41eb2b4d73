"""The pure decisions behind clients' calls: their order, and who has a place; and their rows in the database."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.support.storing import check_counted_bytes, checkpoint_row, future_row, manifest, sampler_row, visit

from rookery.errors import Conflict, NotFound, UserError
from rookery.scheduling.queues import ReorderBuffer
from rookery.scheduling.trainers import SlotUse, slots_to_free
from rookery.server.tinker import schemas
from rookery.server.tinker.calls import tokenizer_of
from rookery.settings import Settings
from rookery.storage.columns import Page
from rookery.storage.db import Database
from rookery.storage.repositories import jobs, sessions, tenants, versions
from rookery.storage.repositories.versions import NextVersion
from rookery.tokenization.registry import model_folder

# --- order ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(0, 30), st.randoms(use_true_random=False))
def test_reorder_buffer_returns_numbers_in_order(first: int, count: int, shuffle: random.Random) -> None:
    numbers = list(range(first, first + count))
    shuffle.shuffle(numbers)
    line: ReorderBuffer[int] = ReorderBuffer(first)
    left = []
    for number in numbers:
        line.put(number, number)
        while (item := line.pop()) is not None:
            left.append(item)
        waiting = [held for held in numbers[: numbers.index(number) + 1] if held not in left]
        assert line.missing == (line.next if waiting else None)
        with pytest.raises(ValueError, match="came before"):
            line.put(number, number)
    assert left == sorted(numbers)


def test_skipped_number_is_refused_later() -> None:
    line: ReorderBuffer[str] = ReorderBuffer(4)
    line.put(6, "six")
    line.put(5, "five")
    assert (line.missing, line.last, line.pop()) == (4, 6, None)
    assert line.flush() == ["five", "six"]
    assert (line.next, len(line), line.missing) == (7, 0, None)
    with pytest.raises(ValueError, match="number 4 came before"):
        line.put(4, "four")


# --- places -----------------------------------------------------------------------------------------------------------

holders = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.floats(0, 100)).map(lambda t: (t[0], t[1], t[2])), max_size=12
).map(lambda rows: [SlotUse(str(at), busy, gradient, since) for at, (busy, gradient, since) in enumerate(rows)])


@given(holders, st.integers(1, 12), st.integers(0, 12), st.floats(0, 20))
def test_slots_are_freed_in_order_of_idle_time(
    found: list[SlotUse], capacity: int, wanted: int, patience: float
) -> None:
    gone = slots_to_free(found, capacity=capacity, wanted=wanted, now=100.0, patience=patience)
    known = {holder.name: holder for holder in found}
    assert len(set(gone)) == len(gone) <= max(0, len(found) + wanted - capacity)
    assert not any(known[name].busy for name in gone)
    assert all(100.0 - known[name].since >= patience for name in gone if known[name].gradient)
    if any(known[name].gradient for name in gone):  # then everybody idle without one goes
        assert all(h.name in gone for h in found if not h.busy and not h.gradient)
    stayed = [h.since for h in found if not h.busy and not h.gradient and h.name not in gone]
    left = [known[name].since for name in gone if not known[name].gradient]
    assert not stayed or not left or max(left) <= min(stayed)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path}/rookery.db")
    database.create()
    for tenant in ("alice", "bob"):
        database.write(tenants.create_tenant, tenant, tenant, 0.0)
    visit(database)
    yield database
    database.close()
    check_counted_bytes(f"sqlite:///{tmp_path}/rookery.db")


def commit(database: Database, name: str, parent: int | None, done: int, **more: tuple[str, bytes]) -> int:
    lease = database.write(jobs.next_lease, "one-policy")
    return database.write(
        sessions.commit_model,
        NextVersion(policy="one-policy", lease=lease, parent=parent, manifest=manifest(name), step=done, time=5.0),
        model="one", done_seq=done, **more,
    ).version  # fmt: skip


def test_commit_includes_its_operations_and_its_result(database: Database) -> None:
    for seq in (1, 2, 3):
        database.write(sessions.open_future, future_row(f"one/{seq}", model="one", seq=seq, call=b"call"))
    database.write(sessions.finish_future, "one/1", b"gradient", 1.0)
    assert commit(database, "zero", None, 0) == 0
    assert [row.seq for row in database.read(sessions.futures_behind, "one", 0)] == [1, 2, 3]
    assert database.read(sessions.get_future, "alice", "one/1").call == b"call"  # it may have to be computed again
    assert commit(database, "one", 0, 2, outcome=("one/2", b"stepped")) == 1
    assert database.read(sessions.get_model, "alice", "one")[0].done_seq == 2
    assert [(row.seq, row.outcome) for row in database.read(sessions.futures_behind, "one", 2)] == [(3, None)]
    assert database.read(sessions.get_future, "alice", "one/1").call == b""
    assert database.read(sessions.get_future, "alice", "one/2").outcome == b"stepped"
    with pytest.raises(Conflict):
        commit(database, "late", 0, 3, outcome=("one/3", b"no"))
    assert database.read(sessions.get_future, "alice", "one/3").outcome is None
    database.write(sessions.finish_future, "one/2", b"again", 9.0)
    assert database.read(sessions.get_future, "alice", "one/2").outcome == b"stepped"
    assert {row.id for row in database.read(sessions.open_futures)} == {"one", "one/3"}


def test_results_expire_when_no_run_can_replay_them(database: Database) -> None:
    commit(database, "zero", None, 0)
    for seq in (1, 2):
        database.write(sessions.open_future, future_row(f"one/{seq}", model="one", seq=seq))
        database.write(sessions.finish_future, f"one/{seq}", b"done", 1.0)
    database.write(sessions.open_future, future_row("sample"))
    database.write(sessions.finish_future, "sample", b"text", 1.0)
    assert database.read(sessions.get_future, "alice", "sample").call == b""
    assert database.write(sessions.drop_futures, before=0.5) == 0
    database.write(sessions.open_future, future_row("fetched"))
    assert database.write(sessions.drop_futures, 0.5, ["fetched", "one/1", "one/2"]) == 0, "its result is not there"
    database.write(sessions.finish_future, "fetched", b"text", 1.0)
    assert database.write(sessions.drop_futures, 0.5, ["fetched", "one/1", "one/2"]) == 1
    assert database.write(sessions.drop_futures, before=2.0) == 1  # the sample: the model's are behind its head
    commit(database, "one", 0, 1)
    assert database.write(sessions.drop_futures, before=2.0) == 1
    with pytest.raises(NotFound):
        database.read(sessions.get_future, "alice", "one/1")
    assert database.read(sessions.get_future, "alice", "one/2").outcome == b"done"


def test_checkpoints_and_samplers_keep_their_artifacts(database: Database) -> None:
    version = commit(database, "zero", None, 0)
    digest = manifest("zero").hash
    database.write(sessions.save_checkpoint, checkpoint_row("one", name="kept", content="zero"), overwrite=False)
    database.write(sessions.add_sampler, sampler_row("sampler", digest=digest))
    commit(database, "one", version, 1)
    assert database.write(versions.retire_version, "one-policy", version) is None
    assert digest in database.read(versions.live_hashes)
    assert database.write(sessions.delete_checkpoint, "alice", "one", "weights", "kept") is None
    assert [row.id for row in database.read(sessions.idle_samplers, before=1.0)] == ["sampler"]
    assert database.write(sessions.release_sampler, "sampler") == digest
    assert digest not in database.read(versions.live_hashes)
    assert not database.read(sessions.get_sampler, "alice", "sampler").kept


def test_sampler_of_a_used_number_has_the_same_weights(database: Database) -> None:
    first = sampler_row("sampler", digest="a")
    with pytest.raises(NotFound, match="were deleted meanwhile"):
        database.write(sessions.add_sampler, first)
    database.write(tenants.add_upload, "alice", "adapter", "a", 1, 0.0)
    of_path = replace(first, id="other", path="tinker://one/weights/main", model="one")
    for row in (first, of_path):
        assert database.write(sessions.add_sampler, row).id == row.id
        assert database.write(sessions.add_sampler, replace(row, created=9.0)).created == 0.0
        model = None if row.model else "one"
        others: list[dict[str, Any]] = [
            {"base_model": "b"},
            {"path": "tinker://x"},
            {"model": model},
            {"inflight": True},
        ]
        for other in others:
            with pytest.raises(Conflict, match="was created before, of other weights"):
                database.write(sessions.add_sampler, replace(row, **other))
    with pytest.raises(Conflict):
        database.write(sessions.add_sampler, replace(first, hash="b"))
    assert database.write(sessions.add_sampler, replace(of_path, hash="b")).hash == "a", "it was overwritten"


def test_checkpoint_name_is_taken_until_overwritten(database: Database) -> None:
    with pytest.raises(Conflict, match="exists already"):
        database.write(sessions.save_checkpoint, checkpoint_row("one", content="b"), overwrite=False)
    outcome = ("one", b"saved")
    freed = database.write(
        sessions.save_checkpoint, checkpoint_row("one", content="b"), overwrite=True, outcome=outcome
    )
    assert freed == manifest("a").hash
    assert database.read(sessions.get_future, "alice", "one").outcome == b"saved"


@pytest.mark.parametrize(("now", "there"), [(6.0, True), (7.0, False), (8.0, False)])
def test_a_checkpoint_is_there_until_it_expires(database: Database, now: float, there: bool) -> None:
    """For everybody: it is deleted by the next sweep, and answers as if it were from the moment on."""
    database.write(sessions.save_checkpoint, replace(checkpoint_row("one", name="other"), created=1.0), overwrite=False)
    database.write(sessions.expire_checkpoint, "alice", "one", "weights", "other", 7.0, 0.0)
    names = ["other", "main"] if there else ["main"]
    assert [row.name for row in database.read(sessions.list_checkpoints, "alice", at=now)] == names
    assert [row.name for row in database.read(sessions.list_checkpoints, "alice", "one", Page(1), now)] == names[:1]
    assert database.read(sessions.count_checkpoints, "alice", now) == len(names)
    newest = database.read(sessions.newest_checkpoints, "alice", ["one"], now)
    assert newest["one", "weights"].name == names[0]
    assert [row.name for row in database.read(sessions.expired_checkpoints, now)] == ([] if there else ["other"])
    late = replace(checkpoint_row("one", name="other"), created=now)
    with pytest.raises(Conflict, match="exists already" if there else "has expired"):
        database.write(sessions.save_checkpoint, late, overwrite=False)
    with nullcontext() if there else pytest.raises(NotFound):
        database.write(sessions.expire_checkpoint, "alice", "one", "weights", "other", None, now)


def test_rows_are_created_once(database: Database) -> None:
    first = database.read(sessions.get_session, "alice", "one")
    keyed = replace(first, id="two", idempotency_key="key")
    assert database.write(sessions.add_session, keyed).id == "two"
    assert database.write(sessions.add_session, replace(keyed, id="three")).id == "two"
    assert database.write(sessions.add_session, replace(keyed, id="four", tenant="bob")).id == "four"
    with pytest.raises(Conflict):
        visit(database, id="five", model="one")
    row, created = database.write(sessions.open_future, future_row("one", call=b"other"))
    assert (row.call, created) == (b"c", False)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "192.168.1.2", ""])
@pytest.mark.parametrize("local", [True, False])
def test_clients_elsewhere_get_no_folder_of_the_service(tmp_path: Path, address: str, local: bool) -> None:
    settings = Settings.load({}, cache=tmp_path, local_tokenizers=local)
    sees = local and address in ("127.0.0.1", "::1")
    for name, id in (("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"), ("some/model", "some/model")):
        assert tokenizer_of(name, address, settings) == (str(model_folder(tmp_path, name)) if sees else id)
    folder = tmp_path / "mine"
    folder.mkdir()
    assert tokenizer_of(str(folder), address, settings) == str(model_folder(tmp_path, str(folder)))


@pytest.mark.parametrize(
    ("kind", "sent", "said"),
    [
        (schemas.AdamParams, {"beta1": 2}, "beta1: Input should be less than 1"),
        (schemas.AdamParams, {"eps": 0}, "eps: Input should be greater than or equal to 0.0000"),
        (schemas.AdamParams, {"learning_rate": 1e39}, "learning_rate: Input should be less than 34000"),
        (schemas.AdamParams, {"weight_decay": 1e39}, "weight_decay: Input should be less than 34000"),
        (schemas.SamplingParams, {"temperature": 1e-9}, "temperature: temperature is 0 or at least 1e-06"),
        (schemas.SamplingParams, {"stop": [""]}, "stop.0: String should have at least 1 character"),
        (schemas.SamplingParams, {"stop": ["a", 3]}, "stop.1: Input should be a valid string"),
        (schemas.AdamParams, {"nesterov": True}, "nesterov: is not supported by this server"),
        (schemas.AdamParams, [], "body: "),
    ],
)
def test_first_mistake_of_a_request_is_one_line(kind: type[schemas.TinkerRequest], sent: Any, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(sent)
    told = schemas.mistake_of(caught.value, sent)
    assert told.startswith(said) and "\n" not in told and "pydantic" not in told


ASKED: dict[str, Any] = {
    "sampling_session_id": "s", "seq_id": 1, "prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_params": {},
}  # fmt: skip
LOADED: dict[str, Any] = {"path": "tinker://x/weights/a", "model_id": "m", "seq_id": 1}


@pytest.mark.parametrize(
    ("kind", "whole", "sent", "said"),
    [
        (schemas.OptimStepRequest, {"model_id": "m"}, {"optimizer_params": {"type": "adamw", "learning_rate": 0.1}},
         "optimizer_params.learning_rate: not read"),
        (schemas.LoadWeights, LOADED, {"optimizer_config": {"type": "adamw", "beta1": 0.5}},
         "optimizer_config.beta1: not read"),
        (schemas.LoadWeights, LOADED, {"session_id": "s"}, "session_id: only a new model takes it"),
        (schemas.LoadWeights, LOADED, {"model_seq_id": 0}, "model_seq_id: only a new model takes it"),
        (schemas.LoadWeights, LOADED, {"base_model": "b"}, "base_model: only a new model takes it"),
        (schemas.LoadWeights, LOADED, {"user_metadata": {"a": 1}}, "user_metadata: only a new model takes it"),
        (schemas.AsampleRequest, ASKED, {"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n: needs prompt_logprobs"),
        (schemas.AsampleRequest, ASKED, {"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs: is not"),
        (schemas.AsampleRequest, ASKED, {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k: is not supported"),
    ],
)  # fmt: skip
def test_a_field_that_nothing_would_read_is_refused_by_name(
    kind: Any, whole: dict[str, Any], sent: dict[str, Any], said: str
) -> None:
    kind.parse(whole).operation()
    with pytest.raises(UserError, match=f"^{said}"):
        kind.parse({**whole, **sent}).operation()


def test_mistake_in_an_optimizers_numbers_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^adam_params.beta1: Input should be less than 1$"):
        schemas.OptimStepRequest(model_id="m", adam_params={"beta1": 2}).operation()
