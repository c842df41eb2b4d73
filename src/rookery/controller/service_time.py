"""Processor time of the service by tenant: how much each took, and whose requests wait because of it.

The event loop answers everybody. While a tenant alone uses the service it may take all of its time, for which it waits
:data:`LONGEST_PAUSE` at most once another one comes. While others work here too, a tenant may take
``tenant_service_share`` seconds of it in a second: beyond that its next requests wait, one after another, and are
refused with status 429 after :data:`LONGEST_WAIT`, those for work after :data:`LONGEST_WORK_WAIT`. The response to a
request that is refused before it waits, such as one beyond the tenant's rate, waits in the same line, for
:data:`LONGEST_PAUSE` at most, and one that has waited before it was refused for the rest of that: a client that sends
its next request at each refusal takes no more than its share. Refusals of one moment that have waited for so long
follow each other by :data:`SHORTEST_PAUSE`.

A request's time is known when it ends. It is charged the mean of the tenant's earlier requests when it begins, and the
rest as it runs, so that a hundred requests in one moment do not all begin.

Checks of jobs and datasets are counted in the same way, apart from requests: their processes' time can be minutes, and
a tenant that checked a large dataset continues its other work. So are the messages of its environment hosts, of
which no more is read while they are beyond its share. The event loop's time for jobs is counted, too; of that tenants
get equal parts (:mod:`rookery.tenant_loop`).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import islice
from weakref import WeakValueDictionary

from cachetools import LRUCache

from rookery.clock import Clock
from rookery.errors import TooManyRequests

BURST = 0.25
"""Seconds of service time that a tenant may take at once after a pause: some fifty small requests."""

LONGEST_PAUSE = 5.0
"""Seconds that a tenant's debt may delay the next part of a stream or of a body, or a refusal."""

CHECK_BURST, CHECK_PAUSE = 2.0, 20.0
"""Seconds of checks that a tenant may take at once after a pause, some forty of small jobs; and those that the longest
check may delay its next. The share holds for checks of up to seven seconds. A longer one yields the processor to all
other work, and somebody who uploaded a large dataset wants to submit a job on it."""

BESIDE_JOBS = 0.4
"""Of its share, the part that a tenant may take while jobs of others run: each of their steps waits several times for
the event loop, and twice as long where requests take another quarter of it."""

LONGEST_WAIT, LONGEST_WORK_WAIT = 10.0, 30.0
"""Seconds that a request waits for its turn, less than clients' timeouts: of one that reads, and of one for work, such
as a sample or a training step, whose caller waits for longer anyway."""

ACTIVE_SECONDS = 10.0
"""A tenant is active for so long after a request."""

FIRST_GUESS, MEMORY = 0.003, 0.1
"""Seconds of the first request of a tenant, and the weight of the newest one in the mean."""

SHORTEST_PAUSE = 0.005
"""Between two looks at a tenant's turn."""

KEYLESS_SHARE, ADDRESS_SHARE = 0.1, 0.05
"""Seconds of service time in a second for requests without a valid key while tenants work: of all of them, and of one
address. A scrape of the metrics takes 3 ms, a refused request 0.4 ms."""

KEYLESS_ADDRESSES, KEYLESS_WAITING = 10_000, 256
"""Addresses whose time is known, and requests of one of them that wait at once."""

REFUSED_WAITING = 1024
"""Refusals of one tenant that wait at once. The SDKs of OpenAI and Tinker open up to 1,000 connections."""


class ResponseLine:
    """Responses that wait one after another while their sender is beyond its share."""

    def __init__(
        self,
        clock: Clock,
        late: Callable[[str], float],
        turns: WeakValueDictionary[str, asyncio.Lock],
        most: int,
        longest: float,
    ) -> None:
        """``late(sender)``: the seconds by which a sender is beyond its share. Responses take their turns among all
        that hold one of the ``turns`` of their sender; ``most`` of a sender wait at once. Those that have waited
        ``longest`` seconds follow each other by :data:`SHORTEST_PAUSE`."""
        self._clock = clock
        self._late = late
        self._turns = turns
        self._most, self._longest = most, longest
        self._waiting: Counter[str] = Counter()
        self._overdue: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def turn(self, sender: str, gone: Callable[[], bool], waited: float = 0.0) -> bool:
        """Returns when it is the turn of a response to the sender, whose request has ``waited`` before, or when its
        client is ``gone()``. False at once where too many of them wait."""
        lock = self._turns.setdefault(sender, asyncio.Lock())
        if 0 < self._longest <= waited or not (lock.locked() or self._late(sender)):
            return True
        if self._waiting[sender] >= self._most:
            return False
        self._waiting[sender] += 1
        try:
            async with asyncio.timeout(self._longest - waited), lock:
                while (late := self._late(sender)) > 0 and not gone():
                    await self._clock.sleep(max(late, SHORTEST_PAUSE))
        except TimeoutError:
            overdue = self._overdue.setdefault(sender, asyncio.Lock())
            async with overdue:  # they came together, and their clients' next requests would
                if not gone():
                    await self._clock.sleep(SHORTEST_PAUSE)
        finally:
            self._waiting[sender] -= 1
            if not self._waiting[sender]:
                del self._waiting[sender]
        return True


class RequestAccount:
    """The service time of one request."""

    def __init__(self, charged: float) -> None:
        self.charged = charged
        """Of it, the seconds that were charged in advance and are not used yet."""
        self.spent = 0.0


class ServiceTime:
    """``share(tenant)``: seconds in a second that it may take; ``working()``: the tenants whose jobs run now."""

    def __init__(
        self,
        clock: Clock,
        share: Callable[[str], float],
        refuse: Callable[[str, float], TooManyRequests],
        working: Callable[[], set[str]] = set,
        *,
        burst: float = BURST,
        longest_pause: float = math.inf,
    ) -> None:
        """``refuse(reason, seconds)`` makes the error of a request that has waited too long. What is beyond ``burst``
        delays the next request by ``longest_pause`` seconds at most."""
        self._burst, self._longest_pause = burst, longest_pause
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By tenant, since the service started."""
        self._working = working
        self._clock = clock
        self._full_share = share
        self._refuse = refuse
        self._debts: dict[str, tuple[float, float]] = {}
        """By tenant: when, and the seconds beyond its share then."""
        self._means: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        """When each tenant's last request came, the newest last."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock lives as long as a request holds it or waits for it."""
        self._refusals = ResponseLine(clock, self.late, self._turns, REFUSED_WAITING, LONGEST_PAUSE)

    def apart(self, *, longest_pause: float, burst: float = BURST) -> ServiceTime:
        """Other work of the same tenants, which waits for itself alone, also while requests of others come."""
        other = ServiceTime(
            self._clock, self._full_share, self._refuse, self._working, burst=burst, longest_pause=longest_pause
        )
        other._seen = self._seen
        return other

    def spend(self, tenant: str, seconds: float, account: RequestAccount | None = None) -> None:
        """The service has worked for the tenant."""
        if tenant:
            self.seconds[tenant] += seconds
            if account is not None:
                account.spent += seconds
                prepaid = min(account.charged, seconds)
                account.charged -= prepaid
                seconds -= prepaid
            owed = self.debt(tenant) + seconds
            if owed > self._burst:  # a smaller one is below every bound
                owed = min(owed, self._most(tenant))
            self._debts[tenant] = (self._clock.monotonic(), owed)

    def _most(self, tenant: str) -> float:
        """The largest debt of the tenant. Nobody waited for the time of one that is alone: it refuses no request of
        later."""
        if self._others_work(tenant):
            return self._burst + self._longest_pause * self._share(tenant)
        return self._burst + min(self._longest_pause, LONGEST_PAUSE) * self._full_share(tenant) * BESIDE_JOBS

    def debt(self, tenant: str) -> float:
        """The seconds that the tenant took beyond its share; they are forgotten as time passes."""
        since, debt = self._debts.get(tenant, (0.0, 0.0))
        return max(0.0, debt - (self._clock.monotonic() - since) * self._share(tenant))

    def _share(self, tenant: str) -> float:
        """The seconds in a second that the tenant may take now."""
        return self._full_share(tenant) * (BESIDE_JOBS if self._working() - {tenant} else 1.0)

    async def begin(self, tenant: str, longest: float = LONGEST_WAIT) -> RequestAccount:
        """Returns when it is the turn of a request of the tenant. Raises :class:`TooManyRequests` where that would take
        more than ``longest`` seconds."""
        self._seen.pop(tenant, None)
        began = self._seen[tenant] = self._clock.monotonic()
        lock = self._turns.setdefault(tenant, asyncio.Lock())
        if lock.locked() or (self.debt(tenant) > self._burst and self._others_work(tenant)):
            async with lock:
                while (late := self.debt(tenant) - self._burst) > 0 and self._others_work(tenant):
                    pause = late / self._share(tenant)
                    if self._clock.monotonic() + pause - began > longest:
                        raise self._refuse(
                            f"your requests take more than {self._share(tenant):g} s of the service's time in a second"
                            " while others work here",
                            pause,
                        )
                    await self._clock.sleep(max(pause, SHORTEST_PAUSE))
                return self._charge(tenant)
        return self._charge(tenant)

    async def turn(self, tenant: str, gone: Callable[[], bool], came: float | None = None) -> bool:
        """Returns when it is the turn of a response that refuses a request of the tenant before :meth:`begin` let it
        begin, for which it ``came`` to the line then; after :data:`LONGEST_PAUSE` at most, or when its client is
        ``gone()``. False at once where too many of them wait."""
        waited = 0.0 if came is None else self._clock.monotonic() - came
        return await self._refusals.turn(tenant, gone, waited)

    def late(self, tenant: str) -> float:
        """Seconds by which the next part of a stream, of a body or of a host's messages waits, where the tenant took
        more than its share; :data:`LONGEST_PAUSE` at most."""
        if (late := self.debt(tenant) - self._burst) <= 0 or not self._others_work(tenant):
            return 0.0
        return min(max(late / self._share(tenant), SHORTEST_PAUSE), LONGEST_PAUSE)

    async def pause(self, tenant: str) -> float:
        """Waits while the tenant is :meth:`late`. Returns the seconds."""
        if seconds := self.late(tenant):
            await self._clock.sleep(seconds)
        return seconds

    def end(self, tenant: str, account: RequestAccount) -> None:
        """The request has ended. Time that it spends later, where its caller did not wait, is charged as it comes."""
        mean = self._means.get(tenant, FIRST_GUESS)
        self._means[tenant] = mean + MEMORY * (account.spent - mean)
        self._debts[tenant] = (self._clock.monotonic(), max(0.0, self.debt(tenant) - account.charged))
        account.charged = 0.0

    def _charge(self, tenant: str) -> RequestAccount:
        mean = self._means.get(tenant, FIRST_GUESS)
        self._debts[tenant] = (self._clock.monotonic(), self.debt(tenant) + mean)
        return RequestAccount(mean)

    def in_use(self) -> bool:
        """Whether a tenant works here."""
        return self._others_work("")

    def _others_work(self, tenant: str) -> bool:
        now = self._clock.monotonic()
        newest = islice(reversed(self._seen.items()), 2)  # of which one at least is another tenant's
        if any(other != tenant and now - seen < ACTIVE_SECONDS for other, seen in newest):
            return True
        return bool(self._working() - {tenant})


class KeylessTime:
    """The service's time for requests without a valid key, of each address and of all. While tenants work, which
    ``in_use()`` says, the responses of an address beyond its share wait one after another."""

    def __init__(self, clock: Clock, in_use: Callable[[], bool]) -> None:
        self._clock = clock
        self._in_use = in_use
        self._debts: LRUCache[str, tuple[float, float]] = LRUCache(KEYLESS_ADDRESSES)
        """By address: when, and the seconds beyond its share then."""
        self._all = (0.0, 0.0)
        """Of all addresses: when, and the seconds beyond their share then."""
        self._line = ResponseLine(clock, self._late, WeakValueDictionary(), KEYLESS_WAITING, LONGEST_WAIT)

    def spend(self, address: str, seconds: float) -> None:
        """The service has worked for a request of the address."""
        now = self._clock.monotonic()
        self._all = (now, self._debt(self._all, KEYLESS_SHARE) + seconds)
        self._debts[address] = (now, self._debt(self._debts.get(address, (now, 0.0)), ADDRESS_SHARE) + seconds)

    async def turn(self, address: str, gone: Callable[[], bool]) -> bool:
        """Returns when it is the turn of a response to the address, after :data:`LONGEST_WAIT` at most, or when its
        client is ``gone()``. False at once where too many of them wait."""
        return await self._line.turn(address, gone)

    def _late(self, address: str) -> float:
        """The seconds by which the address is beyond its share, or all of them are beyond theirs."""
        if not self._in_use():
            return 0.0
        alone = (self._debt(self._debts.get(address, (0.0, 0.0)), ADDRESS_SHARE) - BURST) / ADDRESS_SHARE
        return max(0.0, alone, (self._debt(self._all, KEYLESS_SHARE) - BURST) / KEYLESS_SHARE)

    def _debt(self, known: tuple[float, float], share: float) -> float:
        since, debt = known
        return max(0.0, debt - (self._clock.monotonic() - since) * share)
