"""``{id: gymnasium}`` and ``{id: textarena}``: the interface with tiny libraries, and games of the real ones, which
have an environment of their own: ``make test-environments``."""

from __future__ import annotations

import asyncio
import re
import shutil
import venv
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.faces import ThreadedWorker, job, served, tokenizer
from tests.support.waiting import until

from rookery.client import Client
from rookery.environments.base import Reply, Step
from rookery.environments.builtins import find
from rookery.environments.foreign import games_process
from rookery.environments.foreign.games import Game, check_argument, parse_games, set_games
from rookery.environments.foreign.process import LibraryFailed
from rookery.environments.verifiers import numbers
from rookery.errors import RookeryError, UserError

PYTHON = Path(__file__).parents[3] / ".bench" / "games" / "bin" / "python"
TINY = "gymnasium/Count gymnasium/Echo gymnasium/Pixels gymnasium/Exits gymnasium/Long gymnasium/None textarena/Guess"
REAL = (
    "gymnasium/FrozenLake-v1 gymnasium/Blackjack-v1 gymnasium/Taxi-v4 gymnasium/CartPole-v1 textarena/GuessTheNumber-v0"
    " textarena/TowerOfHanoi-v0"
)

SECONDS = 300.0

real = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="the games are not here: make test-environments"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment with the tiny libraries."""
    folder = tmp_path_factory.mktemp("games")
    venv.create(folder, with_pip=False, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    here = Path(__file__).parent
    shutil.copy(here / "tiny_gymnasium.py", site / "gymnasium.py")
    (site / "textarena" / "envs").mkdir(parents=True)
    shutil.copy(here / "tiny_textarena.py", site / "textarena" / "__init__.py")
    (site / "textarena" / "envs" / "registration.py").write_text("from textarena import ENV_REGISTRY\n")
    return folder / "bin" / "python"


@pytest.fixture
def tiny(python: Path) -> Iterator[None]:
    set_games(f"{python} {TINY}")
    yield
    set_games("")


@pytest.fixture
def libraries() -> Iterator[None]:
    set_games(f"{PYTHON} {REAL}")
    yield
    set_games("")


def made(id: str, env: str, **options: Any) -> Game:
    built = find(id)({"env": env, **options})
    assert isinstance(built, Game)
    return built


def played(play: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(play(), 60)

    asyncio.run(bounded())


async def start(environment: Game, seed: int) -> tuple[Any, str]:
    """An episode and its first message."""
    episode: Any = environment.for_episode()
    [message] = await episode.reset(seed, 0)
    return episode, message["content"]


async def move(episode: Any, text: str) -> Step:
    found: Step = await episode.step(Reply(text, [], [], 0))
    return found


def shown(step: Step) -> str:
    [message] = step.messages
    return message["content"]


def test_a_minus_of_a_move_is_that_of_the_verifiers() -> None:
    """The program stands alone, so that it has a copy of their signs."""
    assert set(games_process.DASHES) == {*numbers.DASHES, "-"}


@pytest.mark.usefixtures("tiny")
class TestTinyLibraries:
    def test_the_last_named_action_of_a_reply_is_made(self) -> None:
        environment = made("gymnasium", "Count", actions=["go down", "up"], instructions="Count.")

        async def play() -> None:
            episode, first = await start(environment, 5)
            assert re.fullmatch(r"Count\.\n\n\d+\n\nReply with one of: go down, up\.", first)
            for text in ("supper", "", "up-left", "1", "<think>up"):
                refused = await move(episode, text)
                assert shown(refused) == "Reply with one of: go down, up." and refused.reward == 0.0
            assert (await move(episode, "Not go down, UP!")).reward == 1.0
            assert (await move(episode, "up? No: Go Down")).reward == 0.0
            last = await move(episode, "up")
            assert last.done and not last.messages and last.metrics == {"invalid": 1.0, "steps": 8.0}
            await episode.close()

        played(play)

    def test_actions_have_numbers_where_they_have_no_names(self) -> None:
        async def play() -> None:
            episode, first = await start(made("gymnasium", "Count"), 5)
            assert first.endswith("Reply with one of: 0, 1.")
            wrong = ("11", "-1", "\u22121", "\u20131", "1\u20132", "0.1", "1,0", "1.0", "1 or 12", "1, not -1")
            texts = ("<think>0</think>I take 1", *wrong, "0", "It is 1.")
            moves = [await move(episode, text) for text in texts]
            assert [step.reward for step in moves] == [1.0, *[0.0] * 11, 1.0]
            assert ["Reply with" in shown(step) for step in moves[1:11]] == [True] * 10
            await episode.close()

        played(play)

    def test_episodes_of_one_seed_are_alike_however_they_interleave(self) -> None:
        environment = made("gymnasium", "Count")

        async def play() -> None:
            alone, first = await start(environment, 7)
            expected = [first, *[shown(await move(alone, "1")) for _ in range(2)]]
            one, begun = await start(environment, 7)
            found = [begun]
            other, different = await start(environment, 8)
            assert different != first
            for _ in range(2):
                await move(other, "1")
                found.append(shown(await move(one, "1")))
            assert found == expected

        played(play)

    def test_a_picture_shows_its_coloured_parts_in_brackets(self) -> None:
        async def play() -> None:
            _, first = await start(made("gymnasium", "Count", kwargs={"render_mode": "ansi"}), 5)
            assert re.match(r"\[\d+\]\|\n\n", first)

        played(play)

    def test_a_reply_is_the_action_of_a_text_space(self) -> None:
        async def play() -> None:
            episode, _ = await start(made("gymnasium", "Echo"), 5)
            assert "no action" in shown(await move(episode, "two words"))
            assert shown(await move(episode, " no\n")) == "no"
            assert (await move(episode, "yes")).done

        played(play)

    def test_a_game_of_textarena_ends_with_its_reward(self) -> None:
        async def play() -> None:
            environment = made("textarena", "Guess")
            episode, first = await start(environment, 5)
            assert first == (await start(environment, 5))[1]
            second = await move(episode, "what?")
            assert not second.done and shown(second) == "No number."
            last = await move(episode, first.split()[1].rstrip("."))
            assert last.done and last.reward == 1.0 and last.metrics == {"invalid": 0.0, "steps": 2.0}
            episode, _ = await start(environment, 6)
            await move(episode, "what?")
            last = await move(episode, "what?")
            assert last.done and last.reward == -1.0 and last.metrics["invalid"] == 1.0

        played(play)

    def test_a_failed_move_fails_its_episode_and_a_lost_process_those_that_it_had(self) -> None:
        environment = made("gymnasium", "Exits")

        async def play() -> None:
            one, _ = await start(environment, 1)
            other, _ = await start(environment, 2)
            with pytest.raises(LibraryFailed, match=r"^gymnasium: Exits: RuntimeError: no such move$"):
                await move(one, "0")
            with pytest.raises(LibraryFailed, match="its process ended with -14"):
                await move(one, "1")
            with pytest.raises(LibraryFailed, match="its process"):
                await move(other, "0")
            await one.close()
            await other.close()
            again, _ = await start(environment, 3)
            await again.close()

        played(play)

    def test_an_observation_has_a_bound(self) -> None:
        async def play() -> None:
            episode, _ = await start(made("gymnasium", "Long"), 1)
            with pytest.raises(LibraryFailed, match="characters of an observation: 1000000, allowed: at most 131072"):
                await move(episode, "1")

        played(play)

    def test_splits_are_seeds(self) -> None:
        environment = made("gymnasium", "Count", size=3, eval_size=2, seed=2**31 - 4)
        assert environment.prompts("train") == [2**31 - 4, 2**31 - 3, 2**31 - 2]
        assert environment.prompts("eval") == [2**31 - 1, 0]
        sizes = find("gymnasium").validate_options({"env": "Count", "size": 3, "eval_size": 2})
        assert sizes is not None and (sizes.train, sizes.held_out) == (3, 2)

    @pytest.mark.parametrize(
        ("id", "options", "said"),
        [
            ("gymnasium", {"env": "Other"}, "environment.env: "),
            ("gymnasium", {"env": "Guess"}, "environment.env: "),
            ("gymnasium", {"env": "os:Count"}, "environment.env: "),
            ("gymnasium", {}, "environment.env"),
            ("gymnasium", {"env": "Count", "more": 1}, "environment.more"),
            ("gymnasium", {"env": "Count", "seed": 2**31}, "environment.seed"),
            ("gymnasium", {"env": "Count", "size": 0}, "environment.size"),
            ("gymnasium", {"env": "Count", "actions": ["up", "UP"]}, "environment.actions"),
            ("gymnasium", {"env": "Count", "actions": [" ", "up"]}, "environment.actions"),
            ("gymnasium", {"env": "Count", "actions": ["a"] * 201}, "environment.actions"),
            ("gymnasium", {"env": "Count", "kwargs": {"xml_file": "/etc/passwd"}}, "environment.kwargs"),
            ("gymnasium", {"env": "Count", "kwargs": {"render_mode": "human"}}, "environment.kwargs"),
            ("textarena", {"env": "Guess", "actions": ["a"]}, "environment.actions"),
        ],
    )
    def test_options_are_checked_before_anything_starts(self, id: str, options: dict[str, Any], said: str) -> None:
        with pytest.raises(UserError, match=re.escape(said)):
            find(id).validate_options(options)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"env": "None"}, "environment.env: KeyError"),
            ({"env": "Pixels"}, "environment.env: observations of Pixels are of the space Box"),
            ({"env": "Count", "actions": ["one"]}, "environment.actions: given 1, allowed: 2"),
            ({"env": "Echo", "actions": ["one"]}, "environment.actions: given 1, allowed: 0"),
            ({"env": "Count", "kwargs": {"other": 1}}, "environment.env: TypeError"),
        ],
    )
    def test_a_game_that_is_none_of_texts_is_refused_in_one_line(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(UserError, match=re.escape(said)) as refused:
            find("gymnasium")(options)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [1, 1.5, None, True, "4x4", "a_b-c d", ["SFFG", 2], {"desc": [1]}])
def test_arguments_of_names_and_numbers_are_taken(value: Any) -> None:
    check_argument(value)


@pytest.mark.parametrize("value", ["a/b", "a.py", "http:x", "a\n", {"a/b": 1}, [["../x"]], "x" * 201])
def test_arguments_that_could_name_files_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="letters"):
        check_argument(value)


def test_arguments_have_few_levels() -> None:
    value: Any = 1
    for _ in range(2000):
        value = [value]
    with pytest.raises(ValueError, match="levels"):
        check_argument(value)


@pytest.mark.parametrize("text", ["python gymnasium/A", "/usr/bin/python3", "/usr/bin/python3 other/A"])
def test_a_setting_in_another_form_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="ROOKERY_GAMES"):
        parse_games(text)


@pytest.mark.parametrize("id", ["gymnasium", "textarena"])
def test_a_job_without_the_setting_is_refused(id: str) -> None:
    set_games("")
    with pytest.raises(UserError, match="ROOKERY_GAMES"):
        find(id).check({"env": "Count"})


@pytest.mark.usefixtures("libraries")
class TestRealLibraries:
    pytestmark = real

    def test_frozen_lake_is_walked_by_names(self) -> None:
        options = {"kwargs": {"render_mode": "ansi", "is_slippery": False}, "actions": ["left", "down", "right", "up"]}

        async def play() -> None:
            episode, first = await start(made("gymnasium", "FrozenLake-v1", **options), 0)
            assert first.startswith("[S]FFF\nFHFH\nFFFH\nHFFG\n\nReply with one of: left, down, right, up.")
            for text in ("down", "down", "right", "right", "down"):
                step = await move(episode, text)
                assert not step.done and "[" in shown(step)
            step = await move(episode, "right")
            assert step.done and step.reward == 1.0

        played(play)

    def test_other_games_show_their_observations(self) -> None:
        async def play() -> None:
            _, first = await start(made("gymnasium", "Blackjack-v1"), 3)
            assert re.match(r"\[\d+, \d+, \d\]\n\nReply with one of: 0, 1\.", first)
            taxi = made("gymnasium", "Taxi-v4", kwargs={"render_mode": "ansi"})
            assert "+---------+" in (await start(taxi, 3))[1]
            assert (await start(taxi, 3))[1] == (await start(taxi, 3))[1] != (await start(taxi, 4))[1]

        played(play)
        with pytest.raises(UserError, match="of the space Box"):
            made("gymnasium", "CartPole-v1")
        with pytest.raises(UserError, match="unexpected keyword argument"):
            made("gymnasium", "FrozenLake-v1", kwargs={"other": 1})

    def test_a_number_is_guessed(self) -> None:
        async def play() -> None:
            environment = made("textarena", "GuessTheNumber-v0")
            episode, first = await start(environment, 5)
            assert "[5]" in first and first == (await start(environment, 5))[1]
            low, high = 1, 20
            for _ in range(6):
                step = await move(episode, f"[{(low + high) // 2}]")
                if step.done:
                    break
                low, high = ((low + high) // 2 + 1, high) if "higher" in shown(step) else (low, (low + high) // 2 - 1)
            assert step.done and step.reward == 1.0 and step.metrics["invalid"] == 0.0
            episode, _ = await start(made("textarena", "TowerOfHanoi-v0"), 5)
            await move(episode, "nothing")
            last = await move(episode, "nothing")
            assert last.done and last.metrics == {"invalid": 1.0, "steps": 2.0}

        played(play)

    @pytest.mark.parametrize(
        "environment",
        [
            {"id": "gymnasium", "env": "Blackjack-v1", "max_turns": 4},
            {"id": "textarena", "env": "TowerOfHanoi-v0", "max_turns": 4},
        ],
        ids=lambda environment: environment["id"],
    )
    def test_a_job_trains_on_a_game(self, environment: dict[str, Any], tmp_path: Path) -> None:
        with served(tmp_path, games=f"{PYTHON} {REAL}") as service, Client(service.url, service.key) as client:
            token = (service.settings.data / "worker.token").read_text(encoding="utf-8").strip()
            with pytest.raises(RookeryError, match="one of the administrator's"):
                client.submit(job(environment={"id": "gymnasium", "env": "Other-v0"}))
            replies = ("0", "1", "[7]", "[12]")
            with ThreadedWorker(service.url, token, tokenizer(tmp_path), replies):
                given = {**environment, "size": 16, "eval_size": 4, "step_timeout": "5m"}
                made = client.submit(job(environment=given, sampling={"max_tokens": 8}))
                until(lambda: made.show().state in ("completed", "paused", "failed"), patience=SECONDS)
                assert made.show().state == "completed", made.show().reason
                rows = list(made.metrics(follow=False))
        assert rows and {"reward/steps", "reward/invalid"} <= set(rows[0]), rows
