"""The fields of a package for verifiers that a job may set, and the variables that its process gets."""

from __future__ import annotations

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from rookery.environments.foreign.process import inherited
from rookery.environments.foreign.verifiers import policy_of
from rookery.environments.foreign.verifiers_process import Refused, check_id, check_taskset, rewards_by_role
from rookery.errors import UserError


class Size(enum.Enum):
    SMALL = "small"


class Judge(BaseModel):
    url: str = ""


class Fields(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str = ""
    task: Judge = Judge()
    system_prompt: Path | None = None
    most: int = 5
    weight: FiniteFloat | None = None
    shuffled: bool = False
    game: Literal["a/b", "c"] = "c"
    size: Size = Size.SMALL
    split: str = "train"
    dataset_split: Annotated[str, Field(max_length=99)] | None = None
    levels: list[Annotated[int, Field(ge=1)]] = []
    difficulties: tuple[str, ...] = ()
    dataset: str = "owner/name"
    name: str = ""
    base_url: str | None = None
    judge_model: str = ""
    reward: Judge = Judge()
    names: list[str] = []
    anything: Any = None
    arguments: dict[str, Any] = {}
    place: Path | int = 0
    split_file: str = ""
    use_docker: bool = False
    trust_remote_code: bool = False
    port: int = 1
    subset: str = Field("", alias="dataset_path")


@pytest.mark.parametrize(
    ("agent", "others", "policies", "trained", "plays"),
    [
        ("agent", [], ["main"], ["main"], "main"),
        ("solver", ["judge"], ["judge", "main"], ["main"], "main"),
        ("solver", ["judge"], ["judge", "solver"], ["solver"], "solver"),
        ("solver", ["judge"], ["judge", "solver"], ["judge", "solver"], "solver"),
        ("solver", ["judge"], ["judge", "main"], ["judge", "main"], "main"),
        ("solver", ["judge"], ["judge", "solver", "main"], ["main"], "solver"),
        ("solver", ["judge"], ["judge", "main", "more"], ["main", "more"], "main, more could all play it"),
        (
            "solver",
            ["judge"],
            ["judge", "main"],
            ["judge"],
            "no policy that trains is left for it; name a policy",
        ),
    ],
)
def test_the_trained_role_is_played_by_the_policy_of_its_name_or_the_one_that_trains(
    agent: str, others: list[str], policies: list[str], trained: list[str], plays: str
) -> None:
    if plays in policies:
        assert policy_of(agent, others, policies, trained) == plays
    else:
        with pytest.raises(UserError, match=plays):
            policy_of(agent, others, policies, trained)


def test_each_role_has_the_reward_of_its_traces() -> None:
    def trace(role: str, **rewards: float | None) -> Any:
        given = {name: value for name, value in rewards.items() if value is not None}
        return SimpleNamespace(agent=SimpleNamespace(name=role), rewards=rewards, reward=sum(given.values()))

    traces = [trace("solver", right=1.0), trace("solver", right=0.0), trace("judge", fair=0.25), trace("user", a=None)]
    assert rewards_by_role(traces) == {"solver": 0.5, "judge": 0.25}
    assert rewards_by_role([trace("user"), SimpleNamespace(agent=None, rewards={"a": 1.0}, reward=1.0)]) == {}


@pytest.mark.parametrize(
    "given",
    [
        {}, {"most": 3, "weight": 0.5, "shuffled": True}, {"game": "a/b"}, {"size": "small"}, {"weight": None},
        {"split": "train[:100]"}, {"dataset_split": None}, {"levels": [1, 2]}, {"difficulties": ["easy", "very hard"]},
    ],
)  # fmt: skip
def test_numbers_and_choices_are_taken(given: dict[str, Any]) -> None:
    check_taskset(Fields, given)


@pytest.mark.parametrize(
    "given",
    [
        {"id": "os"}, {"task": {}}, {"system_prompt": "/etc/passwd"}, {"dataset": "/etc"}, {"name": "x"},
        {"base_url": "http://127.0.0.1"}, {"judge_model": "x"}, {"reward": {}}, {"names": ["x"]}, {"anything": 1},
        {"arguments": {}}, {"place": 1}, {"split_file": "x"}, {"use_docker": True}, {"trust_remote_code": True},
        {"port": 22}, {"subset": "x"}, {"dataset_path": "x"}, {"more": 1}, {"split": "../../etc/passwd"},
        {"split": "http://127.0.0.1"}, {"split": {"x": 1}}, {"difficulties": ["a", "/b"]}, {"split": "a\n"},
    ],
)  # fmt: skip
def test_a_field_that_may_name_something_of_the_machine_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=f"config.taskset.{next(iter(given))}: "):
        check_taskset(Fields, given)


def test_ids_are_those_that_are_listed() -> None:
    known = ("best_of_n", "sums-v1")
    assert [check_id("config.id", one, known) for one in ("best-of-n", "best_of_n", "sums_v1")]
    for given in ("os", "x/sums-v1", "sums-v1@2", "SUMS-v1", "", 3, None, ["best_of_n"], "verifiers.v1.cli"):
        with pytest.raises(Refused, match=r"config\.id: allowed: best_of_n, sums-v1"):
            check_id("config.id", given, known)


def test_the_process_gets_no_keys_of_the_service() -> None:
    kept = {"HOME": "/home/x", "LC_ALL": "C", "HF_HOME": "/models", "https_proxy": "http://proxy:1", "NO_PROXY": "a"}
    secret = {
        "OPENAI_API_KEY": "x", "ROOKERY_ADMIN_KEY": "x", "AWS_SECRET_ACCESS_KEY": "x", "PGPASSWORD": "x",
        "PYTHONPATH": "/x", "LD_PRELOAD": "/x", "MY_HF_TOKEN": "x", "HOMES": "x",
    }  # fmt: skip
    assert inherited({**kept, **secret}) == kept
