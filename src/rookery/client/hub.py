"""A version's adapter on the Hugging Face Hub: its PEFT folder with a model card that says how it was trained."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from rookery.errors import Unavailable, UserError, short
from rookery.network import unusable_proxy
from rookery.pace import SLOWEST
from rookery.telemetry.numbers import evaluation_cells

T = TypeVar("T")

CARD_ROWS = 20
"""Steps in the table of a card: its curve is readable, and the card stays a page."""

SHOWN_OPTIONS = ("id", "hosted", "path", "task", "verifier", "split")
"""Options of an environment that a card names: none of them is a row or a text of the tenant."""


SILENT_SECONDS = 60.0
"""Longest silence of the Hub during a push: it reads all files of a commit before it answers."""

ATTEMPTS = 2
"""Attempts of one request without an answer, after which the Hub counts as silent."""

REQUESTS = 10
"""A push makes about so many requests, each of which may be silent once."""


def push_folder(
    folder: Path,
    repo: str,
    card: Callable[[str], str],
    *,
    token: str | None,
    private: bool,
    message: str,
    endpoint: str | None = None,
    silent_seconds: float = SILENT_SECONDS,
) -> str:
    """Upload ``folder`` to the model repository ``repo``, which is created if necessary; returns its address. ``card``
    makes the model card from the repository's name with its organisation. Raises :class:`UserError` for what the Hub
    refuses, :class:`Unavailable` where it does not answer: after ``silent_seconds`` without a byte, or where all of it
    takes :data:`REQUESTS` times as long and what its files take at the slowest rate."""
    from huggingface_hub import HfApi, close_session
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api = HfApi(endpoint=endpoint, token=token)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def push() -> Any:
        made = api.create_repo(repo, private=private, exist_ok=True, repo_type="model")
        (folder / "README.md").write_text(card(made.repo_id), encoding="utf-8")
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message)
        return made

    try:
        with _bounded_silence(silent_seconds):
            made = _within(REQUESTS * silent_seconds + size / SLOWEST, push, close_session)
    except HFValidationError as error:
        raise UserError(f"push: {short(_line(error))}") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        reason = f"push: the Hub answers {status} for {short(repo)}: {short(_line(error))}"
        if status in (401, 403):
            reason += "; set HF_TOKEN to a token that may write there (hf auth login)"
        raise (Unavailable if status >= 500 or status == 429 else UserError)(reason) from None
    except Exception as error:  # of the Hub's client, whose connections raise errors of several packages
        if isinstance(error, ImportError | ValueError) and (problem := unusable_proxy()):
            raise UserError(f"push: {problem}") from None
        reason = _line(_first_cause(error)) or type(error).__name__
        raise Unavailable(f"push: the Hub does not answer: {short(reason)}") from None
    return f"{api.endpoint}/{made.repo_id}"


@contextmanager
def _bounded_silence(seconds: float) -> Iterator[None]:
    """Within, the Hub's client waits ``seconds`` for the next bytes, and begins no request again that got no answer
    :data:`ATTEMPTS` times. By itself it waits for ever, and tries five times."""
    from huggingface_hub import get_session

    session: Any = get_session()
    unanswered: Counter[str] = Counter()

    def sending(request: Any) -> None:
        asked = f"{request.method} {request.url}"
        if unanswered[asked] >= ATTEMPTS:
            raise TimeoutError(f"no answer within {ATTEMPTS} x {seconds:g} s")
        unanswered[asked] += 1
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), seconds)

    def answered(response: Any) -> None:
        del unanswered[f"{response.request.method} {response.request.url}"]

    usual = session.event_hooks
    session.event_hooks = {
        "request": [*usual["request"], sending],
        "response": [*usual["response"], answered],
    }
    try:
        yield
    finally:
        session.event_hooks = usual


def _within(seconds: float, work: Callable[[], T], abort: Callable[[], None]) -> T:
    """The result of ``work()``; after ``seconds`` ``abort()`` ends it. Raises :class:`TimeoutError` then."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, name="push", daemon=True).start()  # the end of a program does not wait for it
    try:
        return done.result(seconds)
    except TimeoutError:
        if done.done():
            raise
        raise TimeoutError(f"it is not complete after {seconds:.0f} s") from None
    finally:
        if not done.done():
            abort()


def _first_cause(error: BaseException) -> BaseException:
    """The innermost cause: an upload's error names only its file."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _line(error: BaseException) -> str:
    return " ".join(str(error)[:1000].split())


def model_card(
    repo: str,
    view: Mapping[str, Any],
    policy: str,
    version: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    license: str | None,
) -> str:
    """The card of an adapter as Markdown: base model, data, settings, curve and evaluations up to ``version``, licence.
    ``view``: the job; ``config``: the adapter's ``adapter_config.json``."""
    spec, base = view["spec"], str(config.get("base_model_name_or_path") or view["spec"]["base_model"])
    changes = (spec.get("policies", {}).get(policy) or {}).get("algorithm") or {}
    environment = spec["environment"]
    algorithm = spec["algorithm"] | {name: value for name, value in changes.items() if value is not None}
    number = version["version"]
    about: dict[str, Any] = {
        "library_name": "peft", "base_model": base, "pipeline_tag": "text-generation",
        "tags": ["lora", "rookery", algorithm["name"]],
    }  # fmt: skip
    if license:
        about["license"] = license
    data = ", ".join(f"{key} `{_code(environment[key])}`" for key in SHOWN_OPTIONS if environment.get(key))
    mine = [row for row in rows if row.get("policy") in (None, "", policy) and row["version"] <= number]
    evaluations = [one for one in evaluations if one["version"] <= number]
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in about.items()), "---", ""]
    lines += [f"# {repo.rpartition('/')[2]}", ""]
    lines += [f"A LoRA adapter of `{_code(base)}`, trained with Rookery ({algorithm['name']}): version {number} of the "
              f"policy `{_code(policy)}` of the job `{_code(view['name'])}`.", ""]  # fmt: skip
    lines += ["| | |", "| --- | --- |", f"| base model | `{_code(base)}` |"]
    lines += [f"| data | {data} |", f"| rank, alpha | {config.get('r')}, {config.get('lora_alpha')} |"]
    lines += [f"| steps | {version['step']} |"]
    if "group_size" in algorithm:
        lines += [f"| group size, groups a step | {algorithm['group_size']}, {algorithm.get('groups_per_step')} |"]
    lines += [f"| licence | {_code(license) if license else 'that of the base model'} |", ""]
    lines += ["## Load", "", "```python", "from peft import AutoPeftModelForCausalLM", "",
              f'model = AutoPeftModelForCausalLM.from_pretrained("{repo}")', "```", ""]  # fmt: skip
    names = [name for name in ("reward", "loss", "length_mean", "entropy")
             if any(_number(row.get(name)) for row in mine)]  # fmt: skip
    if mine and names:
        every = -(-len(mine) // CARD_ROWS)
        picked = [*mine[::every], *([] if (len(mine) - 1) % every == 0 else mine[-1:])]
        lines += ["## Training", "", "| step | " + " | ".join(names) + " |", "| ---: |" + " ---: |" * len(names)]
        lines += [
            f"| {row['step']} | "
            + " | ".join(f"{row[name]:.4g}" if _number(row.get(name)) else "" for name in names)
            + " |"
            for row in picked
        ]
        lines += [""]
    if evaluations:
        heads = ["version", *evaluation_cells(evaluations[0])]
        what = "prompts" if evaluations[0].get("loss") is None else "rows"
        lines += [f"## Evaluation on held-out {what}", "", f"| {' | '.join(heads)} |", "|" + " ---: |" * len(heads)]
        for one in evaluations:
            lines += [f"| {one['version']} | {' | '.join(evaluation_cells(one).values())} |"]
        lines += [""]
    return "\n".join(lines)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _code(text: object) -> str:
    """A text within backticks of a table's cell."""
    return " ".join(str(text).replace("`", "'").replace("|", "/").split())[:200]
