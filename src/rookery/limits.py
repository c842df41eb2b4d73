"""Limits of what one client or one tenant can make the service hold: two sections of :mod:`rookery.settings`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class EdgeSettings(Section):
    """What one client can make the service hold. A request above a limit is refused with its name, and counted."""

    json_bytes: int = Field(1 << 20, ge=1 << 10)
    """Largest JSON body of chats, completions and administration. A prompt of 100,000 token ids has 0.7 MB."""
    job_bytes: int = Field(16 << 20, ge=1 << 10)
    """Largest body of a job or of a Tinker request. The Tinker SDK splits training data into requests of 5 MB."""
    tenant_body_bytes: int = Field(256 << 20, ge=1 << 10)
    """Bodies of one tenant's requests in memory at once, in bytes; more get status 429. One alone has its own limit."""
    json_items: int = Field(200_000, ge=100)
    """Most values in one JSON body, counted before it is parsed. Each token id of a prompt is one."""
    json_depth: int = Field(64, ge=8, le=256)
    """Deepest nesting of a JSON body."""
    characters_per_token: int = Field(32, ge=4)
    """A prompt with more characters than this times the model's context is too long, and is refused before it is
    tokenized. Ordinary text has three to five characters per token."""
    connections: int = Field(4096, ge=8)
    """Most open connections; fewer where the limit of file descriptors, less `reserved_descriptors`, allows fewer. For
    a connection above it, the oldest one that waits for a request is closed; without one the new one is."""
    connections_per_address: int = Field(2048, ge=4)
    """Most open connections of one address, apart from connected workers and environment hosts; never more than three
    quarters of all. A client of the OpenAI or Tinker SDK opens up to 1,000."""
    tenant_open_requests: int = Field(1024, ge=1)
    """Most requests of one tenant that are open at once, streams and those whose body is on its way included; never
    more than half of the connections of one address. More get status 429."""
    body_seconds: float = Field(30.0, gt=0)
    """Time that a body may take whatever its size. After it, a body that came with less than `body_rate` bytes per
    second on average gets status 408."""
    body_rate: float = Field(1024.0, gt=0)
    """Bytes per second."""
    stall_seconds: float = Field(60.0, gt=0)
    """A client that takes none of a response for so long, while 64 kB of it wait, is disconnected."""
    reserved_descriptors: int = Field(256, ge=0)
    """File descriptors that connections leave free for workers, running jobs and the database."""
    head_seconds: float = Field(15.0, gt=0)
    """Time that a connection has to send the head of a request."""
    head_bytes: int = Field(64 << 10, ge=1 << 10)
    """Largest head of a request: its address and headers. The connection is closed for a larger one."""
    hello_bytes: int = Field(1 << 20, ge=1 << 10)
    """Largest message of a worker or environment host that is not welcomed yet. A hello lists the worker's cached
    adapters, 70 bytes each."""
    host_bytes: int = Field(8 << 20, ge=1 << 16)
    """Largest message of a tenant's environment host: prompts, or the answer of an environment."""
    hello_sockets: int = Field(128, ge=1)
    """Most WebSockets that are not welcomed yet; the oldest is closed for one more."""
    failed_keys_per_minute: int = Field(60, ge=1)
    """Requests with a wrong key that one address may send per minute. Above it, keys that were not valid before are
    refused with status 429, unchecked."""


class LimitSettings(Section):
    """Budgets: the most that one job or one tenant may ask of the service. A job beyond a limit is refused with the
    numbers; work beyond a limit waits."""

    options_bytes: int = Field(64 << 10, ge=1 << 10)
    """Largest options of a job's environment as JSON, without rows. Options travel with every episode; rows are stored
    once, as a dataset."""
    row_bytes: int = Field(256 << 10, ge=1 << 10)
    """Largest row of an uploaded dataset: a row travels with each of its episodes."""
    dataset_rows: int = Field(5_000_000, ge=1)
    """Rows of one uploaded dataset."""
    job_tokens: int = Field(1 << 25, ge=1)
    """Sampled tokens that the groups of one job may hold in memory: `groups_per_step` x (`max_staleness` + 1) x
    `group_size` x `max_tokens` x turns. A token takes about 80 bytes of the service. A tenant's running jobs together
    hold at most twice as many; further ones are queued."""
    job_episodes: int = Field(4096, ge=2)
    """Episodes of one job that run at once, in whole groups, at least one. Further groups start when others end. An
    evaluation has as many in addition."""
    start_crashes: int = Field(6, ge=1)
    """Crashes of the service in a row that a job was shown to have caused (the service worked on its start alone, or
    grew by half a gigabyte) after which it is paused until a person resumes it. Before, it starts after a growing
    delay, from 2 s to ten minutes. Other jobs resume by themselves."""
    start_seconds: float = Field(60.0, gt=0)
    """A job is starting until it has trained a step or has run for this long."""
    allowed_models: str = ""
    """Hub ids (`organisation/model`), comma-separated, that tenants may name in addition to the catalogue's models, by
    their names or hub ids, and those of `models`; `*` allows every hub id. The administrator may name any hub id, and
    alone may name folders."""
    models_prepared_at_once: int = Field(1, ge=1)
    """Base models that are downloaded and converted at the same time; others wait."""
    prepare_seconds: float = Field(3600.0, gt=0)
    """Time limit of preparing one base model."""
    model_idle_seconds: float = Field(1800.0, gt=0)
    """Local workers of a base model that is not in `models` end when no job, client or request used it for this
    long. They start again when it is needed."""
    tenant_jobs: int = Field(16, ge=1)
    """Jobs of one tenant that run at once; further ones are queued. `rookery tenants limit` overrides this and the
    limits below for one tenant."""
    tenant_waiting_jobs: int = Field(1000, ge=1)
    """Queued jobs of one tenant; further ones get status 429."""
    tenant_requests: int = Field(4096, ge=1)
    """Generations of one tenant's clients (chat, OpenAI, Tinker) that wait or run at once; further ones get status 429.
    A Tinker recipe samples up to 2,048 at once."""
    tenant_request_tokens: int = Field(1 << 24, ge=1)
    """Tokens of those generations: prompts, and as many tokens as they may sample. One request alone has no limit."""
    tenant_queued_bytes: int = Field(256 << 20, ge=1 << 10)
    """Training data of one tenant's clients (Tinker) that wait, or belong to a step that is not committed yet, in
    bytes; more get status 429. They are kept in memory: after the loss of a worker they are computed again."""
    tenant_adapters: int = Field(2000, ge=1)
    """Adapters that one tenant stores: kept versions, checkpoints, uploads. At the limit new jobs, training runs,
    checkpoints and uploads get status 429."""
    tenant_bytes: int = Field(100 << 30, ge=1 << 20)
    """Bytes of the adapters and datasets that one tenant stores; at the limit as above."""
    tenant_metadata_bytes: int = Field(64 << 20, ge=1 << 10)
    """Bytes of one tenant's rows in the database that a client describes itself: jobs, and the sessions, training runs,
    samplers and checkpoints of the Tinker API with their metadata. A row counts as 512 bytes and its texts. At the
    limit new ones get status 429."""
    tenant_tokens_per_day: int = Field(0, ge=0)
    """Tokens sampled and trained on for one tenant in a day of UTC; 0 is no limit. At the limit its jobs pause until
    the next day, and its clients' requests get status 429."""
    tenant_models: int = Field(4, ge=1)
    """Base models that one tenant uses at once, each of which a worker holds in memory. Jobs with a further one wait,
    requests get status 429."""
    tenant_hosts: int = Field(64, ge=1)
    """Environment hosts of one tenant that are connected at once; further ones get status 429 and try again."""
    tenant_requests_per_second: float = Field(200.0, gt=0)
    """HTTP requests of one tenant in a second, with the requests of five seconds at once after a pause; further ones
    get status 429."""
    tenant_service_share: float = Field(0.25, gt=0, le=64)
    """Seconds of the service's processor time that requests of one tenant may take in a second while other tenants work
    here: its further requests wait, and get status 429 after ten seconds. Alone, a tenant may take all."""
    outage_retry_seconds: float = Field(30.0, gt=0)
    """A job that was paused by an outage (disk, workers, environment host) resumes by itself after this time, then
    after twice as long each time, up to ten minutes. The database and the place of the artifacts are asked at every
    heartbeat: the first answer resumes their jobs."""
