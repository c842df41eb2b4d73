"""Drafts for speculative decoding: what a text may continue with, from the texts of its group.

Promises:

* A request drafts from its own prompt and text, and from those of the requests that name the same ``group``; a request
  without a group from its own alone. No text is reachable from another group.
* Drafts decide when a token is sampled, never which: a wrong one costs time only.
* Memory is bounded by ``MAX_STATES``, of indexes and of ended texts that wait to be indexed; further ones are left
  out. A request without a group is forgotten when it ends. A group of which no request
  is here is kept for further ones as long as it is among the ``MAX_IDLE`` last of those and there is room.
* Drafts are off for a number of rows where they cost time (``DraftAccount``). Steps beside training, on a part of the
  cores, have separate costs and accounts.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cachetools import LRUCache

from rookery.scheduling.speculation import Acceptance, DraftAccount, StepCosts, draft_budget, kind_of
from rookery.worker.engine.request import EngineRequest

MAX_DRAFT = 8
"""Most draft tokens of a request in a step, as in Seer: an accepted ninth is rare, and the eight are free for one row
on two cores."""

MAX_STATES = 1 << 17
"""Of all indexes together, a token needs at most two: about 40 MB. Beyond, they do not grow."""

PROMPT_TOKENS = 256
"""Of a prompt's last tokens are in the index: an answer repeats what it was asked last."""

AT_ONCE = 512
"""Tokens that are indexed before a step: where drafts were off, a group's texts may be thousands of tokens longer,
which take as long as a step."""

MAX_LINKS = 64
"""Suffixes of a place whose occurrences are counted: in a text that repeats one token, there are as many as tokens."""

MAX_IDLE = 64
"""Groups without a request here: their next turns, or members that wait for a row, come within as many groups."""


class SuffixIndex:
    """A suffix automaton of several texts (Blumer et al., 1985; generalised, online). A state is a set of substrings
    that end at the same places; 0 is the empty one."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._count = array("i", [-1]), array("i", [0]), array("i", [0])
        """The state of the longest substring that ends at more places; the longest substring's tokens; places."""

    def __len__(self) -> int:
        return len(self._next)

    def extend(self, state: int, token: int, *, again: bool = False) -> int:
        """The state of a text, whose state was ``state``, after another token. ``again``: where the same text was
        indexed before, it is not counted twice."""
        following = self._next[state].get(token)
        if following is not None:
            exact = self._length[following] == self._length[state] + 1
            end = following if exact else self._split(state, token, following)
            if exact and again:
                return end
        else:
            end, at = self._add({}, -1, self._length[state] + 1, 0), state
            while at >= 0 and token not in self._next[at]:
                self._next[at][token] = end
                at = self._link[at]
            if at >= 0:
                other = self._next[at][token]
                exact = self._length[other] == self._length[at] + 1
                self._link[end] = other if exact else self._split(at, token, other)
            else:
                self._link[end] = 0
        at, links = end, 0
        while at > 0 and links < MAX_LINKS:
            self._count[at] += 1
            at, links = self._link[at], links + 1
        return end

    def draft(self, state: int, most: int) -> list[tuple[int, int, float]]:
        """Up to ``most`` tokens with which a text in ``state`` may continue: what followed its longest suffix that was
        followed by anything, most often. Each with the tokens matched before it, and its share of what followed."""
        draft: list[tuple[int, int, float]] = []
        matched = self._length[state]
        while len(draft) < most:
            while state > 0 and not self._next[state]:
                state = self._link[state]
                matched = min(matched, self._length[state])
            if state <= 0:
                break
            followers = self._next[state]
            token = max(followers, key=lambda t: self._count[followers[t]])
            total = sum(self._count[other] for other in followers.values())
            draft.append((token, matched, self._count[followers[token]] / max(total, 1)))
            state, matched = followers[token], matched + 1
        return draft

    def _add(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        return len(self._next) - 1

    def _split(self, before: int, token: int, state: int) -> int:
        """A separate state for the substrings of ``state`` that are no longer than those of ``before`` and a token:
        they end at one more place from now on."""
        length, count = self._length[before] + 1, self._count[state]
        short = self._add(dict(self._next[state]), self._link[state], length, count)
        self._link[state] = short
        while before >= 0 and self._next[before].get(token) == state:
            self._next[before][token] = short
            before = self._link[before]
        return short


@dataclass(eq=False)
class _Text:
    """A request's text in its group's index, as far as ``indexed``, and a draft to be compared with what follows."""

    prompt: Sequence[int]
    tokens: list[int]
    """The request's own list, which grows."""
    state: int = 0
    indexed: int = 0
    draft: list[tuple[int, int, float]] = field(default_factory=list)
    drafted_at: int = 0

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def unread(self) -> int:
        """Tokens that are not in the index."""
        return len(self) - self.indexed


@dataclass(eq=False)
class _GroupTexts:
    index: SuffixIndex = field(default_factory=SuffixIndex)
    live: dict[str, _Text] = field(default_factory=dict)
    """By request."""
    ended: list[_Text] = field(default_factory=list)
    """Not yet indexed to their ends."""


class Speculator:
    """The drafts of an engine's requests, and how many of them a step verifies."""

    def __init__(
        self,
        costs: Callable[[], StepCosts] = StepCosts,
        account: Callable[[], DraftAccount] = DraftAccount,
        *,
        max_states: int = MAX_STATES,
        max_idle: int = MAX_IDLE,
        at_once: int = AT_ONCE,
    ) -> None:
        self._max_states, self._max_idle, self._at_once = max_states, max_idle, at_once
        self._modes = [(costs(), account()) for _ in range(2)]
        """The costs and the account of steps with all cores, and of those next to training."""
        self._groups: dict[tuple[str, ...], _GroupTexts] = {}
        """Groups with requests here; by policy and name, or by the request that has no group."""
        self._idle: dict[tuple[str, ...], _GroupTexts] = {}
        """Groups without requests here, the longest idle first."""
        self._acceptance: LRUCache[tuple[str, bool], Acceptance] = LRUCache(256)
        """By policy, and whether the request has a group."""
        self.unread = 0
        """Tokens of ended requests that are not indexed yet."""
        self._looking = 0.0
        """Seconds of ``propose`` before the present step."""

    @property
    def states(self) -> int:
        """The states of all indexes."""
        return sum(len(group.index) for group in (*self._groups.values(), *self._idle.values()))

    def begin(self, request: EngineRequest) -> None:
        """The request may be given to ``propose`` until its ``end``."""
        key = _key(request)
        group = self._groups.get(key) or self._idle.pop(key, _GroupTexts())
        self._groups[key] = group
        group.live[request.params.request] = _Text(request.params.prompt[-PROMPT_TOKENS:], request.tokens)

    def end(self, request: EngineRequest) -> None:
        """The request has ended; does nothing where it did not begin."""
        key = _key(request)
        group = self._groups.get(key)
        if group is None or (text := group.live.pop(request.params.request, None)) is None:
            return
        if self.unread + text.unread <= self._max_states:
            group.ended.append(text)
            self.unread += text.unread
        if not group.live:
            del self._groups[key]
            if request.params.group:
                self._idle[key] = group
                while len(self._idle) > self._max_idle:
                    self._forget()
            else:
                self._clear(group)

    def propose(
        self, rows: Sequence[EngineRequest], room: Sequence[int], *, others: bool = True, beside: bool = False
    ) -> list[list[int]]:
        """Draft tokens of each row that its next step should verify, at most ``room`` [rows]. ``others``: further
        requests are in the engine; ``beside``: it computes beside training."""
        self._looking = 0.0
        costs, account = self._modes[beside]
        able = [row for row, most in zip(rows, room, strict=True) if most > 0]
        if not able or not account.allows(len(rows)):
            return [[] for _ in rows]
        began = time.perf_counter()
        while (full := self.states > self._max_states) and self._idle:
            self._forget()
        grown = 0 if full else self._grow([self._groups[key] for key in dict.fromkeys(map(_key, able))])
        drafts, chances, drafting = [], [], time.perf_counter()
        growing = (drafting - began) * len(rows) / max(grown, len(rows))  # of a step that follows another one
        for row, most in zip(rows, room, strict=True):
            draft = self._draft(row)[:most] if most > 0 else []
            drafts.append([token for token, _, _ in draft])
            chances.append(self._accepted(row).chances([kind_of(matched, share) for _, matched, share in draft]))
        spent, texts = time.perf_counter() - drafting + growing, [len(row.tokens) for row in rows]
        lengths = draft_budget(chances, costs, spent, others=others, texts=texts)
        self._looking = time.perf_counter() - began
        return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]

    def observe(
        self, rows: int, positions: int, tokens: int, seconds: float, *, others: bool = True, beside: bool = False
    ) -> None:
        """A step of so many rows and positions gave so many tokens and took so long, ``propose`` not counted;
        ``others`` and ``beside`` as there."""
        costs, account = self._modes[beside]
        costs.observe(rows, positions, seconds)
        looking, self._looking = self._looking, 0.0
        account.observe(rows, tokens, positions - rows, seconds, looking, others=others)

    def _grow(self, groups: Sequence[_GroupTexts]) -> int:
        """Index what their texts have become, ``at_once`` tokens at most, those that continue first. Returns the number
        of tokens."""
        left = self._at_once
        for group in groups:
            for text in group.live.values():
                left -= _index(group.index, text, left)
        for group in groups:
            while left and group.ended:
                text = group.ended[-1]
                left -= (grown := _index(group.index, text, left))
                self.unread -= grown
                if not text.unread:
                    group.ended.pop()
        return self._at_once - left

    def _draft(self, row: EngineRequest) -> list[tuple[int, int, float]]:
        """The draft from the texts as far as they are indexed, after the row's draft before was compared with its
        text."""
        group = self._groups[_key(row)]
        text = group.live[row.params.request]
        self._compare(row, text)
        draft = group.index.draft(text.state, MAX_DRAFT) if text.indexed == len(text) else []
        if not text.draft:
            text.draft, text.drafted_at = draft, len(text.tokens)
        return draft

    def _compare(self, row: EngineRequest, text: _Text) -> None:
        """Records how far the draft was right, verified or not, once that is known."""
        sampled = text.tokens[text.drafted_at : text.drafted_at + len(text.draft)]
        right = accepted_tokens([token for token, _, _ in text.draft][: len(sampled)], sampled)
        if right == len(sampled) < len(text.draft):
            return
        for i, (_, matched, share) in enumerate(text.draft[: right + 1]):
            self._accepted(row).record(kind_of(matched, share), right=i < right)
        text.draft = []

    def _accepted(self, row: EngineRequest) -> Acceptance:
        key = (_policy(row), bool(row.params.group))
        found: Acceptance | None = self._acceptance.get(key)
        if found is None:
            found = self._acceptance[key] = Acceptance()
        return found

    def _forget(self) -> None:
        self._clear(self._idle.pop(next(iter(self._idle))))

    def _clear(self, group: _GroupTexts) -> None:
        self.unread -= sum(text.unread for text in group.ended)
        group.ended.clear()


def accepted_tokens(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many tokens of a draft are those that were ``sampled`` in their places (one more, after the last)."""
    return next((i for i, token in enumerate(draft) if token != sampled[i]), len(draft))


def _index(index: SuffixIndex, text: _Text, most: int) -> int:
    """Index at most so many of the tokens since the last call. Returns their number."""
    began, end = text.indexed, min(len(text), text.indexed + most)
    for at in range(began, end):
        if at < len(text.prompt):
            text.state = index.extend(text.state, text.prompt[at], again=True)
        else:
            text.state = index.extend(text.state, text.tokens[at - len(text.prompt)])
    text.indexed = end
    return end - began


def _key(request: EngineRequest) -> tuple[str, ...]:
    group = request.params.group
    return (_policy(request), group) if group else (request.params.request,)


def _policy(request: EngineRequest) -> str:
    return request.params.adapter.policy if request.params.adapter is not None else ""
