"""What comes in from outside, checked against what is there: jobs, uploads, names of things to sample from.

Nothing is created for a job that is refused; a refusal names the field, what was given and what is allowed. Things of
another tenant are as if they were not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rookery import protocol
from rookery.controller.context import ControllerContext
from rookery.controller.fleet.env_hosts import SERVICE
from rookery.controller.sessions.samplers import SCHEME, find_checkpoint
from rookery.controller.views import NUMBER
from rookery.controller.weights.refs import adapter_ref
from rookery.errors import NotFound, Unavailable, UserError
from rookery.spec.job import JobSpec
from rookery.spec.parsing import SpecError, parse_job
from rookery.spec.policy import TARGETS, PolicySpec
from rookery.storage.models import PolicyRow, UploadKind
from rookery.tokenization.registry import CATALOGUE, resolve, status

PREVIEWED = 3
"""Prompts that a dry run renders."""


@dataclass(frozen=True)
class Target:
    """What answers: a base model, or one version of a policy on it. ``name`` names it wholly."""

    name: str
    model: str
    adapter: protocol.AdapterRef | None


class JobValidator:
    def __init__(self, world: ControllerContext) -> None:
        self._world = world

    async def check(self, tenant: str, data: Any) -> tuple[JobSpec, list[PolicyRow]]:
        """The job in ``data`` with its model's proper name, and its policies, whose ``job`` is set once it has an id.
        Raises :class:`SpecError`."""
        world = self._world
        spec = parse_job(data)
        problems = []
        model = spec.base_model
        try:
            model = await self.model(tenant, spec.base_model)
        except UserError as error:
            problems.append(str(error))
        name, policy = spec.policy
        if policy.rank > world.settings.engine.max_rank:
            problems.append(
                f"policies.{name}.rank: given {policy.rank}, allowed: at most {world.settings.engine.max_rank}"
                " (the service's ROOKERY_MAX_RANK)"
            )
        try:
            options = await self.options(tenant, spec)
            if spec.environment.id is not None:
                await asyncio.to_thread(world.check_environment, spec.environment.id, options)
        except UserError as error:
            line = str(error)
            problems.append(line if line.startswith("environment.") else f"environment: {line}")
        if problems:
            raise SpecError(problems)
        spec = spec.model_copy(update={"base_model": model})
        new = PolicyRow(
            id=world.ids.new("policy"), tenant=tenant, name=name, rank=policy.rank, alpha=policy.scale_alpha,
            targets=list(policy.targets),
        )  # fmt: skip
        await self.warm_start(tenant, spec, new)
        return spec, [new]

    async def model(self, tenant: str, name: str) -> str:
        """The proper name of a base model that this tenant may ask for."""
        owner = await self._world.store.get_tenant(tenant)
        model = resolve(name, folders=owner.admin)  # what lies on the service's disk is the administrator's business
        found = await asyncio.to_thread(status, self._world.settings.cache, model.name)
        if found.state == "refused":
            raise UserError(found.reason)
        return model.name

    async def options(self, tenant: str, spec: JobSpec) -> dict[str, Any]:
        """The environment's options as its host gets them: uploads replaced by where their bytes lie."""
        world = self._world
        options = spec.environment.options
        if spec.environment.id != "jsonl":
            return options
        for field, path in (("dataset", "path"), ("eval_dataset", "eval_path")):
            if path in options:
                raise UserError(f"{path}: the service reads no files of yours; upload it and give {field}")
            if field in options:
                digest = str(options.pop(field))
                try:
                    await world.store.get_upload(tenant, "dataset", digest)
                    options[path] = str(await world.store.run(world.artifacts.path, digest, "rows.jsonl"))
                except NotFound:
                    raise UserError(f"{field}: no dataset {digest!r} of yours; upload it first") from None
        return options

    async def warm_start(self, tenant: str, spec: JobSpec, policy: PolicyRow) -> protocol.AdapterRef | None:
        """The weights to begin from, as workers find them. Raises :class:`SpecError`."""
        world = self._world
        name, asked = spec.policy
        start = asked.warm_start
        if start is None:
            return None
        where = f"policies.{name}.warm_start"
        if start.peft is not None:
            raise SpecError([f"{where}.peft: the service reads no files of yours; upload the folder and give upload"])
        try:
            if start.upload is not None:
                digest = (await world.store.get_upload(tenant, "adapter", start.upload)).hash
            else:
                assert start.job is not None
                row = await world.store.get_job(tenant, start.job)
                if row.spec["base_model"] != spec.base_model:
                    raise SpecError([f"{where}.job: trained {row.spec['base_model']}, this job {spec.base_model}"])
                source = await world.store.get_policy(tenant, start.job, start.policy)
                number = source.head_version if start.version is None else start.version
                if number is None:
                    raise NotFound(f"job {start.job} has no version yet")
                found = await world.store.version(tenant, source.id, number)
                if not found.kept:
                    raise NotFound(f"version {number} of job {start.job} is not kept any more")
                digest = found.hash
            config = await world.store.run(world.artifacts.path, digest, "adapter_config.json")
            problems = _unlike(await asyncio.to_thread(config.read_bytes), name, asked)
        except NotFound as error:
            raise SpecError([f"{where}: {error}"]) from None
        if problems:
            raise SpecError(problems)
        return protocol.AdapterRef(policy=policy.id, version=0, hash=digest, rank=asked.rank, alpha=asked.scale_alpha)

    async def preview(self, tenant: str, spec: JobSpec) -> list[dict[str, Any]]:
        """The first training prompts as the policy would read them."""
        world, environment = self._world, spec.environment
        owner = tenant if environment.hosted is not None else SERVICE
        options = await self.options(tenant, spec)
        chat = await world.chat(spec.base_model)
        name = world.ids.new("preview")
        limits = {"timeout": environment.step_timeout, "return_timeout": environment.return_timeout}
        message = protocol.GetPrompts(
            call="", job=name, environment=environment.name, options=options, split="train", start=0, count=PREVIEWED,
            seed=spec.seed, shuffle=spec.shuffle,
        )  # fmt: skip
        prompts = await world.hosts.prompts(owner, environment.name, message, **limits)
        shown = []
        for number, prompt in enumerate(prompts.prompts):
            host = await world.hosts.host_for(owner, environment.name, environment.return_timeout)
            reset = protocol.Reset(
                call="", episode=f"{name}-{number}", job=name, environment=environment.name, options=options,
                prompt=prompt, seed=number,
            )  # fmt: skip
            try:
                observed = await world.hosts.observe(host, environment.name, reset, **limits)
            finally:
                world.hosts.close_episode(host, reset.episode)
            messages = [{"role": turn.role, "content": turn.content} for turn in observed.messages]
            text = chat.render(messages)
            shown.append({"messages": messages, "text": text, "tokens": len(chat.encode(text))})
        return shown

    async def target(self, tenant: str, target: str) -> Target:
        """What answers to a base model's name, ``JOB`` (also written ``JOB:latest``), ``JOB@VERSION``, or a client's
        checkpoint ``tinker://…``."""
        world = self._world
        if target.startswith(SCHEME):
            checkpoint, run, policy = await find_checkpoint(world, tenant, target)
            return Target(checkpoint.path, run.base_model, adapter_ref(policy, checkpoint))
        job, _, version = target.removesuffix(":latest").partition("@")
        try:
            row = await world.store.get_job(tenant, job)
        except NotFound:
            try:
                model = await self.model(tenant, target)
            except UserError:
                raise NotFound(
                    f"no job and no base model {target!r}; give a model's name, JOB or JOB@VERSION"
                ) from None
            if not world.fleet.expects("rollout", model):
                if model not in CATALOGUE and status(world.settings.cache, model).state != "prepared":
                    raise NotFound(
                        f"no base model {target!r} here: no worker has it and it was never prepared; rookery models"
                        " lists the base models"
                    ) from None
                raise Unavailable(f"no worker serves {model} now: rookery worker or rookery serve starts one") from None
            return Target(model, model, None)
        if version and version != "latest" and not NUMBER.fullmatch(version):
            raise UserError(f"{target!r}: after the @ comes a version's number, or latest")
        spec = JobSpec.model_validate(row.spec)
        policy = await world.store.get_policy(tenant, job, spec.policy[0])
        number = int(version) if NUMBER.fullmatch(version) else policy.head_version
        if number is None:
            raise NotFound(f"job {job} has no version yet")
        found = await world.store.version(tenant, policy.id, number)
        if not found.kept:
            raise NotFound(f"version {number} of job {job} is not kept any more")
        return Target(f"{job}@{number}", spec.base_model, adapter_ref(policy, found))

    async def upload(self, tenant: str, kind: UploadKind, files: Mapping[str, bytes]) -> str:
        """Keep ``files`` as an artifact of the tenant's; answers its hash."""
        world = self._world

        def store() -> protocol.Manifest:
            with world.artifacts.begin() as staging:
                for name, content in files.items():
                    staging.write(name, [content])
                return staging.commit()

        manifest = await world.store.run(store)
        size = sum(shard.size for shard in manifest.shards)
        await world.store.add_upload(tenant, kind, manifest.hash, size, world.clock.time())
        return manifest.hash


def _unlike(config: bytes, name: str, asked: PolicySpec) -> list[str]:
    """Where a PEFT configuration is not the adapter that a policy asks for, a line each."""
    try:
        about = msgspec.json.decode(config, type=dict[str, Any])
        targets = [target for target in TARGETS if f"{target}_proj" in about["target_modules"]]
        found = {"rank": about["r"], "alpha": about["lora_alpha"], "targets": targets}
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        return [f"policies.{name}.warm_start: its adapter_config.json is not that of a LoRA ({error})"]
    given = {"rank": asked.rank, "alpha": asked.scale_alpha, "targets": list(asked.targets)}
    return [
        f"policies.{name}.{field}: given {value}, the adapter to start from has {found[field]}"
        for field, value in given.items()
        if value != found[field]
    ]
