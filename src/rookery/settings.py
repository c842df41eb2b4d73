"""Settings of the service and of a worker: one model, filled from ``ROOKERY_*`` variables, passed in, never global.

A job's own settings are in ``spec``. Whatever is tuned stands here by name, with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rookery.errors import UserError

TOKEN_VARIABLE = "ROOKERY_TOKEN"
"""Where workers and hosts find their token if it is not given: an argument would show in the list of processes."""


def token_of(given: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """The token that was given, else that of the environment. Space around it is none of it: a secret that was made of
    the file ``worker.token`` has its newline."""
    return (given or environment.get(TOKEN_VARIABLE, "")).strip()


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    # --- where things lie -------------------------------------------------------------------------------------------
    data: Path = Path("~/.rookery")
    """Database, artifacts, metrics, keys, logs: all that must survive."""
    cache: Path = Path("~/.cache/rookery")
    """Base models and pulled adapters: all that can be made again."""
    database: str = ""
    """A SQLAlchemy URL; empty is SQLite in the data folder."""

    # --- the service ------------------------------------------------------------------------------------------------
    host: str = "127.0.0.1"
    port: int = Field(7077, ge=0, le=65535)
    url: str = ""
    """The service that clients and the command line use; empty is the address above, when something answers there."""
    key: str = ""
    """The API key that clients use; empty is the admin key in the data folder."""
    models: str = "smollm2-135m-instruct"
    """Base models, comma-separated, for which the service starts local workers at once."""
    workers: int = Field(1, ge=0, le=64)
    """Local worker processes per model. One process holds the base model once and plays both roles."""
    upload_bytes: int = Field(256 << 20, ge=1 << 10)
    """The largest body that one request may bring, such as a dataset or an adapter: it is held in memory while it is
    checked. JSON has a lower limit of its own (:mod:`rookery.server.body_limit`)."""
    stop_seconds: float = Field(5.0, gt=0)
    """How long open connections and child processes get to end by themselves when the service stops."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Of Python's ``logging``, in any case of letters."""
    tensorboard: bool = False
    """Also write each job's metrics as TensorBoard events in its folder."""
    wandb_project: str = ""
    """Also log each job's metrics to this Weights & Biases project."""

    # --- links ------------------------------------------------------------------------------------------------------
    heartbeat_seconds: float = Field(2.0, gt=0)
    suspect_seconds: float = Field(10.0, gt=0)
    """No beat for this long: the worker's requests go on elsewhere. Five beats, so that one slow slice is no alarm."""
    rejoin_seconds: float = Field(60.0, gt=0)
    """A suspect worker that has not come back by then is gone."""
    reconnect_seconds: float = Field(6.0, ge=0)
    """After a restart with unfinished jobs, rollouts wait this long for the worker that has them: workers dial in again
    at most five seconds apart. Without it, the first one back would be given what the others still have."""
    resume_seconds: float = Field(15.0, gt=0)
    """A worker whose link is back goes on this long with requests that nobody has claimed: a restarted service has its
    jobs again by then; until then such a request may be computed in two places."""
    stuck_seconds: float = Field(120.0, gt=0)
    """Beats that show work but no finished compute slice for this long mean a stuck worker; the longest honest slice is
    one prompt of a whole context."""
    flush_seconds: float = Field(0.1, gt=0)
    """Sampled tokens wait at most this long in a worker: what a kill can cost."""
    ticket_seconds: float = Field(600.0, gt=0)
    """How long a ticket for bytes is good."""
    worker_wait_seconds: float = Field(600.0, gt=0)
    """A request or a training step that finds no worker for this long pauses its job, with that reason."""
    request_timeout_seconds: float = Field(1800.0, gt=0)
    """A request without a new token and a training operation without an answer for this long, though their worker
    beats, are given up with its name: far above what either takes in a worker's queue."""

    # --- a worker ---------------------------------------------------------------------------------------------------
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What a worker computes with; ``auto`` is a GPU where PyTorch sees one. On a machine with several, each worker is
    shown its own by ``CUDA_VISIBLE_DEVICES``."""
    max_rows: int = Field(64, ge=1)
    """Sequences that decode together: on two cores throughput is flat from about 64 on. A GPU wants more."""
    kv_bytes: int = Field(0, ge=0)
    """Room for attention caches; 0 is 2 GiB on a CPU, and half of what is free on a GPU once the model is loaded."""
    max_rank: int = Field(64, ge=1)
    """The largest adapter rank that shares batches with others; higher ranks are refused at submit."""
    slice_tokens: int = Field(1024, ge=16)
    """Tokens of one training micro-batch on a CPU: about a second on two cores, so long does decoding wait at most."""
    gpu_slice_tokens: int = Field(16384, ge=16)
    """The same on a GPU, where a pass must outlast the launches of its kernels: some thousands, microseconds each."""
    adapter_cache_bytes: int = Field(4 << 30, ge=1 << 20)
    """Pulled adapter folders kept on disk by a worker."""
    resident_adapters: int = Field(64, ge=1)
    """Adapters kept in memory by a worker when no request needs them: about 10 MB each at rank 16 of a 135M model."""
    pack_weights: bool = True
    """On a CPU, keep the base model also in the layout of its matrix kernels: a decode step of 8 rows then takes two
    thirds of the time in its projections, one of 64 rows 85%. It costs the model's size once more, in each worker."""
    allocator: str = "tcmalloc_minimal"
    """The memory allocator that worker processes are started with, a library's name without ``lib`` and ``.so``; where
    the machine does not have it, or with an empty name, it is the C library's (:mod:`rookery.cluster.allocator`)."""
    threads: int = Field(0, ge=0)
    """Cores that a worker computes with; 0 is all of them (local workers of one service share them out)."""
    transfer_seconds: float = Field(30.0, gt=0)
    """How long the service may be silent in a transfer before it is tried again."""
    peer_seconds: float = Field(3.0, gt=0)
    """How long another worker that lends an adapter may be silent before the rest is had elsewhere: it may be gone, and
    the service has everything."""
    drain_seconds: float = Field(4.0, gt=0)
    """What a worker told to end takes to finish its slice and its uploads: less than ``stop_seconds``."""

    # --- clients that drive their models call by call (the Tinker API) ----------------------------------------------
    trainer_slots: int = Field(8, ge=1)
    """Models of clients whose training state a worker keeps in memory (80 MB each at rank 16 of a 135M model). Others
    wait for a place; an idle one makes room and comes back on use."""
    trainer_state_cache_bytes: int = Field(1 << 30, ge=0)
    """Training states of clients' models without a place that a worker keeps in main memory, least recently used first
    to go (59 MB each at rank 16 of a 135M model): coming back costs a copy. Without one the state is pulled again."""
    slot_wait_seconds: float = Field(5.0, ge=0)
    """A model whose gradient is begun keeps its place this long without a call while others wait: leaving costs its
    gradient's computation."""
    session_commit_every: int = Field(1, ge=1)
    """Optimizer steps of a client per durable version. Above 1 an answered step may have to be computed again after a
    crash; its answer says so (``durable`` is 0)."""
    session_lora_alpha: float = Field(32.0, gt=0)
    """A client's adapters are scaled by this over their rank: the API does not let it choose, and 32 is what the API's
    authors say they use."""
    session_poll_seconds: float = Field(30.0, gt=0, lt=45)
    """A question for a result is held this long before the answer is to try again; the client gives up at 45."""
    session_result_seconds: float = Field(86400.0, gt=0)
    """How long a result can be fetched."""
    session_seq_gap_seconds: float = Field(300.0, gt=0)
    """Calls that wait for one with a lower number fail when that has not arrived for this long: the client tries again
    for five minutes."""
    session_idle_seconds: float = Field(120.0, gt=0)
    """A client without a heartbeat for this long is away: its models give up their places. It may come back."""
    session_expire_seconds: float = Field(30 * 86400.0, gt=0)
    """A client of which nothing was heard for this long does not come back: its session is finished. What a finished
    session's models had and no name holds goes ``session_result_seconds`` later."""
    sampler_idle_seconds: float = Field(3600.0, gt=0)
    """Weights of a sampler without a name that nobody used for this long are let go."""

    # --- jobs -------------------------------------------------------------------------------------------------------
    dispatch_ahead: int = Field(16, ge=0)
    """Θ of RLBoost's Algorithm 2: a worker is given no request while this many wait in it for a row (or for their
    adapter). Enough that rows freed within one flush are filled without a round trip; more would wait where it is seen
    less and shared less fairly. So it holds at most its rows and this many."""
    tenant_turn_share: float = Field(0.5, ge=0, le=1)
    """Of a worker's rows: so many requests of a tenant (at least one) are given out before it is the next one's turn.
    Neighbours in a batch then share adapters and prompts. A decode step of 64 rows on the 135M model takes 61 ms with
    one adapter, 65 with 4, 68 with 8, 77 with 16 and 100 with 32; who has one request waits for as many of every other
    tenant."""
    seed_initial_seconds: float = Field(10.0, ge=0)
    """T_init of RLBoost's Algorithm 1: for how long a training worker that has remote workers generates before it
    trains, until its first cycle was measured. Of the order of a short step: what is wrong with it is gone in a few."""
    seed_eta: float = Field(3.0, ge=1)
    """How many times a cycle's difference of waits is the change of that time (η; 3 in the authors' code). Smaller
    learns faster, and swings where the training worker generates faster than η - 1 times all remote ones together."""
    interactive_priority: bool = True
    """Answers that somebody waits for (chat, the OpenAI API) go before rollouts: a person notices a second, a
    rollout of thousands does not …"""
    interactive_share: float = Field(0.5, gt=0, le=1)
    """… on at most this share of a worker's rows: however much is chatted, training goes on."""
    usage_flush_seconds: float = Field(30.0, gt=0)
    """How often the account of costs is stored: what a crash of the service can lose of it."""
    answer_tokens: int = Field(1024, ge=1)
    """An answer's tokens where the OpenAI request sets no limit: a small model may never end by itself."""
    retry_limit: int = Field(3, ge=0)
    """Attempts of a training step on other workers before the job pauses: a step that kills whoever takes it should not
    go round for ever."""
    failure_rate_limit: float = Field(0.5, gt=0, le=1)
    """A job pauses when more than this share of its recent episodes failed …"""
    failure_rate_window: int = Field(32, ge=2)
    """… among this many."""
    trajectory_keep: int = Field(2000, ge=1)
    """Finished episodes per job whose text stays readable after their group was consumed."""

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, given: Any) -> Any:
        return given.upper() if isinstance(given, str) else given

    @property
    def base_url(self) -> str:
        return self.url or f"http://{self.host}:{self.port}"

    @classmethod
    def load(cls, environment: Mapping[str, str] = os.environ, **given: object) -> Self:
        """Settings from ``ROOKERY_<NAME>`` variables; ``given`` (None is absent) wins. Raises :class:`UserError`."""
        values: dict[str, object] = {
            name: environment[f"ROOKERY_{name.upper()}"]
            for name in cls.model_fields
            if f"ROOKERY_{name.upper()}" in environment
        }
        values.update({name: value for name, value in given.items() if value is not None})
        try:
            settings = cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise UserError(f"setting ROOKERY_{name.upper()}: given {first['input']!r}, {first['msg']}") from None
        return settings.model_copy(
            update={"data": settings.data.expanduser().absolute(), "cache": settings.cache.expanduser().absolute()}
        )
