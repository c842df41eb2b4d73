"""The writer thread: order, calls that become durable together, what a failing one takes with it, and what not. The
threads of artifacts: lines of tenants."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event
from tests.support.peers import eventually, settle
from tests.support.storing import everything, make_ready, new_group, submit

from rookery.client.connection import READ_SECONDS as CLIENTS_READ_SECONDS
from rookery.errors import Conflict, DatabaseAway, NotFound, StorageFull, Unavailable
from rookery.simulation.clock import run as run_virtually
from rookery.storage.db import READ_LOCK_SECONDS, Database
from rookery.storage.repositories import jobs, tenants
from rookery.storage.store import (
    GROUPED_CALLS,
    GROUPED_SECONDS,
    READ_SECONDS,
    StorageWriter,
    TransferThreads,
    read_within,
)
from rookery.storage.store import Store as Stored
from rookery.turns import SPENT, work_of


class Store:
    """Notes what is carried out, and when it becomes durable."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.pending: list[int] = []
        self.groups: list[list[int]] = []
        self.end: Exception | None = None
        """The fault at the end of a group."""

    @contextmanager
    def batch_transaction(self) -> Iterator[None]:
        yield
        if self.end is not None:
            self.pending = []
            raise self.end
        self.groups.append(self.pending)
        self.pending = []

    def wait(self) -> None:
        self.gate.wait()

    def note(self, number: int) -> int:
        self.pending.append(number)
        if number < 0:
            raise Conflict(str(number))
        return number * 2


@pytest.fixture
def writer() -> Iterator[StorageWriter]:
    writer = StorageWriter(clock=lambda: 0.0)
    yield writer
    writer.close()


async def waiting(
    writer: StorageWriter, store: Store, numbers: list[int], cancelled: int | None = None
) -> list[asyncio.Task[int]]:
    """Tasks whose calls stand behind one that holds the thread."""
    blocker = asyncio.create_task(writer(lambda: store.wait()))
    await settle(1)
    tasks = [asyncio.create_task(writer(store.note, number)) for number in numbers]
    await settle(1)
    if cancelled is not None:
        tasks[cancelled].cancel()
    store.gate.set()
    await blocker
    return tasks


async def test_calls_that_wait_share_a_transaction_in_order(writer: StorageWriter) -> None:
    store = Store()
    tasks = await waiting(writer, store, [1, 2, -3, 4])
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(result) for result in results] == ["2", "4", "-3", "8"]
    assert store.groups == [[1, 2, -3, 4]]
    with pytest.raises(Conflict):
        await writer(store.note, -1)


async def test_a_failed_commit_fails_every_call(writer: StorageWriter) -> None:
    store = Store()
    store.end = Unavailable("gone")
    tasks = await waiting(writer, store, [1, 2, 3])
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable] * 3
    assert not store.pending


async def test_on_a_full_disk_each_call_runs_alone(writer: StorageWriter) -> None:
    """A call that only looks must not fail for want of room that another one needs."""
    store = Store()
    store.end = StorageFull("full")
    tasks = await waiting(writer, store, [1, -2, 3])
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(result) for result in results] == ["2", "-2", "6"]
    assert store.pending == [1, -2, 3]


async def test_other_calls_separate_batches(writer: StorageWriter) -> None:
    store = Store()
    order: list[int] = []
    blocker = asyncio.create_task(writer(lambda: store.wait()))
    await settle(1)
    calls = [store.note, order.append, store.note, store.note]
    tasks = [asyncio.create_task(writer(call, number)) for number, call in enumerate(calls)]
    await settle(1)
    store.gate.set()
    await asyncio.gather(blocker, *tasks)
    assert order == [1]
    assert store.groups == [[0, 2, 3]], "0 alone is no group: its note came before"


async def test_the_call_of_a_cancelled_caller_runs(writer: StorageWriter) -> None:
    store = Store()
    tasks = await waiting(writer, store, [1, 2, 3], cancelled=1)
    assert await tasks[2] == 6
    assert store.groups == [[1, 2, 3]]
    assert tasks[1].cancelled()


async def test_close_waits_for_submitted_calls() -> None:
    writer, store = StorageWriter(clock=lambda: 0.0), Store()
    tasks = await waiting(writer, store, list(range(200)))
    await asyncio.to_thread(writer.close)
    assert await asyncio.gather(*tasks) == [number * 2 for number in range(200)]
    assert [number for group in store.groups for number in group] + store.pending == list(range(200))
    with pytest.raises(RuntimeError, match="the storage writer is closed"):
        await writer(store.note, 1)


# --- tenants ----------------------------------------------------------------------------------------------------------


class Transactions(Store):
    """Notes the calls of each transaction, also of those with a single call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[tuple[str, int]]] = []
        self._open = False

    @contextmanager
    def batch_transaction(self) -> Iterator[None]:
        self.calls.append([])
        self._open = True
        yield
        self._open = False

    def keep(self, tenant: str, number: int) -> None:
        if not self._open:
            self.calls.append([])
        self.calls[-1].append((tenant, number))

    async def run(self, writer: StorageWriter, order: list[tuple[str, bool]]) -> None:
        """Submit a call of each tenant in this order, with or without a transaction that others share."""
        blocker = asyncio.create_task(writer(lambda: self.wait()))
        await settle(1)
        tasks = []
        for number, (tenant, shares) in enumerate(order):
            with work_of(tenant):
                call = self.keep if shares else lambda tenant, number: self.keep(tenant, number)
                tasks.append(asyncio.create_task(writer(call, tenant, number)))
        await settle(1)
        self.gate.set()
        await asyncio.gather(blocker, *tasks)


async def written(order: list[tuple[str, bool]]) -> list[list[tuple[str, int]]]:
    writer, store = StorageWriter(clock=lambda: 0.0), Transactions()
    await store.run(writer, order)
    writer.close()
    return store.calls


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.booleans()), max_size=60), st.integers(0, 300))
def test_tenants_keep_their_order_and_take_turns(order: list[tuple[str, bool]], flood: int) -> None:
    """The n-th call of a tenant waits for n calls of each other one; a transaction that nothing shares counts as much
    as one that others share."""
    order = [("flood", True)] * flood + order
    transactions = asyncio.run(written(order))
    ran = [call for calls in transactions for call in calls]
    for tenant in (tenants := {tenant for tenant, _ in order}):
        mine = [number for number, (of, _) in enumerate(order) if of == tenant]
        assert [number for of, number in ran if of == tenant] == mine
        for place, number in enumerate(mine, 1):
            before = next(index for index, calls in enumerate(transactions) if (tenant, number) in calls)
            alone = all(shares for _, shares in order)
            assert before < (-(-place * len(tenants) // GROUPED_CALLS) if alone else place * len(tenants))


async def test_a_write_waits_for_one_transaction_of_thousands_of_others() -> None:
    transactions = await written([("busy", True)] * 5000 + [("small", True)])
    assert ("small", 5000) in transactions[0] and len(transactions[0]) == GROUPED_CALLS


async def test_slow_calls_share_no_transaction_for_long() -> None:
    """Calls that come during a transaction wait for its end."""
    now = 0.0

    class Slow(Store):
        def note(self, number: int) -> int:
            nonlocal now
            now += GROUPED_SECONDS * (number % 2)  # every other one
            return super().note(number)

    store, writer = Slow(), StorageWriter(clock=lambda: now)
    await asyncio.gather(*await waiting(writer, store, list(range(100))))
    writer.close()
    noted = [number for group in store.groups for number in group] + store.pending
    assert sorted(noted) == list(range(100)) and max(map(len, store.groups)) <= 3


# --- lines of artifacts -----------------------------------------------------------------------------------------------


class Transfers:
    """Calls of tenants in threads of artifacts; each ends when a test says so."""

    def __init__(self, threads: int) -> None:
        self.threads = TransferThreads(threads)
        self.running: list[tuple[str, int]] = []
        self.ended: list[tuple[str, int]] = []
        self.gates: dict[tuple[str, int], threading.Event] = {}
        self._lock = threading.Lock()

    def begin(self, tenant: str, number: int) -> asyncio.Task[int]:
        gate = self.gates[tenant, number] = threading.Event()

        def call() -> int:
            with self._lock:
                self.running.append((tenant, number))
            assert gate.wait(60)
            with self._lock:
                self.running.remove((tenant, number))
                self.ended.append((tenant, number))
            return number

        with work_of(tenant):
            return asyncio.create_task(self.threads(call))

    async def run(self, *expected: tuple[str, int]) -> None:
        """Returns when exactly these calls run."""
        await eventually(lambda: sorted(self.running) == sorted(expected))


async def test_transfers_that_hang_hold_up_their_tenant_alone() -> None:
    transfers = Transfers(3)
    hung = [transfers.begin("big", number) for number in range(3)]
    await transfers.run(("big", 0))
    others = [transfers.begin(tenant, 0) for tenant in ("small", "other", "")]
    await transfers.run(("big", 0), ("small", 0), ("", 0))
    transfers.gates["small", 0].set()
    await transfers.run(("big", 0), ("other", 0), ("", 0))
    own = transfers.begin("", 1)
    hung[1].cancel()
    for gate in transfers.gates.values():
        gate.set()
    assert await asyncio.gather(*others, own) == [0, 0, 0, 1]
    await asyncio.to_thread(transfers.threads.close)
    assert [number for tenant, number in transfers.ended if tenant == "big"] == [0, 1, 2], "in order, cancelled or not"
    assert hung[1].cancelled() and await hung[0] == 0 and await hung[2] == 2
    with pytest.raises(RuntimeError, match="are closed"):
        await transfers.threads(lambda: 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.booleans()), max_size=40), st.integers(2, 5))
def test_transfers_of_a_tenant_keep_their_order_and_their_errors(order: list[tuple[str, bool]], threads: int) -> None:
    ran: list[tuple[str, int]] = []
    at_once, most = Counter[str](), Counter[str]()
    lock = threading.Lock()

    def call(tenant: str, number: int, fails: bool) -> int:
        with lock:
            at_once[tenant] += 1
            most[tenant] = max(most[tenant], at_once[tenant])
            most["all"] = max(most["all"], at_once.total())
        with lock:
            ran.append((tenant, number))
            at_once[tenant] -= 1
        if fails:
            raise Conflict(str(number))
        return number

    async def run() -> list[int | BaseException]:
        lines, tasks = TransferThreads(threads), []
        for number, (tenant, fails) in enumerate(order):
            with work_of(tenant):
                tasks.append(asyncio.create_task(lines(call, tenant, number, fails)))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(lines.close)
        return outcomes

    for number, (outcome, (_, fails)) in enumerate(zip(asyncio.run(run()), order, strict=True)):
        assert isinstance(outcome, Conflict) if fails else outcome == number
    for tenant in {tenant for tenant, _ in order}:
        assert [number for of, number in ran if of == tenant] == [n for n, (of, _) in enumerate(order) if of == tenant]
        assert most[tenant] == 1
    assert most["all"] <= threads


# --- the database's side ----------------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path}/test.db")
    database.create()
    database.write(tenants.create_tenant, "alice", "Alice", 1.0)
    submit(database)
    yield database
    database.close()


def test_together_all_is_durable_at_the_end_and_none_before(database: Database, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/test.db"
    before = everything(url)
    with database.batch_transaction():
        database.write(jobs.add_groups, "job", [new_group(0)])
        make_ready(database, new_group(0))
        assert len(database.read(jobs.ready_groups, "job")) == 1, "calls within see each other"
        assert everything(url) == before, "nobody else sees them"
    assert len(database.read(jobs.ready_groups, "job")) == 1


def test_a_refused_call_undoes_itself_alone(database: Database) -> None:
    with database.batch_transaction():
        database.write(jobs.add_groups, "job", [new_group(0)])
        with pytest.raises(Conflict):
            database.write(jobs.add_groups, "job", [new_group(5)])
        with pytest.raises(NotFound):
            database.read(jobs.get_job, "bob", "job")
        assert submit(database, key=None, job="other")[1]
        _, created = submit(database, job="keyed", key="k")
        assert created
        assert submit(database, job="again", key="k")[0].id == "keyed"
        with pytest.raises(Conflict):
            database.write(tenants.create_tenant, "alice", "Alice", 1.0)
        database.write(jobs.add_groups, "job", [new_group(1)])
    assert [group.ordinal for group in database.read(jobs.open_groups, "job")] == [0, 1]
    assert {job.id for job in database.read(jobs.list_jobs, "alice")} == {"job", "other", "keyed"}


def test_an_error_within_a_transaction_undoes_all_of_it(database: Database) -> None:
    with pytest.raises(ZeroDivisionError), database.batch_transaction():
        database.write(jobs.add_groups, "job", [new_group(0)])
        raise ZeroDivisionError
    assert not database.read(jobs.open_groups, "job")
    database.write(jobs.add_groups, "job", [new_group(0)])


def test_a_full_disk_undoes_all_of_them(database: Database) -> None:
    group = new_group(0)
    database.write(jobs.add_groups, "job", [group])
    database.close()

    def small(connection: sqlite3.Connection, record: object) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages + 1}")

    event.listen(database.engine, "connect", small)
    with pytest.raises(StorageFull), database.batch_transaction():
        database.write(jobs.save_turns, group.episodes[0].id, [b"small"])
        with pytest.raises(StorageFull):
            database.write(jobs.save_turns, group.episodes[1].id, [b"x" * 100_000])
        with pytest.raises(StorageFull):
            database.write(jobs.save_turns, group.episodes[0].id, [b"after"])
        with pytest.raises(StorageFull):
            database.read(jobs.get_job, "alice", "job")
    event.remove(database.engine, "connect", small)
    database.close()
    assert [episode.turns for episode in database.read(jobs.open_groups, "job")[0].episodes] == [b"", b""]


async def test_the_writer_batches_calls_of_the_database(database: Database, writer: StorageWriter) -> None:
    commits = 0

    def count(connection: object) -> None:
        nonlocal commits
        commits += 1

    group = new_group(0, members=40)
    await writer(database.write, jobs.add_groups, "job", [group])
    event.listen(database.engine, "commit", count)
    saved = await asyncio.gather(
        *(writer(database.write, jobs.save_turns, episode.id, [b"said"], version=0) for episode in group.episodes)
    )
    assert saved == [True] * 40
    assert commits <= 10, "far fewer waits for the disk than calls"
    stored = (await writer(database.read, jobs.open_groups, "job"))[0]
    assert {episode.turns for episode in stored.episodes} == {b"said"}


def test_threads_that_write_to_sqlite_take_turns(database: Database) -> None:
    """SQLite lets a thread that waits ask again after a while: it would miss the moment between two transactions."""
    began, stop, transactions = threading.Event(), threading.Event(), 0

    def write_on() -> None:
        nonlocal transactions
        while not stop.is_set():
            with database.batch_transaction():
                for _ in range(20):
                    database.write(tenants.add_event, "alice", None, 0.0, "text", "busy")
            transactions += 1
            began.set()

    busy = threading.Thread(target=write_on)
    busy.start()
    began.wait()
    passed = []
    for _ in range(10):
        before = transactions
        database.write(tenants.add_event, "alice", None, 0.0, "text", "seldom")
        passed.append(transactions - before)
    stop.set()
    busy.join()
    assert max(passed) <= 3, passed


# --- requests that read ----------------------------------------------------------------------------------------------


class Rows:
    """A database whose reads take as long as a test says."""

    def read(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


@contextmanager
def in_a_request() -> Iterator[None]:
    """Within, the current task is that of a request."""
    token = SPENT.set(lambda seconds: None)
    try:
        yield
    finally:
        SPENT.reset(token)


@pytest.mark.parametrize("begun", [True, False], ids=["the read hangs", "all threads hang"])
def test_a_request_waits_for_a_silent_database_less_than_its_client_does(begun: bool) -> None:
    async def hung(call: Callable[..., Any]) -> Any:
        if begun:
            call()
        await asyncio.Event().wait()

    async def main() -> None:
        store = Stored(cast(Any, Rows()), cast(Any, None), readers=cast(Any, hung))
        with in_a_request():
            for _ in range(2):
                with pytest.raises(DatabaseAway, match="the database does not answer within 8 s"):
                    await store.read(cast(Any, lambda: None))
        now = asyncio.get_running_loop().time()
        assert now == 2 * READ_SECONDS and READ_LOCK_SECONDS < READ_SECONDS < CLIENTS_READ_SECONDS
        reading = asyncio.create_task(store.read(cast(Any, lambda: None)))
        await asyncio.sleep(10 * READ_SECONDS)
        assert not reading.done(), "what is no request waits"
        reading.cancel()

    run_virtually(main())


def test_a_request_waits_for_the_reads_before_it() -> None:
    """However many there are, as long as they end."""

    async def main() -> None:
        turn = asyncio.Lock()

        async def in_turn(call: Callable[..., Any]) -> Any:
            async with turn:
                await asyncio.sleep(READ_SECONDS - 1)
                return call()

        store = Stored(cast(Any, Rows()), cast(Any, None), readers=cast(Any, in_turn))
        with in_a_request():
            assert await asyncio.gather(*(store.read(cast(Any, lambda: 7)) for _ in range(5))) == [7] * 5

    run_virtually(main())


async def test_a_wait_for_keys_reports_the_database_and_no_other_timeout() -> None:
    with pytest.raises(DatabaseAway, match="does not answer"):
        async with read_within(0.01):
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError, match="another"):
        async with read_within(60.0):
            raise TimeoutError("another")
