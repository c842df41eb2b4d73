"""The fixed replies that earn most, which an environment's ``best_constant`` gave, as a host sends them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

from rookery import protocol
from rookery.environments.verifiers.constants import shortened
from rookery.errors import short
from rookery.spec import values


def constants_by_policy(found: object) -> dict[str, protocol.BestConstant]:
    """By policy, under an empty name that of the job's first one. Raises :class:`TypeError` or :class:`ValueError` of
    one line for a result of another form."""
    if found is None:
        return {}
    given = {"": found} if isinstance(found, protocol.BestConstant) else found
    if not isinstance(given, Mapping) or len(given) > protocol.MOST_POLICIES:
        most = f"a mapping of at most {protocol.MOST_POLICIES} policies to them"
        raise TypeError(f"best_constant gave {short(repr(found))}, expected a rookery.BestConstant, {most}, or None")
    return {name: _checked(name, constant) for name, constant in given.items()}


def _checked(name: object, constant: object) -> protocol.BestConstant:
    if not isinstance(name, str):
        raise TypeError(f"best_constant gave the policy {short(repr(name))}, expected its name")
    if not isinstance(constant, protocol.BestConstant):
        raise TypeError(f"best_constant gave {short(repr(constant))}, expected a rookery.BestConstant")
    if not isinstance(constant.reply, str):
        raise TypeError(f"best_constant gave the reply {short(repr(constant.reply))}, expected a text")
    values.check([name, constant.reply], "best_constant")
    reward, prompts = float(constant.reward), operator.index(constant.prompts)  # also of numpy
    if not math.isfinite(reward) or prompts < 0:
        raise ValueError(f"best_constant gave the reward {reward} on {prompts} prompts, expected a finite number")
    return protocol.BestConstant(reply=shortened(constant.reply), reward=reward, prompts=prompts)
