"""Calls the token face with the real ``renderers`` client, in an environment of its own: URL, key, model, folder."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI
from renderers.base import create_renderer, load_tokenizer
from renderers.client import OverlongPromptError, generate


async def main(url: str, key: str, model: str, folder: str) -> dict[str, Any]:
    renderer = create_renderer(load_tokenizer(folder))
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    asked: dict[str, Any] = {"client": client, "renderer": renderer, "model": model}
    messages: Any = [{"role": "user", "content": "Hello?"}]
    sampling = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    reply = await generate(
        **asked, messages=messages, sampling_params=sampling, cache_salt="salt", priority=1,
        extra_headers={"X-Session-ID": "rollout"},
    )  # fmt: skip
    again = await generate(**asked, messages=messages, prompt_ids=reply["prompt_ids"], sampling_params=sampling)
    try:
        await generate(**asked, messages=[{"role": "user", "content": "x" * 600}], sampling_params=sampling)
        overlong = "not refused"
    except OverlongPromptError as error:
        overlong = str(error)
    kept = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason", "request_id", "usage")
    return {
        **{name: reply[name] for name in kept},
        "same": again["completion_ids"] == reply["completion_ids"],
        "overlong": overlong,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
