"""Policies of one job on several base models: workers, tokens, text between them, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.controller.jobs.test_policies import chain, debate, submit, trained
from tests.support.peers import MODEL, Service, eventually, job_of, user_message
from tests.support.small_model import save_small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import rookery
from rookery import protocol
from rookery.controller.fleet.env_hosts import EnvironmentFailed
from rookery.controller.jobs.trajectory import episode_result_decoder
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings
from rookery.spec.parsing import SpecError
from rookery.storage.repositories import jobs
from rookery.tokenization.chat import Chat

OTHER = "qwen3-0.6b"
PAIR: dict[str, Any] = {"solver": {"rank": 4}, "verifier": {"rank": 8, "seed": 1, "base_model": OTHER}}


def other_chat(context: int = 512) -> Chat:
    """Bytes as tokens with ids that the usual one gives to others, and another template."""
    special = ["<|im_end|>", "<s>"]
    vocabulary = {token: id for id, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())[::-1]])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}<s>assistant: "
    return Chat(tokenizer, template, special={"eos_token": "<|im_end|>"}, ends=[0], context=context)


async def two_workers(service: Service) -> dict[str, Any]:
    service.chats[OTHER] = other_chat()
    workers = {
        MODEL: await service.worker().join(),
        OTHER: await service.worker("other", model=OTHER, model_hash="o").join(),
    }
    await service.host(script=debate, environments={"task": True}).join()
    return workers


async def test_each_policy_replies_and_trains_on_its_base_model_and_text_passes(service: Service) -> None:
    workers = await two_workers(service)
    job = await submit(service, policies=PAIR)
    view = await service.ends(job)
    assert view.reason == "solver: 2 steps; verifier: 2 steps"
    assert {MODEL, OTHER} <= set(service.provided)
    chats = {"solver": service.chat, "verifier": service.chats[OTHER]}
    for name, model in (("solver", MODEL), ("verifier", OTHER)):
        policy = service.database.read(jobs.get_policy, "alice", job, name).id
        assert {one.adapter.policy for one in workers[model].generates} == {policy}
        assert {op.policy for op in workers[model].operations} == {policy}
        assert len(chain(service, job, name)) == 3 and trained(workers[model], service, job, name)
    for _, row in service.database.read(jobs.recent_episodes, "alice", job, 100):
        result = episode_result_decoder.decode(row.trajectories)
        assert result.speakers == ["solver", "verifier", "solver"]
        [of_solver, of_verifier] = result.trajectories
        assert [reply.policy for reply in of_solver.replies] == ["solver", "solver"]
        assert [reply.policy for reply in of_verifier.replies] == ["verifier"]
        read = chats["verifier"].decode(of_verifier.prompt)
        assert read.count(result.replies[0].strip()) and "now verifier" in read
        written = chats["solver"].decode(of_solver.tokens)
        assert all(text in written for text in result.replies) and "now solver" in written
        for name, trajectory in (("solver", of_solver), ("verifier", of_verifier)):
            texts = [chats[name].decode(trajectory.tokens[r.start : r.stop]) for r in trajectory.replies]
            assert texts == [t for t, who in zip(result.replies, result.speakers, strict=True) if who == name]
            part = result.of(name)
            assert part is not None
            assert [sum(one.mask) for one in part.trajectories] == [
                sum(one.mask) if one is trajectory else 0 for one in result.trajectories
            ]


@pytest.mark.parametrize("alike", [False, True])
async def test_tokens_pass_between_base_models_of_one_vocabulary_alone(service: Service, alike: bool) -> None:
    """An environment that renders by itself gives the verifier the solver's tokens."""
    await two_workers(service)
    if alike:
        service.chats[OTHER] = service.chat
    begin, asked = service.chat.encode("begin"), service.chat.encode("right?")

    def script(message: protocol.Reset | protocol.StepEpisode) -> dict[str, Any]:
        if isinstance(message, protocol.Reset):
            return {"tokens": begin}
        if message.turn == 0:
            return {"tokens": [*begin, *message.tokens, *asked], "policy": "verifier"}
        return {"done": True, "reward": float(len(message.text) % 3)}

    service.peers[-1].script = script
    job = await submit(service, policies=PAIR, stop={"steps": 1})
    view = await service.ends(job, "completed" if alike else "paused")
    if not alike:
        says = f"gave tokens of {MODEL} to verifier, whose base model {OTHER} has others; give messages"
        assert says in view.reason and view.counters["episodes_failed"] > 0


async def test_a_job_waits_for_a_worker_of_each_base_model(service: Service) -> None:
    service.chats[OTHER] = other_chat()
    await service.worker().join()
    await service.host(script=debate).join()
    job = await submit(service, policies=PAIR)

    async def waits() -> bool:
        view = await service.controller.queries.show("alice", job)
        return view.waits_for.startswith("worker: ") and OTHER in view.waits_for

    await eventually(waits)


async def test_a_policy_that_has_stopped_needs_no_worker_that_trains(service: Service) -> None:
    workers = await two_workers(service)
    job = await submit(
        service, policies={"solver": PAIR["solver"], "verifier": {**PAIR["verifier"], "stop": {"steps": 1}}}
    )
    await eventually(lambda: len(trained(workers[MODEL], service, job, "solver")) > 0)
    workers[MODEL].training.clear()
    await eventually(lambda: len(chain(service, job, "verifier")) == 2)
    await workers[OTHER].die()
    await service.worker("only", model=OTHER, model_hash="o", roles=["rollout"]).join()
    view = await service.controller.queries.show("alice", job)
    assert not view.waits_for.startswith("worker: "), view.waits_for
    workers[MODEL].training.set()
    assert (await service.ends(job)).reason == "solver: 2 steps; verifier: 1 step"


async def test_a_frozen_version_of_another_job_needs_no_worker_that_trains(service: Service) -> None:
    workers = await two_workers(service)
    service.peers[-1].script = None
    source = await submit(
        service, policies={"main": {"rank": 8, "base_model": OTHER}}, environment={"hosted": "task"}, stop__steps=1
    )
    await service.ends(source)
    service.peers[-1].script = debate
    await workers[OTHER].die()
    only = await service.worker("only", model=OTHER, model_hash="o", roles=["rollout"]).join()
    frozen = {"rank": 8, "base_model": OTHER, "train": False, "warm_start": {"job": source}}
    job = await submit(service, policies={"solver": {"rank": 4}, "verifier": frozen})
    await service.ends(job)
    (version,) = chain(service, job, "verifier")
    assert version.hash == chain(service, source, "main")[-1].hash
    assert {(one.adapter.hash, one.adapter.version) for one in only.generates} == {(version.hash, 0)}


async def test_a_target_names_the_base_model_of_its_policy(service: Service) -> None:
    await two_workers(service)
    judge = {"train": False, "base": True, "base_model": OTHER}
    job = await submit(service, policies={**PAIR, "judge": judge})
    await service.ends(job)
    find = service.controller.completions.find
    for name, model in (("solver", MODEL), ("verifier", OTHER), ("judge", OTHER)):
        assert (await find("alice", f"{job}/{name}")).model == model
    assert (await find("alice", f"{job}/judge")).adapter is None


async def test_a_dry_run_shows_the_text_that_the_first_speaker_reads(service: Service) -> None:
    """In the template and the tokens of its base model; or the tokens that the environment gives it."""
    await two_workers(service)
    answer: dict[str, Any] = {"messages": [user_message("begin")], "policy": "verifier"}
    service.peers[-1].script = lambda message: answer
    other = service.chats[OTHER]
    [shown, *_] = (await service.controller.dry_run("alice", job_of(policies=PAIR))).prompts
    assert (shown.text, shown.tokens) == ("<s>user: begin<|im_end|><s>assistant: ", len(other.prompt(shown.messages)))
    answer = {"tokens": other.encode("rendered"), "policy": "verifier"}
    [shown, *_] = (await service.controller.dry_run("alice", job_of(policies=PAIR))).prompts
    assert (shown.text, shown.tokens, shown.messages) == ("rendered", 8, [])
    answer = {"messages": [user_message("begin")], "policy": "critic"}
    with pytest.raises(
        EnvironmentFailed, match=r"^task names the policy 'critic' in turn 0; the job has solver, verif"
    ):
        await service.controller.dry_run("alice", job_of(policies=PAIR))


async def test_a_listed_version_has_the_context_of_its_policys_base_model(service: Service) -> None:
    await two_workers(service)
    service.chats[OTHER] = other_chat(context=300)
    job = await submit(service, policies=PAIR)
    await service.ends(job)
    listed = {row["name"]: row["context"] for row in await service.controller.completions.targets("alice")}
    contexts = {"solver": service.chat.context, "verifier": 300}
    assert contexts["solver"] != 300
    versions = (":latest", "@0", "@1", "@2")
    assert listed == {MODEL: contexts["solver"], OTHER: 300} | {
        f"{job}/{policy}{version}": context for policy, context in contexts.items() for version in versions
    }


@pytest.mark.parametrize(
    ("policies", "says"),
    [
        ({"a": {}, "b": {"base_model": "no such model"}}, "policies.b.base_model: no model is called 'no such model'"),
        ({"a": {}, "b": {"base_model": "/etc"}}, "policies.b.base_model: no model is called '/etc'"),
        (
            {"a": {"rank": 4, "base_model": OTHER, "warm_start": {"job": "{}"}}},
            f"trained {MODEL}, this policy has {OTHER}",
        ),
    ],
)
async def test_an_unfit_base_model_is_refused_in_one_line(service: Service, policies: Any, says: str) -> None:
    await two_workers(service)
    source = await submit(service, policies={"main": {"rank": 4}}, environment={"hosted": "task"})
    for about in policies.values():
        if "warm_start" in about:
            about["warm_start"] = {"job": source, "policy": "main"}
    with pytest.raises(SpecError) as refused:
        await submit(service, policies=policies)
    assert [line for line in refused.value.problems if says in line] and "\n" not in str(refused.value.problems[0])


class Rated(rookery.Environment):
    """The solver writes, the rater of another model answers about it."""

    deterministic = True

    def prompts(self, split: str) -> list[int]:
        return list(range(8))

    def reset(self, prompt: Any, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"say {prompt}"}]

    def step(self, reply: rookery.Reply) -> rookery.Step:
        if reply.turn == 0:
            return rookery.Step(messages=[{"role": "user", "content": "good?"}], policy="rater")
        said = [message["content"] for message in reply.messages if message["role"] == "assistant"]
        rewards = {"solver": len(set(said[0])) / 8, "rater": len(set(said[1])) / 8}
        return rookery.Step(done=True, rewards=rewards)


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_two_base_models_learn_in_one_job_on_real_workers(tmp_path: Path) -> None:
    one, two = save_small_model(tmp_path / "one"), save_small_model(tmp_path / "two", 1, hidden=32, reverse=True)
    folders = {"data": tmp_path / "data", "cache": tmp_path / "cache"}
    settings = Settings.load({}, port=0, models=f"{one},{two}", workers=1, **folders)
    with EmbeddedService(settings) as service, rookery.Client(service.url, service.key) as client:
        optimizer = {"lr": 1e-2}
        job = client.train(
            base_model=str(one),
            environment={"hosted": Rated(), "max_turns": 2},
            policies={
                "solver": {"rank": 4, "optimizer": optimizer},
                "rater": {"rank": 2, "optimizer": optimizer, "base_model": str(two)},
            },
            algorithm={"group_size": 4, "groups_per_step": 2},
            sampling={"max_tokens": 8},
            evaluation={"prompts": 2},
            stop={"steps": 2},
        )
        view = job.wait(240)
        assert view.reason == "solver: 2 steps; rater: 2 steps", view.reason
        rows = list(job.metrics(follow=False))
        assert len(rows) == 4
        assert all(row["ratio"] == pytest.approx(1.0, abs=0.05) for row in rows), "each scores its own tokens"
        for name, width in (("solver", 64), ("rater", 32)):
            adapter = load_file(job.adapter(policy=name).download(tmp_path / name) / "adapter_model.safetensors")
            assert {weight.shape[1] for key, weight in adapter.items() if "q_proj.lora_A" in key} == {width}
        assert {worker.model for worker in client.workers()} == {str(one), str(two)}


async def test_a_question_to_a_model_waits_for_its_worker(service: Service) -> None:
    job, messages = await submit(service), [protocol.ChatMessage(role="user", content="Is it good?")]

    def asking(model: str) -> asyncio.Task[protocol.ModelReply]:
        asked = protocol.AskModel(epoch=1, call="c", job=job, model=model, messages=messages, max_tokens=4)
        return asyncio.create_task(service.controller.completions.answer_host(asked))

    asked = asking(MODEL)
    await service.pass_until(asked.done)
    late, began = asked.result(), service.clock.now
    assert f"no worker serves {MODEL} now" in late.error
    waiting = asking(MODEL)
    await service.clock.advance(10.0, steps=10)
    assert not waiting.done()
    await service.worker().join()
    for _ in range(8):  # after ten, the worker would be silent
        await service.clock.advance(1.0, steps=1)
        await service.writer(lambda: None)
    await eventually(waiting.done)
    found = waiting.result()
    assert found.text and not found.error and service.clock.now < began + 30
    assert "no job and no base model" in (await asking("nothing")).error
