"""A version's adapter on the Hugging Face Hub: its PEFT folder with a model card that says how it was trained."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rookery.errors import Unavailable, UserError, short
from rookery.telemetry.numbers import evaluation_cells

CARD_ROWS = 20
"""Steps in the table of a card: its curve is readable, and the card stays a page."""

SHOWN_OPTIONS = ("id", "hosted", "path", "task", "verifier", "split")
"""Options of an environment that a card names: none of them is a row or a text of the tenant."""


def push_folder(
    folder: Path,
    repo: str,
    card: Callable[[str], str],
    *,
    token: str | None,
    private: bool,
    message: str,
    endpoint: str | None = None,
) -> str:
    """Upload ``folder`` to the model repository ``repo``, which is created if necessary; returns its address. ``card``
    makes the model card from the repository's name with its organisation. Raises :class:`UserError` for what the Hub
    refuses, :class:`Unavailable` where it does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api = HfApi(endpoint=endpoint, token=token)
    try:
        made = api.create_repo(repo, private=private, exist_ok=True, repo_type="model")
        (folder / "README.md").write_text(card(made.repo_id), encoding="utf-8")
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=message)
    except HFValidationError as error:
        raise UserError(f"push: {short(_line(error))}") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        reason = f"push: the Hub answers {status} for {short(repo)}: {short(_line(error))}"
        if status in (401, 403):
            reason += "; set HF_TOKEN to a token that may write there (hf auth login)"
        raise (Unavailable if status >= 500 or status == 429 else UserError)(reason) from None
    except Exception as error:  # of the Hub's client, whose connections raise errors of several packages
        raise Unavailable(f"push: the Hub does not answer: {short(_line(error) or type(error).__name__)}") from None
    return f"{api.endpoint}/{made.repo_id}"


def _line(error: Exception) -> str:
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
