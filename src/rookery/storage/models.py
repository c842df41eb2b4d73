"""The tables. Every row has an owner (``tenant``); column names are the field names of :mod:`rookery.storage.rows`.

Text columns take any Python string: what PostgreSQL or SQLite cannot hold (NUL, lone surrogates) is replaced on the way
in, so that an environment's strange error message can never fail a transaction. JSON columns are text too, written with
ASCII escapes, and keep NaN and infinities, which a metric may be.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.types import TypeDecorator

from rookery.protocol import Manifest

SCHEMA_VERSION = 3
"""Raised with every change of the tables below; another version in a database is refused."""


class Words(TypeDecorator[str]):
    """Any string; NUL and lone surrogates become replacement characters."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value.replace("\x00", "\ufffd").encode("utf-8", "replace").decode("utf-8")


class Json(TypeDecorator[Any]):
    """Anything that JSON holds, plus NaN and infinities."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str:
        return json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class ManifestJson(TypeDecorator[Manifest]):
    """A manifest, as the JSON of its fields."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Manifest | None, dialect: Dialect) -> str:
        return msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Manifest | None:
        return None if value is None else msgspec.json.decode(value, type=Manifest)


metadata = MetaData()

meta = Table("meta", metadata, Column("name", Words, primary_key=True), Column("value", Words, nullable=False))

tenants = Table(
    "tenants",
    metadata,
    Column("id", Words, primary_key=True),
    Column("name", Words, nullable=False),
    Column("created", Double, nullable=False),
    Column("admin", Boolean, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("hash", Words, primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("label", Words, nullable=False),
    Column("created", Double, nullable=False),
    Column("revoked", Double),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", Words, primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("name", Words, nullable=False),
    Column("spec", Json, nullable=False),
    Column("idempotency_key", Words),
    Column("state", Words, nullable=False),
    Column("reason", Words, nullable=False),
    Column("error", Words, nullable=False),
    Column("created", Double, nullable=False),
    Column("started", Double),
    Column("finished", Double),
    Column("step", BigInteger, nullable=False),
    Column("cursor", BigInteger, nullable=False),
    Column("counters", Json, nullable=False),
    Column("rng", Json, nullable=False),
    UniqueConstraint("tenant", "idempotency_key"),
)

policies = Table(
    "policies",
    metadata,
    Column("id", Words, primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("job", ForeignKey("jobs.id")),
    Column("name", Words, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("alpha", Double, nullable=False),
    Column("targets", Json, nullable=False),
    Column("head_version", BigInteger),
    Column("lease", BigInteger, nullable=False),
    UniqueConstraint("job", "name"),
)

versions = Table(
    "versions",
    metadata,
    Column("policy", ForeignKey("policies.id"), primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("parent", BigInteger),
    Column("manifest", ManifestJson, nullable=False),
    Column("hash", Words, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("created", Double, nullable=False),
    Column("metrics", Json, nullable=False),
    Column("kept", Boolean, nullable=False),
    Column("lost", Words, nullable=False),
    Column("evaluation", Double),
    Index("versions_by_hash", "hash"),
)

groups = Table(
    "groups",
    metadata,
    Column("id", Words, primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("job", ForeignKey("jobs.id"), nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("split", Words, nullable=False),
    Column("prompt", LargeBinary, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("state", Words, nullable=False),
    Column("consumed_by", BigInteger),
    Column("min_version", BigInteger),
    Column("created", Double, nullable=False),
    Column("finished", Double),
    Column("reason", Words, nullable=False),
    UniqueConstraint("job", "split", "ordinal"),
    Index("groups_by_state", "job", "state"),
)

episodes = Table(
    "episodes",
    metadata,
    Column("id", Words, primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("job", ForeignKey("jobs.id"), nullable=False),
    Column("group_id", ForeignKey("groups.id"), nullable=False),
    Column("member", Integer, nullable=False),
    Column("state", Words, nullable=False),
    Column("version", BigInteger),
    Column("seed", BigInteger, nullable=False),
    Column("turns", LargeBinary, nullable=False),
    Column("trajectories", LargeBinary, nullable=False),
    Column("reward", Double),
    Column("metrics", Json, nullable=False),
    Column("host_instance", Words, nullable=False),
    Column("error", Words, nullable=False),
    Column("finished", Double),
    UniqueConstraint("group_id", "member"),
    Index("episodes_by_time", "job", "finished"),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("policy", ForeignKey("policies.id"), primary_key=True),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("job", ForeignKey("jobs.id"), nullable=False),
    Column("prompts", Integer, nullable=False),
    Column("mean", Double, nullable=False),
    Column("stderr", Double, nullable=False),
    Column("results", Json, nullable=False),
    Column("created", Double, nullable=False),
)

uploads = Table(
    "uploads",
    metadata,
    Column("hash", Words, primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), primary_key=True),
    Column("kind", Words, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("created", Double, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", Words, primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("idempotency_key", Words),
    Column("created", Double, nullable=False),
    Column("seen", Double, nullable=False),
    Column("finished", Double),
    Column("status", Words, nullable=False),
    Column("sdk_version", Words, nullable=False),
    Column("name", Words, nullable=False),
    Column("about", Json, nullable=False),
    UniqueConstraint("tenant", "idempotency_key"),
)

models = Table(
    "models",
    metadata,
    Column("id", Words, primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("session", ForeignKey("sessions.id"), nullable=False),
    Column("base_model", Words, nullable=False),
    Column("asked_model", Words, nullable=False),
    Column("policy", ForeignKey("policies.id"), nullable=False),
    Column("lora", Json, nullable=False),
    Column("about", Json, nullable=False),
    Column("created", Double, nullable=False),
    Column("used", Double, nullable=False),
    Column("done_seq", BigInteger, nullable=False),
    Column("inflight", BigInteger),
    Index("models_by_session", "session"),
)

samplers = Table(
    "samplers",
    metadata,
    Column("id", Words, primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("session", ForeignKey("sessions.id"), nullable=False),
    Column("base_model", Words, nullable=False),
    Column("asked_model", Words, nullable=False),
    Column("path", Words, nullable=False),
    Column("model", ForeignKey("models.id")),
    Column("inflight", Boolean, nullable=False),
    Column("policy", Words, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("hash", Words, nullable=False),
    Column("rank", Integer, nullable=False),
    Column("alpha", Double, nullable=False),
    Column("created", Double, nullable=False),
    Column("used", Double, nullable=False),
    Column("kept", Boolean, nullable=False),
    Column("clones", Integer, nullable=False),
    Index("samplers_by_hash", "hash"),
    Index("samplers_by_session", "session"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("model", ForeignKey("models.id"), primary_key=True),
    Column("kind", Words, primary_key=True),
    Column("name", Words, primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("policy", Words, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("manifest", ManifestJson, nullable=False),
    Column("hash", Words, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("created", Double, nullable=False),
    Column("expires", Double),
    Column("about", Json, nullable=False),
    Index("checkpoints_by_hash", "hash"),
)

futures = Table(
    "futures",
    metadata,
    Column("id", Words, primary_key=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("model", ForeignKey("models.id")),
    Column("seq", BigInteger, nullable=False),
    Column("digest", Words, nullable=False),
    Column("call", LargeBinary, nullable=False),
    Column("outcome", LargeBinary),
    Column("created", Double, nullable=False),
    Column("finished", Double),
    Index("futures_by_model", "model", "seq"),
    Index("futures_by_time", "finished"),
)

events = Table(
    "events",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("tenant", ForeignKey("tenants.id"), nullable=False),
    Column("job", ForeignKey("jobs.id")),
    Column("time", Double, nullable=False),
    Column("kind", Words, nullable=False),
    Column("text", Words, nullable=False),
    Index("events_by_job", "job", "id"),
)

bills = Table(
    "bills",
    metadata,
    Column("tenant", ForeignKey("tenants.id"), primary_key=True),
    Column("job", Words, primary_key=True),
    Column("used", Json, nullable=False),
)
