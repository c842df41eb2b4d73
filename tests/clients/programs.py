"""The programs behind docs/clients.md: ``python programs.py NAME``, in an environment that has the client.

``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` name a service, ``MODEL`` a model that says a word, calls the tool ``add``,
and then says ``The sum is 3.``; ``RANDOM_URL``, ``RANDOM_KEY`` and ``RANDOM_MODEL`` name one of random weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL, KEY, MODEL = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["MODEL"]
RANDOM_URL, RANDOM_KEY, RANDOM_MODEL = (os.environ[f"RANDOM_{name}"] for name in ("URL", "KEY", "MODEL"))
QUESTION: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}}
ANSWER = "The sum is 3."


def openai() -> None:
    from openai import OpenAI

    client, messages = OpenAI(), list(QUESTION)
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL]).choices[0]
    assert first.finish_reason == "tool_calls"
    [call] = first.message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    stream = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


def litellm() -> None:
    import litellm as lite

    options = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "tools": [TOOL]}
    answer = lite.completion(messages=QUESTION, **options)
    [call] = answer.choices[0].message.tool_calls
    chunks = list(lite.completion(messages=QUESTION, stream=True, **options))
    whole = lite.stream_chunk_builder(chunks, messages=QUESTION)
    assert whole.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "3"}
    further = lite.completion(messages=[*QUESTION, answer.choices[0].message.model_dump(), result], **options)
    assert further.choices[0].message.content == ANSWER


def langchain() -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    class Flag(BaseModel):
        on: bool

    chat = ChatOpenAI(model=MODEL).bind_tools([add])
    asked = HumanMessage("What is 1 + 2?")
    first = chat.invoke([asked])
    [call] = first.tool_calls
    assert chat.invoke([asked, first, ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])]).content == (
        ANSWER
    )
    assert chat.stream([asked]).__next__() is not None
    for method in ("json_schema", "function_calling"):
        other: Any = ChatOpenAI(model=RANDOM_MODEL, base_url=RANDOM_URL, api_key=RANDOM_KEY)
        assert isinstance(other.with_structured_output(Flag, method=method).invoke("Is it on?"), Flag)


def instructor() -> None:
    import instructor as library
    from openai import OpenAI
    from pydantic import BaseModel

    class Flag(BaseModel):
        on: bool

    raw = OpenAI(base_url=RANDOM_URL, api_key=RANDOM_KEY)
    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        client = library.from_openai(raw, mode=mode)
        flag = client.chat.completions.create(model=RANDOM_MODEL, messages=QUESTION, response_model=Flag)
        assert isinstance(flag.on, bool)


def pydantic_ai() -> None:
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Flag(BaseModel):
        on: bool

    agent: Any = Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY)))
    called = []

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        called.append((a, b))
        return a + b

    assert agent.run_sync("What is 1 + 2?").output == ANSWER and called == [(1, 2)]
    other = OpenAIChatModel(RANDOM_MODEL, provider=OpenAIProvider(base_url=RANDOM_URL, api_key=RANDOM_KEY))
    assert isinstance(Agent(other, output_type=Flag).run_sync("Is it on?").output, Flag)


def smolagents() -> None:
    from smolagents import OpenAIServerModel, tool
    from smolagents.models import ChatMessage

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY)
    asked = [ChatMessage(role="user", content=[{"type": "text", "text": "What is 1 + 2?"}])]
    answer = model.generate(asked, tools_to_call_from=[add], tool_choice="auto")
    assert answer.tool_calls[0].function.name == "add"
    other = OpenAIServerModel(RANDOM_MODEL, api_base=RANDOM_URL, api_key=RANDOM_KEY)
    assert other.generate(asked, tools_to_call_from=[add]).tool_calls[0].function.name == "add"  # it demands a call
    assert "".join(part.content or "" for part in model.generate_stream(asked))


def openai_agents() -> None:
    import agents

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def run() -> None:
        from openai import AsyncOpenAI

        client = AsyncOpenAI()
        for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            agent = agents.Agent("adder", instructions="Add.", model=kind(MODEL, client), tools=[add])
            result = await agents.Runner.run(agent, "What is 1 + 2?")
            assert result.final_output == ANSWER, result.final_output
            streamed = agents.Runner.run_streamed(agent, "What is 1 + 2?")
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == ANSWER

    asyncio.run(run())


def inspect_ai() -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def add() -> Any:
        async def execute(a: int, b: int) -> str:
            """Add two numbers.

            Args:
                a: The first number.
                b: The second number.
            """
            return str(a + b)

        return execute

    os.environ |= {"ROOKERY_API_KEY": KEY, "ROOKERY_BASE_URL": URL}
    task = Task([Sample("What is 1 + 2?", target="3")], solver=[use_tools(add()), generate()], scorer=includes())
    with tempfile.TemporaryDirectory() as logs:
        for model in (get_model(f"openai-api/rookery/{MODEL}"), get_model(f"openai/{MODEL}", responses_api=True)):
            [log] = eval(task, model=model, log_dir=logs, display="none")
            assert log.status == "success" and log.results is not None, log.error
            assert log.results.scores[0].metrics["accuracy"].value == 1.0


def lm_eval() -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    os.environ["OPENAI_API_KEY"] = RANDOM_KEY
    options = {"model": RANDOM_MODEL, "tokenizer_backend": None, "num_concurrent": 1, "max_retries": 1}
    texts: Any = LocalCompletionsAPI(
        base_url=f"{RANDOM_URL}/completions", **{**options, "tokenizer": os.environ["TOKENIZER"],
                                                 "tokenizer_backend": "huggingface"},
    )  # fmt: skip
    pairs = [Instance("loglikelihood", {}, (context, " yes"), index) for index, context in enumerate(("Is it?", "Hm"))]
    for logprob, greedy in texts.loglikelihood(pairs):
        assert logprob < 0 and greedy in (True, False)
    written = Instance("generate_until", {}, ("Once", {"until": ["\n"], "max_gen_toks": 8}), 0)
    assert isinstance(texts.generate_until([written])[0], str)
    chats: Any = LocalChatCompletion(base_url=f"{RANDOM_URL}/chat/completions", **options)
    asked = Instance(
        "generate_until", {}, (chats.apply_chat_template(QUESTION), {"until": ["\n"], "max_gen_toks": 8}), 0
    )
    assert isinstance(chats.generate_until([asked])[0], str)


def mirascope() -> None:
    from mirascope import llm as library

    @library.tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    library.register_provider("openai", base_url=URL, api_key=KEY)
    for kind in ("completions", "responses"):
        model = library.Model(f"openai/{MODEL}:{kind}")
        first = model.call("What is 1 + 2?", tools=[add])
        assert first.resume(first.execute_tools()).texts[-1].text == ANSWER
        begun = model.stream("What is 1 + 2?", tools=[add])
        begun.finish()
        ended = begun.resume(begun.execute_tools())
        ended.finish()
        assert ended.texts[-1].text == ANSWER


def llama_index() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    class Flag(BaseModel):
        on: bool

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = OpenAILike(model=MODEL, api_base=URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True)
    asked, tool = ChatMessage(role="user", content="What is 1 + 2?"), FunctionTool.from_defaults(add)
    whole = model.chat_with_tools([tool], user_msg=asked)
    *_, streamed = model.stream_chat_with_tools([tool], user_msg=asked)
    for first in (whole, streamed):
        [call] = model.get_tool_calls_from_response(first)
        assert call.tool_kwargs == {"a": 1, "b": 2}
        result = ChatMessage(role="tool", content="3", additional_kwargs={"tool_call_id": call.tool_id})
        assert model.chat([asked, first.message, result]).message.content == ANSWER
    random: dict[str, Any] = {"model": RANDOM_MODEL, "api_base": RANDOM_URL, "api_key": RANDOM_KEY}
    text = OpenAILike(**random, max_tokens=8, logprobs=True, top_logprobs=2).complete("Once")
    assert text.logprobs
    other = OpenAILike(**random, is_chat_model=True, should_use_structured_outputs=True)
    assert isinstance(other.as_structured_llm(Flag).chat([asked]).raw, Flag)


def dspy() -> None:
    import dspy as library

    for engine in ("lm15", "litellm"):
        model = library.LM(f"openai/{MODEL}", api_base=URL, api_key=KEY, cache=False, engine=engine)
        assert model("What is 1 + 2?") == [ANSWER]
        other = library.LM(
            f"openai/{RANDOM_MODEL}", api_base=RANDOM_URL, api_key=RANDOM_KEY, cache=False, engine=engine
        )
        try:
            other("x" * 20_000)
        except library.ContextWindowExceededError:
            continue
        raise AssertionError("the prompt is longer than the model's context")


def huggingface_hub() -> None:
    os.environ.pop("HF_HUB_OFFLINE")  # it refuses every address
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=URL, api_key=KEY)
    options: dict[str, Any] = {"model": MODEL, "tools": [TOOL]}
    whole = client.chat_completion(QUESTION, **options).choices[0].message
    [call] = whole.tool_calls or []
    assert json.loads(str(call.function.arguments)) == {"a": 1, "b": 2}
    chunks = client.chat_completion(QUESTION, **options, stream=True, stream_options={"include_usage": True})
    *_, last = chunks
    assert last.usage and last.usage.completion_tokens
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    calls = [{"id": call.id, "type": "function", "function": dict(call.function)}]
    further = [*QUESTION, {"role": "assistant", "content": whole.content, "tool_calls": calls}, result]
    assert client.chat_completion(further, **options).choices[0].message.content == ANSWER


def llm() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model: dict[str, Any] = {
            "supports_tools": True,
            "model_id": "rookery",
            "model_name": MODEL,
            "api_base": URL,
            "api_key_name": "rookery",
        }
        (Path(folder) / "keys.json").write_text(json.dumps({"rookery": KEY}))
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([model]))
        environment = {**os.environ, "LLM_USER_PATH": folder}
        code = "def add(a: int, b: int) -> int:\n    'Add two numbers.'\n    return a + b\n"
        command = [sys.executable, "-m", "llm", "-m", "rookery", "--functions", code, "What is 1 + 2?"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.stdout.strip().endswith(ANSWER), ended.stdout + ended.stderr


PROGRAMS: dict[str, Callable[[], None]] = {
    "openai": openai, "litellm": litellm, "langchain-openai": langchain, "instructor": instructor,
    "pydantic-ai": pydantic_ai, "smolagents": smolagents, "openai-agents": openai_agents, "inspect-ai": inspect_ai,
    "lm-eval": lm_eval, "llm": llm, "mirascope": mirascope, "llama-index": llama_index, "dspy": dspy,
    "huggingface_hub": huggingface_hub,
}  # fmt: skip

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
