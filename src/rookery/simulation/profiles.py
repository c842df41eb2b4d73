"""How fast modelled machines are: a profile, measured on real ones or assumed, read from JSON.

No speed has a default: every one stands in a file, with where it comes from.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from rookery.errors import UserError
from rookery.spec.machine import FrozenModel, Machine, Workload


class Profile(FrozenModel):
    """The machines of a simulation, and what is run on them."""

    name: str
    label: Literal["measured", "assumed"]
    """Whether the speeds were measured or assumed; shown with every result."""
    sources: dict[str, str]
    """Where each figure comes from, by its name."""
    reserved: Machine
    preemptible: Machine | None = None
    """None is the same as the reserved one."""
    workload: Workload

    @property
    def spot(self) -> Machine:
        """The preemptible machine."""
        return self.preemptible if self.preemptible is not None else self.reserved


def packaged(suffix: str) -> list[str]:
    """Names of the profiles (``json``) or traces (``csv``) that come with the package."""
    files = resources.files("rookery.simulation").joinpath("data").iterdir()
    return sorted(file.name.removesuffix(f".{suffix}") for file in files if file.name.endswith(f".{suffix}"))


def read_input(kind: str, name: str, suffix: str) -> str:
    """The text of a packaged profile or trace by its name, or of a file by its path. Raises :class:`UserError`."""
    known = packaged(suffix)
    folder = resources.files("rookery.simulation").joinpath("data")
    try:
        return (folder.joinpath(f"{name}.{suffix}") if name in known else Path(name)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        allowed = f"one of {', '.join(known)}, or the path of a {suffix.upper()} file"
        raise UserError(f"{kind}: given {name!r}, allowed: {allowed}") from None


def load_profile(name: str) -> Profile:
    """A packaged profile by its name, or one from a JSON file by its path. Raises :class:`UserError`."""
    text = read_input("profile", name, "json")
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "profile"
        raise UserError(f"profile {name}: {where}: {first['msg']}") from None
