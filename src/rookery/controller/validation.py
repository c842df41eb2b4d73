"""Validation of job specs against the service's state.

Nothing is created for a rejected job; the error names the field, the given value and the allowed ones. Another tenant's
objects answer "not found".
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rookery import protocol
from rookery.controller.episode_views import PromptView
from rookery.controller.fleet.env_hosts import SERVICE, EnvironmentFailed, EnvironmentHosts, EnvironmentRef
from rookery.controller.job_sinks import missing_secrets, sink_problems
from rookery.controller.outages import unread_dataset
from rookery.controller.quotas import ROWS, Quotas, as_jsonl, job_problems, row_problems
from rookery.controller.services import Services, Threads
from rookery.controller.spec_warnings import (
    form_problems,
    judge_problems,
    replying,
    silent_problems,
    spec_warnings,
    split_problems,
    split_warnings,
)
from rookery.controller.targets import Targets, find_version
from rookery.controller.uploads import DATASET, Uploads
from rookery.controller.views import BestConstantView
from rookery.environments.base import SplitSizes
from rookery.environments.builtins import find
from rookery.environments.demonstrations import Demonstration, Preference, demonstration, preference
from rookery.environments.judges import parse_judges
from rookery.environments.messages import readable
from rookery.environments.verifiers.graders import named_models
from rookery.errors import (
    ArtifactMissing,
    IncompleteArtifact,
    NotFound,
    RookeryError,
    Unavailable,
    UserError,
    count_of,
    short,
)
from rookery.spec import values
from rookery.spec.job import FILE_ENVIRONMENTS, EnvironmentSpec, JobSpec, stored_base_model
from rookery.spec.parsing import SpecError, parse_job
from rookery.spec.peft_folder import CONFIG_FILE, WEIGHTS_FILE, PeftLora, read_config, read_lora
from rookery.spec.policy import TARGETS
from rookery.storage.models import PolicyRow
from rookery.storage.repositories import jobs, tenants
from rookery.tokenization.chat import Chat, Message, PromptTooLong, read_tokens, tokenized
from rookery.tokenization.demonstrations import rendered
from rookery.tokenization.registry import (
    is_other_base,
    model_folder,
    projections,
    status,
)

log = logging.getLogger("rookery.controller")

T = TypeVar("T")

PREVIEWED = 3
"""Prompts that a dry run shows."""

TRAINING_PROMPTS = 1_000
"""Training prompts on which a dry run looks for the best constant reply."""


class JobValidator:
    def __init__(
        self,
        services: Services,
        targets: Targets,
        uploads: Uploads,
        hosts: EnvironmentHosts,
        quotas: Quotas,
        check_environment: Callable[[str, dict[str, Any]], SplitSizes | None],
        refused: Counter[str],
    ) -> None:
        """``check_environment(id, options)`` raises :class:`~rookery.errors.UserError` for a built-in environment that
        cannot be made with such options, and returns the sizes of its splits where they are known; ``refused`` counts
        refusals by the limit that caused them."""
        self._services = services
        self._targets = targets
        self._uploads = uploads
        self._hosts = hosts
        self._quotas = quotas
        self._check_environment = check_environment
        self._refused = refused

    async def check(self, tenant: str, data: Any, *, known: bool = False) -> tuple[JobSpec, list[PolicyRow], list[str]]:
        """The job spec in ``data`` with its model's canonical name, its policies, whose ``job`` is set once it has an
        id, and what the job's owner should know before it runs, a line each. Raises :class:`SpecError`, or
        :class:`TooManyRequests` where the job is not ``known`` and the tenant may store no more."""
        services = self._services
        if not known:
            await self._quotas.check_stored(tenant)
            await self._quotas.check_database(tenant)
        spec = await self._services.threads(parse_job, data)
        problems = []
        models = {name: name for name in (spec.base_model, *spec.base_models)}
        for name in models:
            try:
                models[name] = await self._targets.model(tenant, name)
            except UserError as error:
                users = [policy for policy, about in spec.policies.items() if about.base_model == name]
                given = [""] if name == spec.base_model else [f"policies.{policy}." for policy in users]
                problems += [f"{where}{error}" for where in given]
        spec = spec.with_models(models.__getitem__)
        most = self._quotas.limit(tenant, "models")
        if len(set(spec.base_models)) > most:
            problems.append(
                f"policies: they have {count_of(len(set(spec.base_models)), 'base model')}, allowed: {most:g} of a"
                " tenant at once"
            )
        problems += await self._policy_problems(spec)
        problems += judge_problems(spec) + silent_problems(spec)
        problems += await self._judge_problems(tenant, spec, set(models.values()))
        problems += job_problems(spec, services.settings.limits, self._refused)
        problems += await services.threads(row_problems, spec, services.settings.limits)
        if spec.sinks:
            problems += await self._uploads.checked(tenant, sink_problems, spec, services.settings)
            problems += await missing_secrets(services.store, tenant, spec)
        sizes = None
        try:
            options = await self.options(tenant, spec)
            if spec.environment.id is not None:
                checked = self._uploads.checked(tenant, self._check_environment, spec.environment.id, options)
                sizes = await self._reading(tenant, checked)
            problems += split_problems(spec, sizes)
            spec = _with_steps(spec, sizes, problems)
            if sizes is not None and not problems:
                problems += await self._form_problems(spec, sizes)
        except UserError as error:
            line = str(error)
            problems.append(line if line.startswith("environment.") else f"environment: {line}")
        if problems:
            raise SpecError(problems)
        spec = await self._store_rows(tenant, spec)
        rows = await self._policy_rows(tenant, spec)
        return spec, rows, [*spec_warnings(spec), *split_warnings(spec, sizes)]

    async def _reading(self, tenant: str, work: Awaitable[T]) -> T:
        """The result of ``work``, which has an environment read stored datasets. Raises :class:`Unavailable`, which
        names no path of the service, for one that cannot be read now."""
        services = self._services
        try:
            return await work
        except RookeryError as error:
            unread = await unread_dataset(services.store, services.artifacts, error)
            if unread is None:
                raise
            log.warning("a dataset of tenant %s cannot be read: %s", tenant, error, extra={"tenant": tenant})
            raise unread from None

    async def _policy_problems(self, spec: JobSpec) -> list[str]:
        """The parts of a job's policies that the service's settings do not allow, a line each."""
        settings = self._services.settings
        problems = []
        for name, policy in spec.policies.items():
            if policy.lora_rank > settings.engine.max_rank:
                problems.append(
                    f"policies.{name}.rank: given {policy.rank}, allowed: at most {settings.engine.max_rank}"
                    " (the service's ROOKERY_MAX_RANK)"
                )
            model = spec.base_model_of(name)
            reason = await self._services.threads(self._not_native, model) if policy.full else ""
            if reason:
                problems.append(f"policies.{name}.full: {reason}, which trains full-parameter policies; leave full out")
            if policy.trainers > 1 and settings.training.trainer_processes > 1:
                problems.append(
                    f"policies.{name}.trainers: given {policy.trainers}, allowed: 1 where a worker trains with a group"
                    " of processes (the service's ROOKERY_TRAINER_PROCESSES)"
                )
            if spec.algorithm.on_pairs and settings.training.trainer_processes > 1:
                problems.append(
                    "algorithm.name: dpo needs workers that train in one process (the service's"
                    " ROOKERY_TRAINER_PROCESSES is more than 1), which do not divide pairs"
                )
            if policy.warm_start is not None and policy.warm_start.peft is not None:
                problems.append(
                    f"policies.{name}.warm_start.peft: the service reads no files of yours; upload the folder"
                    f" {policy.warm_start.peft!r} (POST /api/v1/adapters; the Python client and rookery run do"
                    " it) and give warm_start.upload"
                )
        return problems

    async def _policy_rows(self, tenant: str, spec: JobSpec) -> list[PolicyRow]:
        """The rows of the policies that have versions; an earlier run's or an upload's artifact is their start."""
        rows = []
        for name, policy in spec.policies.items():
            if policy.base or policy.follows is not None:
                continue  # it does not have its own versions
            new = PolicyRow(
                id=self._services.ids.new("policy"), tenant=tenant, name=name, rank=policy.lora_rank,
                alpha=policy.scale_alpha, targets=[] if policy.full else list(policy.targets),
            )  # fmt: skip
            start = await self.warm_start(tenant, spec.of_policy(name), new)
            rows.append(replace(new, warm_start=start.hash if start is not None else None))
        return rows

    async def _judge_problems(self, tenant: str, spec: JobSpec, served: Collection[str]) -> list[str]:
        """The models of a grader that cannot be asked, a line each. The job's own base models, ``served``, can."""
        judges = parse_judges(self._services.settings.server.judges)
        problems = []
        for model in named_models(spec.environment.options.get("verifier")):
            if model in judges:
                continue
            try:
                await self._targets.find(tenant, model)
            except Unavailable as error:
                if await self._targets.model(tenant, model) not in served:
                    problems.append(f"environment.verifier.grader.model: {error}")
            except UserError as error:
                problems.append(f"environment.verifier.grader.model: {error}")
        return problems

    async def _form_problems(self, spec: JobSpec, sizes: SplitSizes) -> list[str]:
        """The rows whose roles, or calls of tools, the chat template of a prepared base model of a policy that reads
        them refuses, a line each."""
        services, problems = self._services, list[str]()
        for model in dict.fromkeys(map(spec.base_model_of, replying(spec))):
            if (await services.threads(status, services.settings.cache, model)).state == "prepared":
                problems += await services.threads(form_problems, await services.chat(model), sizes, model)
        return problems  # of the others a dry run shows them, which prepares the first

    def _not_native(self, model: str) -> str:
        """Why the native decoder does not compute a base model; empty if it does, or that is not known yet."""
        found = status(self._services.settings.cache, model).inspected
        return found.not_native if found is not None else ""

    async def _store_rows(self, tenant: str, spec: JobSpec) -> JobSpec:
        """The job with its inline rows as stored datasets: the options travel with every episode."""
        environment = spec.environment
        inline = {name: rows for name in ROWS if (rows := environment.options.get(name)) is not None}
        if environment.id not in FILE_ENVIRONMENTS or not inline:
            return spec
        fields = environment.model_dump(exclude=set(ROWS))
        for name, rows in inline.items():
            content = await self._services.threads(as_jsonl, rows)
            fields[ROWS[name]] = await self._uploads.keep_rows(tenant, content)
        return spec.model_copy(update={"environment": EnvironmentSpec.model_validate(fields)})

    async def environment(self, tenant: str, job: str, spec: JobSpec) -> EnvironmentRef:
        """The environment of a job, as its hosts get it."""
        owner = tenant if spec.environment.hosted is not None else SERVICE
        return EnvironmentRef(job, owner, spec.environment, await self.options(tenant, spec), tenant)

    async def options(self, tenant: str, spec: JobSpec) -> dict[str, Any]:
        """The environment's options as its host gets them: uploads replaced by the paths of their files."""
        services = self._services
        options = spec.environment.options
        if spec.environment.id == "verifiers":
            for name in ("tokenizer", "policies", "trained"):
                if name in options:
                    raise UserError(f"environment.{name}: the service fills it in; leave it out")
            if len(set(spec.base_models)) > 1:
                raise UserError("environment.id: verifiers renders for one base model; give every policy the same")
            tokenizer = str(model_folder(services.settings.cache, spec.base_models[0]))
            return {**options, "tokenizer": tokenizer, "policies": list(spec.policies), "trained": spec.trained}
        if spec.environment.id not in FILE_ENVIRONMENTS:
            return options
        for field, path in (("dataset", "path"), ("eval_dataset", "eval_path")):
            if path in options:
                raise UserError(
                    f"environment.{path}: the service reads no files of yours; upload {options[path]!r}"
                    f" (POST /api/v1/datasets; the Python client and rookery run do it) and give environment.{field}"
                )
            if field in options:
                digest = str(options.pop(field))
                try:
                    await services.store.read(tenants.get_upload, tenant, "dataset", digest)
                except NotFound:
                    raise UserError(f"{field}: no dataset {digest!r} of yours; upload it first") from None
                options[path] = str(await self._stored(field, digest, DATASET))
        if isinstance(options.get("tools"), list):
            options["tools"] = [await self._with_corpus(tenant, tool) for tool in options["tools"]]
        return options

    async def _with_corpus(self, tenant: str, tool: Any) -> Any:
        """The options of a tool with the path of its uploaded corpus."""
        if not isinstance(tool, Mapping) or tool.get("tool") != "search" or "index" not in tool:
            return tool
        digest = str(tool["index"])
        try:
            await self._services.store.read(tenants.get_upload, tenant, "dataset", digest)
        except NotFound:
            raise UserError(f"environment.tools.index: no corpus {short(digest)!r} of yours; upload it first") from None
        return {**tool, "index": str(await self._stored("environment.tools.index", digest, DATASET))}

    async def warm_start(self, tenant: str, spec: JobSpec, policy: PolicyRow) -> protocol.AdapterRef | None:
        """The reference to the weights to start from, None for a new adapter: those that ``policy`` has noted, where
        its job was submitted before. Raises :class:`SpecError`."""
        services = self._services
        name, asked = spec.policy
        start = asked.warm_start
        if start is None:
            return None
        where = f"policies.{name}.warm_start"
        try:
            if policy.warm_start is not None:
                digest = policy.warm_start
            elif start.upload is not None:
                digest = (await services.store.read(tenants.get_upload, tenant, "adapter", start.upload)).hash
            else:
                assert start.job is not None
                row = await services.store.read(jobs.find_job, tenant, start.job)
                trained = stored_base_model(row.spec, start.policy)
                if trained != spec.base_model:
                    raise SpecError([f"{where}.job: trained {trained}, this policy has {spec.base_model}"])
                source, found = await find_version(services.store, tenant, row.id, start.policy, start.version)
                if not source.rank:
                    whole = f"{start.policy} of job {row.name} has all parameters (full: true), not a LoRA"
                    raise SpecError([f"{where}: {whole}; give a policy that trained a LoRA"])
                digest = found.hash
            if start.upload is not None:
                await self._stored(where, digest, WEIGHTS_FILE)  # next to the configuration
            config = await self._stored(where, digest, CONFIG_FILE)
            problems = await self._services.threads(self._unfit, config, spec, start.upload is not None)
        except NotFound as error:
            raise SpecError([f"{where}: {error}"]) from None
        if problems:
            raise SpecError(problems)
        return protocol.AdapterRef(policy=policy.id, version=0, hash=digest, rank=asked.rank, alpha=asked.scale_alpha)

    async def _stored(self, field: str, digest: str, file: str) -> Path:
        """A local path of a file of an artifact that the database names. Raises :class:`ArtifactMissing`. The tenant's
        own threads fetch a remote one: in that of transfers, every tenant's commits would wait for it."""
        services = self._services
        fetch = services.threads if services.artifacts.remote else services.store.transfer
        try:
            return await fetch(services.artifacts.path, digest, file)
        except (NotFound, IncompleteArtifact) as error:
            raise ArtifactMissing(f"{field}: its bytes are missing ({error}); restore them from a backup") from None

    def _unfit(self, config: Path, spec: JobSpec, uploaded: bool) -> list[str]:
        """Why the job's policy cannot start from the adapter with this PEFT configuration, a line each. Blocks. What is
        ``uploaded`` is read as a worker reads it."""
        (name, asked), model = spec.policy, spec.base_model
        where = f"policies.{name}.warm_start"
        lora: PeftLora | None = None
        try:
            if uploaded:
                weights = config.with_name(WEIGHTS_FILE)
                with weights.open("rb") as file:
                    lora = read_lora(config.read_bytes(), file, weights.stat().st_size)
                about, adapted = lora.options, lora.targets
            else:
                about = read_config(config.read_bytes())
                adapted = [target for target in TARGETS if f"{target}_proj" in about["target_modules"]]
        except UserError as error:
            return [f"{where}: {error}"]
        except OSError as error:
            raise ArtifactMissing(f"{where}: its bytes cannot be read now", str(error)) from None
        cache, recorded = self._services.settings.cache, about.get("base_model_name_or_path")
        if recorded and is_other_base(cache, recorded, model):
            return [
                f"{where}: the adapter was trained on {short(recorded)}, this job trains {model}; give that base_model,"
                " or correct base_model_name_or_path in the adapter's adapter_config.json"
            ]
        if lora is not None and (known := projections(cache, model)) is not None and (problem := lora.misfit(known)):
            return [f"{where}: {problem}"]
        found = {"rank": about["r"], "alpha": about["lora_alpha"], "targets": adapted}
        given = {"rank": asked.rank, "alpha": asked.scale_alpha, "targets": list(asked.targets)}
        if self._not_native(model) and set(asked.targets) == set(TARGETS):
            del given["targets"]  # any projections are all of a family whose modules have other names
        return [
            f"policies.{name}.{field}: given {value}, the adapter to start from has {found[field]}"
            for field, value in given.items()
            if value != found[field]
        ]

    async def preview(
        self, tenant: str, spec: JobSpec
    ) -> tuple[list[PromptView], dict[str, BestConstantView], list[str]]:
        """The first training prompts as the policy would read them, by policy the fixed reply that earns most on the
        held-out prompts, without any on the first training prompts, and notes about the splits. Raises
        :class:`~rookery.controller.fleet.env_hosts.EnvironmentFailed` for an environment without prompts, also without
        held-out ones for a job that evaluates, and :class:`Unavailable` at once for a hosted environment that no host
        offers: a job waits for one, the caller of a dry run would not know for what."""
        return await self._reading(tenant, self._preview(tenant, spec))

    async def _preview(
        self, tenant: str, spec: JobSpec
    ) -> tuple[list[PromptView], dict[str, BestConstantView], list[str]]:
        services, hosts = self._services, self._hosts
        environment = await self.environment(tenant, services.ids.new("preview"), spec)
        if (hosted := spec.environment.hosted) is not None:
            if not hosts.connected(tenant, hosted):
                raise Unavailable(
                    f"environment.hosted: no environment host of yours offers {hosted!r} now; start the process that "
                    "hosts it, or correct the name"
                )
            at_once = spec.environment.model_copy(update={"return_timeout": 0.0})  # also where the host leaves now
            environment = replace(environment, spec=at_once)
        evaluation = spec.evaluation
        await services.chat(spec.base_models[0])  # first: the run needs it whichever policy begins
        split = await hosts.split(environment, "train", 0, PREVIEWED, seed=spec.seed, shuffle=spec.shuffle)
        notes = [split.note]
        if evaluation.prompts:  # raises if there are none
            held_out = await hosts.split(environment, "eval", 0, 1, seed=evaluation.seed, shuffle=False)
            notes.append(held_out.note)
        policies = list(spec.policies)
        constants = await (
            hosts.best_constants(environment, policies, "eval", evaluation.prompts, seed=evaluation.seed, shuffle=False)
            if evaluation.prompts
            else hosts.best_constants(
                environment, policies, "train", TRAINING_PROMPTS, seed=spec.seed, shuffle=spec.shuffle
            )
        )
        convert: Callable[[Mapping[str, Any]], Demonstration | Preference] = demonstration
        if spec.algorithm.on_pairs:
            convert = preference
        shown, full = list[PromptView](), list[tuple[int, int]]()
        for number, prompt in enumerate(split.prompts):
            if spec.algorithm.on_rows:
                row = await services.threads(convert, values.decode(prompt))
                first = _Opening(policies[0], row.prompt, row.tools)
            else:
                first = await self._opening(environment, policies, number, prompt)
            chat = await services.chat(spec.base_model_of(first.policy))
            try:
                text, tokens = await first.read(services.threads, chat)
            except PromptTooLong as error:
                notes.append(f"the training prompt {number + 1} is not shown, and its episodes fail: {error}")
                continue
            shown.append(
                PromptView(messages=[readable(message) for message in first.messages], text=text, tokens=tokens)
            )
            if tokens >= chat.context:
                full.append((tokens, chat.context))
        if full:
            longest, context = max(full)
            notes.append(
                f"{len(full)} of the first {count_of(len(split.prompts), 'prompt')} leave no room for a reply: the"
                f" longest has {count_of(longest, 'token')}, the model's context is {context}"
            )
        best = {name: BestConstantView.model_validate(constant) for name, constant in constants.items()}
        return shown, best, [note for note in notes if note]

    async def _opening(
        self, environment: EnvironmentRef, policies: Sequence[str], number: int, prompt: bytes
    ) -> _Opening:
        """How an episode of the prompt of this ``number`` begins. Raises
        :class:`~rookery.controller.fleet.env_hosts.EnvironmentFailed`, also where each such episode would fail."""
        host = await self._hosts.host_for(environment)
        reset = environment.reset(f"{environment.job}-{number}", prompt, number)
        try:
            observed = await self._hosts.observe(host, environment, reset)
        finally:
            self._hosts.close_episode(host, reset.episode)
        policy = observed.policy or policies[0]
        if policy not in policies:
            raise EnvironmentFailed(environment.unknown_policy(policy, 0, policies))
        messages = [{"role": turn.role, "content": turn.content} for turn in observed.messages]
        return _Opening(policy, messages, continued=observed.tokens)


@dataclass(frozen=True)
class _Opening:
    """The beginning of an episode, as the policy reads it that replies first."""

    policy: str
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    continued: Sequence[int] = ()
    """Tokens of the environment instead of messages."""

    async def read(self, threads: Threads, chat: Chat) -> tuple[str, int]:
        """The text, and the number of its tokens. Raises :class:`PromptTooLong`."""
        if self.continued:
            return await read_tokens(threads, chat.decode, self.continued), len(self.continued)
        measured = [*self.messages, *self.tools]
        return await tokenized(threads, chat, measured, _rendered, chat, self.messages, self.tools)


def _with_steps(spec: JobSpec, sizes: SplitSizes | None, problems: list[str]) -> JobSpec:
    """The job with the optimizer steps that its epochs take; adds to ``problems`` where they are not known."""
    if spec.stop.epochs is None:
        return spec
    if sizes is None:
        problems.append("stop.epochs: the environment does not know how many prompts it has; give stop.steps")
        return spec
    return spec.with_epochs(sizes.train)


def with_defaults(spec: JobSpec) -> dict[str, Any]:
    """A valid job with every default, also those of its loss, its built-in environment and its verifier."""
    shown = spec.model_dump(mode="json")
    loss = spec.algorithm.loss
    shown["algorithm"]["loss"] = {"name": loss.name, **loss.params}
    if spec.environment.id is not None:
        options = find(spec.environment.id).check(spec.environment.options)
        shown["environment"] |= options.model_dump(mode="json", exclude_none=True)
    return shown


def _rendered(chat: Chat, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[str, int]:
    """The text of a conversation as the model reads it, and the number of its tokens."""
    text = rendered(chat, messages, tools)
    return text, len(chat.encode(text))
