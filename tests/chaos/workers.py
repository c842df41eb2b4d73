"""Modelled workers: machines that are preempted, processes that end, connections that break.

As the shipped worker does, a process keeps what it sampled until the controller surely has it, goes on with a request
that is claimed from where the claim stands, and forgets what nobody claims. Nothing here is a task: a process costs a
timer per flush, so a thousand of them are cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import msgspec
from tests.chaos.links import Wire
from tests.chaos.site import SLOW_SHARE, Site, Timers, hello
from tests.chaos.texts import text
from tests.chaos.trainers import Trainer

from rookery import protocol

BEAT_SECONDS = 2.0
KEEP_SECONDS = 60.0
"""How long a process keeps what nobody claims."""
DIAL_SECONDS = 1.0
"""Between attempts to reach a controller that does not answer."""
WANT_SECONDS = 30.0
"""How long a new ticket is waited for."""
LOADING_SHARE = 0.3
"""Of new processes, those that dial in before their base model is loaded."""


@dataclass(eq=False)
class Held:
    """One request in a process. ``at`` is its next token's number, ``start`` its first one sampled here."""

    generate: protocol.Generate
    tokens: list[int]
    logprobs: list[float]
    finish: str
    start: int
    at: int
    sent: int
    spans: list[tuple[int, protocol.AdapterRef | None]]
    """From which token on which version samples."""
    claimed: bool = True
    told: bool = False
    ready: bool = False
    """Its adapter is here."""
    since: float = 0.0
    """From when on nobody claims it."""
    broken: bool = False
    """The engine will give it up with an error."""


class Machine:
    """A place for worker processes, one after the other."""

    def __init__(self, site: Site, number: int, *, trains: bool) -> None:
        self.name = f"w{number}"
        self.trains = trains
        self.rows = site.dice.random.choice((4, 8, 16))
        self.slow = site.dice.chance(SLOW_SHARE)
        self.process: Process | None = None
        self.disk: dict[str, None] = {}
        """Adapters that a process of this machine has pulled."""
        self._site = site
        self._births = 0

    def start(self) -> None:
        """A new process begins."""
        self._births += 1
        self.process = Process(self._site, self, f"{self.name}-{self._births}")

    def new_disk(self) -> dict[str, None]:
        """It came back as another machine."""
        self.disk = {}
        return self.disk

    def end(self) -> None:
        """The process is gone; another one comes when the machine is back."""
        process, self.process = self.process, None
        if process is not None:
            process.gone = True
            self._site.events.note("gone", process.instance)
        mean = self._site.plan.rebirth
        Timers().after(self._site.dice.about(mean), self.start)


class Process(Timers):
    """One worker process, across its connections."""

    def __init__(self, site: Site, machine: Machine, instance: str) -> None:
        super().__init__()
        self.site, self.machine, self.instance = site, machine, instance
        self.name = machine.name
        self.link: Wire | None = None
        self.epoch = -1
        self.cache = machine.disk if not site.dice.chance(site.plan.disk_losses) else machine.new_disk()
        self.held: dict[str, Held] = {}
        self.pulls: dict[str, list[str]] = {}
        """By hash under way, the requests that wait for it."""
        self.tickets: dict[str, str] = {}
        self.trainer = Trainer(self) if machine.trains else None
        self.frozen = False
        self.draining = False
        self._backlog: list[tuple[Wire, Any]] = []
        self._speed = site.dice.random.randint(2, 8) if not machine.slow else 1
        self._progress = self._generated = 0
        self._last_epoch = -1
        self._loading = site.dice.chance(LOADING_SHARE)
        self._next_beat = 0.0
        self.after(self._jitter(DIAL_SECONDS), self.dial)
        self.after(self._jitter(site.plan.flush), self._tick)

    def _jitter(self, seconds: float) -> float:
        return seconds * (0.5 + self.site.dice.random.random())

    # --- its connection -----------------------------------------------------------------------------------------------

    def dial(self) -> None:
        if self.link is not None or self.draining:
            return
        link = self.site.dial(self, "worker") if not self.frozen else None
        if link is None:
            self.after(self._jitter(DIAL_SECONDS), self.dial)
            return
        self.link, self.epoch = link, -1
        link.say(
            hello(
                self.name, self.instance, roles=self._roles(), rows=self.machine.rows,
                adapters=list(self.cache), running=list(self.held), loading=self._loading,
            )
        )  # fmt: skip
        self.after(30.0, self._unwelcome, link)

    def _roles(self) -> list[Literal["rollout", "train"]]:
        if self.trainer is None:
            return ["rollout"]
        return ["rollout", "train"] if self.site.plan.seeding else ["train"]

    def _unwelcome(self, link: Wire) -> None:
        if self.link is link and self.epoch < 0:
            link.finish()
            self.closed(link)

    def say(self, message: Any) -> None:
        """Under the present epoch, where there is a connection."""
        if self.link is not None and self.epoch >= 0:
            message.epoch = self.epoch
            self.link.say(message)

    def closed(self, link: Wire) -> None:
        if self.frozen:
            self._backlog.append((link, None))
            return
        if self.gone or link is not self.link:
            return
        self._last_epoch = max(self.epoch, self._last_epoch)
        self.link, self.epoch = None, -1
        for held in self.held.values():
            if held.claimed:
                held.claimed, held.since = False, self.now
        if self.trainer is not None:
            self.trainer.drop()
        self.after(self._jitter(DIAL_SECONDS), self.dial)

    def heard(self, link: Wire, message: Any) -> None:
        if self.frozen:
            self._backlog.append((link, message))
        elif not self.gone and link is self.link:
            self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case protocol.Welcome():
                self._welcomed(message)
            case protocol.Generate():
                self._generate(message)
            case protocol.Abort():
                self.held.pop(message.request, None)
            case protocol.SwitchAdapter():
                self._switch(message)
            case protocol.PrefetchAdapters():
                self._have(message.refs)
            case protocol.TicketGrant():
                self.tickets[message.hash] = message.ticket
                if message.hash in self.pulls:
                    self._pull([message.hash])
            case protocol.EvictArtifacts():
                for digest in message.hashes:
                    self.cache.pop(digest, None)
                if message.policy and self.trainer is not None:
                    self.trainer.forget(message.policy)
            case protocol.HelloRejected():
                self.site.events.fail("jobs", f"{self.name} is refused: {message.reason}", self.name)
            case protocol.ServeArtifact():
                pass
            case _:
                if self.trainer is None:
                    what = type(message).__name__
                    self.site.events.fail("jobs", f"{self.name} does not train and was sent {what}", self.name)
                else:
                    self.trainer.handle(message)

    def _welcomed(self, welcome: protocol.Welcome) -> None:
        before, self.epoch, self.name = self._last_epoch, welcome.epoch, welcome.name
        if before >= 0 and self.site.dice.chance(self.site.plan.stale_frames):
            self._say_stale(before)
        if self._loading:
            self.after(self.site.dice.about(1.0), self._loaded)

    def _say_stale(self, epoch: int) -> None:
        """What was meant for the connection before this one."""
        assert self.link is not None
        chunks = [self._chunk(held, held.start, held.at, held.finish) for held in self.held.values()]
        if chunks:
            self.link.say(protocol.Output(epoch=epoch, chunks=chunks))
        self.link.say(protocol.Draining(epoch=epoch))

    def _loaded(self) -> None:
        if self._loading and self.link is not None and self.epoch >= 0 and not self.frozen:
            self._loading = False
            self.say(protocol.Ready(epoch=0, model_hash="model", max_context=2048, device="modelled", dtype="bfloat16"))

    # --- what happens to it -------------------------------------------------------------------------------------------

    def kill(self, *, told: bool) -> None:
        """It ends this moment; ``told``: whether its system closes the connection for it."""
        if self.link is not None:
            self.link.forsake()
            self.link.cut(heard_here=told, heard_there=False)
        self.machine.end()

    def drain(self) -> None:
        """SIGTERM: what was sampled is handed over, then it says goodbye and ends."""
        if self.frozen or self.draining:
            return
        self.draining, self._loading = True, False
        self._flush()
        if self.trainer is not None:
            self.trainer.drop()
        self.say(protocol.Draining(epoch=0))
        self.after(self._jitter(self.site.plan.flush), self._leave)

    def _leave(self) -> None:
        if self.link is not None:
            self.link.finish()
        self.machine.end()

    def freeze(self, seconds: float) -> None:
        if not self.frozen:
            self.frozen = True
            self.after(seconds, self._thaw)

    def _thaw(self) -> None:
        self.frozen = False
        self._flush()  # it does not know yet what it has missed
        backlog, self._backlog = self._backlog, []
        for link, message in backlog:
            if message is None:
                self.closed(link)
            else:
                self.heard(link, message)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _generate(self, generate: protocol.Generate) -> None:
        if generate.adapter is not None and generate.adapter.ticket:
            self.tickets[generate.adapter.hash] = generate.adapter.ticket
        held = self.held.get(generate.request)
        if held is not None and self._continues(held, generate):
            held.claimed, held.told, held.sent = True, False, len(generate.prefix_tokens)
            return
        tokens, logprobs, finish = text(generate.seed, generate.max_tokens)
        start = len(generate.prefix_tokens)
        if generate.prefix_tokens != tokens[:start]:
            self.site.events.fail("given", f"{generate.request} was given another text", generate.request)
        self.held[generate.request] = held = Held(
            generate, tokens, logprobs, finish, start, start, start, [(start, generate.adapter)]
        )
        held.broken = not self.site.calm and self.site.dice.chance(self.site.plan.engine_errors)
        if generate.adapter is None or generate.adapter.hash in self.cache:
            held.ready = True
        else:
            self._have([generate.adapter], generate.request)

    @staticmethod
    def _continues(held: Held, claim: protocol.Generate) -> bool:
        mine = held.generate.adapter
        same = (mine and mine.hash) == (claim.adapter and claim.adapter.hash) and held.generate.seed == claim.seed
        return same and held.start <= len(claim.prefix_tokens) <= held.at

    def _switch(self, message: protocol.SwitchAdapter) -> None:
        held = self.held.get(message.request)
        if held is None:
            return
        self.tickets[message.adapter.hash] = message.adapter.ticket
        held.generate = msgspec.structs.replace(held.generate, adapter=message.adapter)
        if message.adapter.hash in self.cache:
            self._changes(held, message.adapter)
        else:
            self._have([message.adapter], message.request)

    @staticmethod
    def _changes(held: Held, ref: protocol.AdapterRef | None) -> None:
        """From its next token on it samples from ``ref``."""
        held.ready = True
        if held.spans[-1][0] == held.at:
            held.spans.pop()
        held.spans.append((held.at, ref))

    def _have(self, refs: list[protocol.AdapterRef], request: str = "") -> None:
        """Pull adapters, for a request or ahead of need; those named together come together."""
        here = [ref.hash for ref in refs if ref.hash in self.cache]
        if here:
            self.say(protocol.AdaptersCached(epoch=0, hashes=here))
        lacks = [ref for ref in refs if ref.hash not in self.cache]
        self.tickets.update((ref.hash, ref.ticket) for ref in lacks if ref.ticket)
        new = [ref.hash for ref in lacks if ref.hash not in self.pulls]
        for digest in new:
            self.pulls[digest] = []
        if new:
            self._pull(new)
        if request:
            for ref in lacks:
                self.pulls[ref.hash].append(request)

    def _pull(self, hashes: list[str]) -> None:
        seconds = self.site.dice.about(self.site.plan.pull) * (10 if self.machine.slow else 1)
        self.after(seconds, self._pulled, hashes)

    def _pulled(self, hashes: list[str]) -> None:
        controller, dice = self.site.controller, self.site.dice
        if controller is None or self.link is None or self.frozen:
            self._pull(hashes)
            return
        came = []
        for digest in hashes:
            if digest not in self.pulls:
                continue
            if controller.tickets.reads(self.tickets.get(digest, ""), digest):
                came.append(digest)
            else:
                self.say(protocol.TicketRequest(epoch=0, hash=digest))
                self.after(WANT_SECONDS, self._forsaken, digest)
        if came and not self.site.calm and dice.chance(self.site.plan.pull_failures):
            self._failed(came.pop())
        self.cache.update(dict.fromkeys(came))
        if came:
            self.say(protocol.AdaptersCached(epoch=0, hashes=came))
        for digest in came:
            for name in self.pulls.pop(digest):
                held = self.held.get(name)
                if held is not None and held.generate.adapter is not None and held.generate.adapter.hash == digest:
                    self._changes(held, held.generate.adapter)

    def _failed(self, digest: str) -> None:
        """A pull came to nothing: who waits for it is given back."""
        self.say(protocol.PullFailed(epoch=0, hash=digest, error="the network is unreachable"))
        for name in self.pulls.pop(digest):
            if (held := self.held.get(name)) is not None and not held.ready:
                del self.held[name]
                self.say(protocol.Output(epoch=0, chunks=[self._chunk(held, held.at, held.at, "abort")]))

    def _forsaken(self, digest: str) -> None:
        """No ticket came."""
        for name in self.pulls.pop(digest, []):
            held = self.held.get(name)
            if held is not None and not held.ready and held.generate.adapter is not None:
                self._have([held.generate.adapter], name)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """A flush interval has passed."""
        self.after(self.site.plan.flush, self._tick)
        if self.frozen:
            return
        decoding = 0
        for held in self.held.values():
            if held.ready and held.claimed and held.at < len(held.tokens):
                held.at = min(held.at + self._speed, len(held.tokens))
                self._generated += self._speed
                decoding += 1
                if decoding == self.machine.rows:
                    break
        self._progress += decoding > 0
        if self.link is not None and self.epoch >= 0:
            self._flush()
            if self.now >= self._next_beat:
                self._next_beat = self.now + BEAT_SECONDS
                self._beat(decoding)

    def _beat(self, decoding: int) -> None:
        training = self.trainer.waiting if self.trainer is not None else 0
        progress = self._progress + (self.trainer.done if self.trainer is not None else 0)
        self.say(
            protocol.Heartbeat(
                epoch=0, progress=progress, active=decoding, waiting=0, training=training, adapters=len(self.cache),
                generated=self._generated, trained=0, decode_seconds=0.0, train_seconds=0.0, memory_bytes=0,
            )
        )  # fmt: skip
        before = self.now - KEEP_SECONDS
        for name in [n for n, held in self.held.items() if (held.told or not held.claimed) and held.since < before]:
            del self.held[name]

    def _flush(self) -> None:
        chunks = []
        for held in self.held.values():
            if not held.claimed or held.told:
                continue
            over = held.at == len(held.tokens) and held.ready
            if held.broken and held.at > held.start:
                held.told, held.since, over = True, self.now, True
                chunks.append(self._chunk(held, held.sent, held.sent, "error"))
            elif over or held.at > held.sent:
                chunks += self._pieces(held, over)
                held.sent, held.told, held.since = held.at, over, self.now
        if not chunks or self.link is None or self.epoch < 0:
            return
        self.say(protocol.Output(epoch=0, chunks=chunks))
        if not self.site.calm and self.site.dice.chance(self.site.plan.duplicates):
            again = [chunk for chunk in chunks if chunk.finish not in ("error", "abort")]
            self.say(protocol.Output(epoch=0, chunks=again))

    def _pieces(self, held: Held, over: bool) -> list[protocol.TokenChunk]:
        """From what was sent on, a chunk for each version."""
        begin = held.sent
        if begin > held.start and not self.site.calm and self.site.dice.chance(self.site.plan.duplicates):
            begin = self.site.dice.random.randint(held.start, begin)
        edges = sorted({begin, held.at, *(at for at, _ in held.spans if begin < at < held.at)})
        if len(edges) == 1:
            edges.append(held.at)
        pieces = [self._chunk(held, first, last, "") for first, last in pairwise(edges)]
        if over:
            pieces[-1].finish = held.finish  # type: ignore[assignment]
        return pieces

    @staticmethod
    def _chunk(held: Held, first: int, last: int, finish: str) -> protocol.TokenChunk:
        ref = next(ref for at, ref in reversed(held.spans) if at <= first or at == held.start)
        return protocol.TokenChunk(
            request=held.generate.request, offset=first, tokens=held.tokens[first:last],
            logprobs=held.logprobs[first:last], version=ref.version if ref else 0, policy=ref.policy if ref else "",
            finish=finish, error="the engine broke" if finish == "error" else "",  # type: ignore[arg-type]
        )  # fmt: skip
