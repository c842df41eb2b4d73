"""Modelled environment hosts: what they answer is a function of the episode alone, so any of them can go on with it."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.chaos.links import Wire
from tests.chaos.site import ENVIRONMENT, HOST_TOKEN, Site, Timers

from rookery import protocol
from rookery.controller.fleet.env_hosts import BUILTIN
from rookery.controller.jobs.trajectory import derive

BEAT_SECONDS = 2.0
REWARDS = 3
"""Different rewards: few, so that some groups have no variance."""


class Host(Timers):
    """Environment hosts of one place; the next process takes over when one ends."""

    def __init__(self, site: Site, number: int) -> None:
        super().__init__()
        self._site = site
        self._name = f"host{number}"
        self._births = 0
        self._link: Wire | None = None
        self._epoch = -1
        self.dial()
        self.after(BEAT_SECONDS, self._beat)

    def dial(self) -> None:
        if self._link is not None:
            return
        link = self._site.dial(self, "host")
        if link is None:
            self.after(self._site.dice.about(1.0), self.dial)
            return
        self._link, self._epoch = link, -1
        offer = protocol.HostedEnvironment(name=BUILTIN + ENVIRONMENT, deterministic=True)
        instance = f"{self._name}-{self._births}"
        hello = protocol.HostHello(
            protocol=protocol.PROTOCOL, token=HOST_TOKEN, instance=instance, environments=[offer]
        )
        link.say(hello)
        self.after(30.0, self._unwelcome, link)

    def _unwelcome(self, link: Wire) -> None:
        if self._link is link and self._epoch < 0:
            link.finish()
            self.closed(link)

    def disturb(self, *, kill: bool) -> None:
        """The connection breaks; ``kill``: with its process, which knew its episodes."""
        if self._link is not None:
            self._births += kill
            self._link.cut(heard_there=False)
            self.closed(self._link)

    def closed(self, link: Wire) -> None:
        if link is self._link:
            self._link, self._epoch = None, -1
            self.after(self._site.dice.about(1.0), self.dial)

    def heard(self, link: Wire, message: Any) -> None:
        if link is not self._link:
            return
        if isinstance(message, protocol.HostWelcome):
            self._epoch = message.epoch
        elif isinstance(message, protocol.GetPrompts | protocol.Reset | protocol.StepEpisode):
            self.after(self._site.dice.about(self._site.plan.answer), self._answer, link, message)

    def _answer(self, link: Wire, message: Any) -> None:
        if link is not self._link:
            return
        if isinstance(message, protocol.GetPrompts):
            numbers = range(message.start, message.start + message.count)
            prompts = [msgspec.json.encode(f"{message.split} {number}") for number in numbers]
            link.say(protocol.Prompts(epoch=self._epoch, call=message.call, prompts=prompts))
        else:
            answer = self._observed(message)
            answer.epoch = self._epoch
            link.say(answer)

    @staticmethod
    def _observed(message: protocol.Reset | protocol.StepEpisode) -> protocol.Observation:
        if isinstance(message, protocol.Reset):
            asked = protocol.ChatMessage(role="user", content=f"{message.prompt.decode()} of {message.job}")
            return protocol.Observation(epoch=0, call=message.call, episode=message.episode, messages=[asked])
        done = message.turn >= derive(message.episode) % 2
        turns = [] if done else [protocol.ChatMessage(role="user", content="go on")]
        reward = float(derive(message.text) % REWARDS)
        return protocol.Observation(
            epoch=0, call=message.call, episode=message.episode, messages=turns, reward=reward, done=done,
            metrics={"turns": message.turn + 1.0},
        )  # fmt: skip

    def _beat(self) -> None:
        self.after(BEAT_SECONDS, self._beat)
        if self._link is not None and self._epoch >= 0:
            self._link.say(protocol.HostHeartbeat(epoch=self._epoch, active=0))
