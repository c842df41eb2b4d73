"""The names that a tenant may give for weights: base models, jobs, versions of their policies, checkpoints of clients.

Another tenant's objects answer "not found".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rookery import protocol
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.services import Services
from rookery.controller.views import NUMBER
from rookery.controller.weights.store import adapter_ref
from rookery.errors import NotFound, Unavailable, UserError, short
from rookery.settings import Settings
from rookery.spec.fine_tuned import CHECKPOINT_OF, is_name_of
from rookery.spec.job import stored_base_model, without_weights
from rookery.storage.models import CheckpointRow, ModelRow, PolicyRow, VersionRow
from rookery.storage.repositories import jobs, sessions, tenants, versions
from rookery.storage.store import Store
from rookery.tokenization.registry import CATALOGUE, is_hub_id, resolve, status, usable

SCHEME = "tinker://"
"""Begins the path of a client's checkpoint, ``tinker://<run>/<kind>/<name>``."""


@dataclass(frozen=True)
class Target:
    """A base model, or one version of a policy on it. ``name`` identifies it uniquely."""

    name: str
    model: str
    adapter: protocol.AdapterRef | None


class Targets:
    """Finds what a name means for a tenant."""

    def __init__(self, services: Services, fleet: Fleet, refused: Counter[str]) -> None:
        """``refused`` counts refusals by the limit that caused them."""
        self._services = services
        self._fleet = fleet
        self._refused = refused

    async def model(self, tenant: str, name: str) -> str:
        """The canonical name of a base model that this tenant may use. Raises :class:`UserError`."""
        owner = await self._services.store.read(tenants.get_tenant, tenant)
        settings = self._services.settings
        named = may_name(settings, name, owner.admin)  # also a folder of the service
        model = resolve(name, folders=named)
        if model.kind == "hub" and not named:
            self._refused["allowed_models"] += 1
            raise UserError(
                f"base_model: the hub id {short(model.name)} is not allowed to tenants; give one of"
                f" {', '.join(CATALOGUE)}, or ask the administrator to add it to the service's ROOKERY_ALLOWED_MODELS"
            )
        engines = (settings.engine.inference_engine, settings.training.trainer)
        if self._fleet.expects("rollout", model.name):
            engines = ("auto", "auto")  # its workers may have other settings than the service
        await self._services.threads(usable, settings.cache, model.name, *engines)
        return model.name

    async def find(self, tenant: str, target: str) -> Target:
        """The target that a base model's name, ``JOB`` (also ``JOB:latest``), ``JOB@VERSION``, both also as
        ``JOB/POLICY`` for another policy than the first, or a client's checkpoint
        ``tinker://…`` names; ``JOB`` is a job's id or name, or ``NAME~1`` for the one before. A base model's name means
        the model, whatever jobs are called so. Raises :class:`NotFound`, :class:`UserError`, or
        :class:`Unavailable`."""
        services = self._services
        if target.startswith(SCHEME):
            checkpoint, run, policy = await find_checkpoint(services, tenant, target)
            return Target(checkpoint.path, run.base_model, adapter_ref(policy, checkpoint))
        if target.startswith("ft:"):
            target = await self._fine_tuned(tenant, target)
        job, at, version = target.removesuffix(":latest").partition("@")
        job, _, chosen = job.partition("/")
        no_policy = ""
        try:
            row = await services.store.read(jobs.find_job, tenant, job)
            policies = {policy.name: policy for policy in await services.store.read(jobs.policies, tenant, row.id)}
            about = row.spec.get("policies", {}).get(chosen, {})
            if about.get("base"):
                if at and version != "latest":
                    raise UserError(f"{target!r}: {chosen} is the base model, without versions; give {row.id}/{chosen}")
                return Target(model := stored_base_model(row.spec, chosen), model, None)
            if about.get("follows"):
                other = about["follows"]["policy"]
                raise UserError(f"{target!r}: it replies with versions of {other}; give {row.id}/{other}@VERSION")
            if chosen and chosen not in policies:
                no_policy = without_weights(row.spec, chosen, row.name)
                raise NotFound(target)
            if target == row.name and target in CATALOGUE:
                raise NotFound(target)  # the model is meant
        except NotFound:
            try:
                model = await self.model(tenant, target)
            except UserError:
                raise NotFound(
                    no_policy or f"no job and no base model {target!r}; give a model's name, JOB or JOB@VERSION"
                ) from None
            if not self._fleet.expects("rollout", model):
                if model not in CATALOGUE and status(services.settings.cache, model).state != "prepared":
                    raise NotFound(
                        no_policy
                        or f"no base model {target!r} here: no worker has it and it was never prepared; rookery models"
                        " lists the base models"
                    ) from None
                raise Unavailable(f"no worker serves {model} now: rookery worker or rookery serve starts one") from None
            return Target(model, model, None)
        if at and version != "latest" and not NUMBER.fullmatch(version):
            raise UserError(f"{target!r}: after the @ comes a version's number, or latest")
        policy = policies[chosen] if chosen else _first(row.spec, policies)
        number = int(version) if NUMBER.fullmatch(version) else None
        policy, found = await find_version(services.store, tenant, row.id, policy.name, number)
        name = f"{row.id}/{policy.name}" if len(policies) > 1 else row.id  # as the list of models has it
        return Target(f"{name}@{found.version}", stored_base_model(row.spec, policy.name), adapter_ref(policy, found))

    async def _fine_tuned(self, tenant: str, name: str) -> str:
        """The ``JOB`` or ``JOB@VERSION`` that an OpenAI name ``ft:BASE:TENANT:SUFFIX:JOB[:ckpt-step-N]`` means. Raises
        :class:`NotFound`."""
        store, (model, checkpoint, step) = self._services.store, name.partition(CHECKPOINT_OF)
        try:
            row = await store.read(jobs.get_job, tenant, f"job-{model.rpartition(':')[2]}")
            if not is_name_of(model, row.spec["base_model"], row.name, row.id):
                raise NotFound("the name of another model")
            if not checkpoint:
                return row.id
            policies = {policy.name: policy for policy in await store.read(jobs.policies, tenant, row.id)}
            number = int(step) if NUMBER.fullmatch(step) else -1
            found = await store.read(versions.newest_of_step, tenant, _first(row.spec, policies).id, number)
            if found is None or str(number) != step:
                raise NotFound("the name of no version")
            return f"{row.id}@{found}"
        except (NotFound, StopIteration, ValueError):
            raise NotFound(f"no fine-tuned model {short(name)}; GET /v1/fine_tuning/jobs lists yours") from None


async def find_policy(store: Store, tenant: str, job: str, policy: str) -> PolicyRow:
    """A policy of a job that has weights. Raises :class:`NotFound`, which says why there is none."""
    try:
        return await store.read(jobs.get_policy, tenant, job, policy)
    except NotFound:
        row = await store.read(jobs.get_job, tenant, job)
        raise NotFound(without_weights(row.spec, policy, row.name)) from None


def may_name(settings: Settings, name: str, admin: bool) -> bool:
    """Whether a tenant may name a base model, by its canonical name. The service tells it of no other."""
    served, allowed = (
        {one.strip() for one in names.split(",")} for names in (settings.server.models, settings.limits.allowed_models)
    )
    if admin or name in CATALOGUE or name in served:
        return True
    return is_hub_id(name) and bool({"*", name} & allowed)


async def find_version(
    store: Store, tenant: str, job: str, policy: str, number: int | None
) -> tuple[PolicyRow, VersionRow]:
    """A policy of a job and its version ``number``, the newest for None. Raises :class:`NotFound` where the version
    does not exist or its artifact was deleted."""
    row = await find_policy(store, tenant, job, policy)
    number = row.head_version if number is None else number
    if number is None:
        raise NotFound(f"job {job} has no version yet")
    try:
        version = await store.read(versions.version, tenant, row.id, number)
    except NotFound:
        newest = f"its newest is {row.head_version}" if row.head_version is not None else "it has none yet"
        raise NotFound(f"no version {number} of policy {policy} of job {job}; {newest}") from None
    if not version.kept:
        raise NotFound(f"version {number} of job {job} is not kept any more; checkpoints.keep_last says how many are")
    return row, version


def _first(spec: Mapping[str, Any], policies: Mapping[str, PolicyRow]) -> PolicyRow:
    """The policy that the name of a stored job means, of its ``policies`` by name: the first in its file."""
    return next(policies[name] for name in spec.get("policies", policies) if name in policies)


async def find_checkpoint(services: Services, tenant: str, path: str) -> tuple[CheckpointRow, ModelRow, PolicyRow]:
    """The checkpoint ``tinker://<run>/<kind>/<name>``, its training run and policy. Raises :class:`NotFound`, also for
    an expired checkpoint."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or not all(parts):
        raise UserError(f"{path!r} is no checkpoint; one is {SCHEME}<run>/<weights|sampler_weights>/<name>")
    row = await services.store.read(sessions.get_checkpoint, tenant, *parts)
    if row.expires is not None and row.expires <= services.clock.time():
        raise NotFound(f"{path} has expired")
    return row, *await services.store.read(sessions.get_model, tenant, row.model)
