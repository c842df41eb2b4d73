"""Settings of the service and of a worker, in sections, read from ``ROOKERY_*`` environment variables.

A field's variable is ``ROOKERY_<FIELD>``, whichever section holds it, so no two sections share a field's name. Settings
are passed to what needs them and never global. A job's fields are in :mod:`rookery.spec`. ``docs/settings.md`` is
generated from the docstrings here.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rookery.bounds import SiteName
from rookery.errors import UserError
from rookery.folders import expanded
from rookery.network import dialled_host, join_address, service_url

TOKEN_VARIABLE = "ROOKERY_TOKEN"
"""Variable that holds the key of a worker or host: an argument would show in the process list."""


def token_of(environment: Mapping[str, str] = os.environ) -> str:
    """The key in the environment without surrounding white space: ``worker.token`` ends with a newline. Raises
    :class:`UserError` if there is none, or a text that can be no key."""
    token = environment.get(TOKEN_VARIABLE, "").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise UserError(f"set {TOKEN_VARIABLE} to a key of the role worker: worker.token in the service's data folder")
    return token


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ServerSettings(Section):
    """The service: where it listens, what it starts, what it accepts, how it logs."""

    database: str = ""
    """A SQLAlchemy URL. Empty is SQLite in the data folder."""
    artifacts_url: str = ""
    """Where artifacts are kept: a folder, or an object store such as `s3://bucket/prefix`. Empty is the data folder.
    A service whose database is in use waits as standby if this is set."""
    artifacts_endpoint: str = ""
    """Address of the object store that speaks S3, such as `http://minio:9000`. Empty is that of `AWS_ENDPOINT_URL_S3`
    or `AWS_ENDPOINT_URL`, else Amazon's."""
    host: str = "127.0.0.1"
    """Address on which the service listens; `0.0.0.0` is all of IPv4, `::` all of IPv6 and IPv4."""
    port: int = Field(7077, ge=0, le=65535)
    """Port on which the service listens; 0 takes a free one."""
    url: str = ""
    """Service used by clients and the command line. Empty is host and port above, if something answers there."""
    public_url: str = ""
    """Address that responses name to clients, such as `https://rookery.example.org`: of a download, of an agent's
    episode. Empty is the one to which their request was sent, with the scheme of a proxy's `X-Forwarded-Proto`."""
    key: str = ""
    """API key used by clients. Empty is the administrator's key in the data folder."""
    tls_cert: str = ""
    """PEM file with the certificate chain with which the service serves https and wss. Empty is plain HTTP."""
    tls_key: str = ""
    """PEM file with the private key of `tls_cert`. Empty: it is in that file too."""
    ca_file: str = ""
    """PEM file of the only certificates that clients, workers and hosts trust. Empty is `tls_cert`, if that is set."""
    models: str = "smollm2-135m-instruct"
    """Base models, comma-separated, for which the service starts local workers at once."""
    workers: int = Field(1, ge=0, le=64)
    """Local worker processes per model. Each holds the base model once and has both roles."""
    plan: str = ""
    """Plan file of `rookery plan --out`: its workers get the roles that it gives them, and roles are planned again when
    workers join or leave. Empty: each worker has the roles with which it is started."""
    upload_bytes: int = Field(256 << 20, ge=1 << 10)
    """Largest body of an uploaded dataset or adapter, which is written to the disk as it arrives. Other bodies have the
    lower limits `json_bytes` and `training_bytes`."""
    reserved_disk_bytes: int = Field(1 << 30, ge=0)
    """Free bytes of the artifacts' disk that uploads leave for the commits of jobs, at most a twentieth of the disk:
    below that uploads get status 507."""
    local_tokenizers: bool = True
    """Tinker clients whose connections come from this machine get the folder of a model's tokenizer, which needs no
    internet. Set it to false where clients come through a tunnel (`kubectl port-forward`, `ssh -L`) or a proxy without
    `X-Forwarded-For`: they get the model's hub id, as clients on other machines do."""
    stop_seconds: float = Field(5.0, gt=0)
    """Time that open connections and child processes get to end by themselves when the service stops."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Minimum log level, case-insensitive."""
    tensorboard: bool = False
    """Also write each job's metrics as TensorBoard events into its folder. Needs the `tensorboard` extra."""
    wandb_project: str = ""
    """Also log each job's metrics to this Weights & Biases project. Needs the `wandb` extra."""
    otlp_url: str = ""
    """Also send a trace of each episode to this OpenTelemetry collector by OTLP over HTTP, such as
    http://127.0.0.1:4318; without a path, to its `/v1/traces`. Needs the `otel` extra. Headers are those of
    `OTEL_EXPORTER_OTLP_HEADERS`. A collector that does not answer delays nothing: its traces are dropped."""
    sandbox: Literal["bubblewrap", "gvisor"] = "bubblewrap"
    """In which code of replies runs: bubblewrap, or gVisor (`runsc`), which starts more slowly and has a kernel of its
    own. With gVisor the service does not start where that is not installed; without bubblewrap, jobs that run code are
    refused."""
    judges: str = ""
    """Models that the verifier `judge` may ask in addition to policies: `NAME=URL MODEL [VARIABLE]`, comma-separated.
    URL is that of OpenAI's API with its `/v1`, this service's too; VARIABLE is the environment variable of the service
    with the key."""
    sinks: str = ""
    """Servers that jobs may name as sinks: `NAME=URL [VARIABLE]`, comma-separated. VARIABLE is the environment
    variable of the service with a token, or with USER:PASSWORD. Every tenant may write to them."""
    verifiers: str = ""
    """Environments of the library verifiers that jobs may name: `PYTHON PACKAGE [PACKAGE …]`, the path of the
    interpreter of a virtual environment that has verifiers 0.4 and uv, and installed environment packages. They run on
    the service's machine with the rights of its user: name those that you trust."""
    games: str = ""
    """Games that jobs may name: `PYTHON LIBRARY/GAME [LIBRARY/GAME …]`, the path of the interpreter of a virtual
    environment that has gymnasium or TextArena, and games such as `gymnasium/FrozenLake-v1` or
    `textarena/GuessTheNumber-v0`. They run on the service's machine with the rights of its user."""
    reachable_hosts: str = ""
    """Hosts that are not of the public internet and that tenants' jobs may name all the same, as servers of OpenEnv:
    names (each with its sub-domains), addresses and networks, each with an optional port, comma-separated; `*` is
    everything. The service reaches no other private address for a tenant."""
    worker_wait_seconds: float = Field(600.0, gt=0)
    """A request or training step that finds no worker for this long pauses its job, with that reason."""
    failure_rate_window: int = Field(32, ge=2)
    """Number of recent episodes over which the failure rate is measured."""
    trajectory_keep: int = Field(2000, ge=1)
    """Finished episodes per job whose text stays readable after their group was trained on. Up to twice as many may be
    present. So many held-out answers of its newest evaluations stay as well, and all those of the first, the newest and
    the best one of each policy."""
    finished_jobs_keep: int = Field(32, ge=0)
    """Finished jobs of one tenant whose episodes and held-out answers stay readable. Older ones keep metrics, versions,
    the figures of evaluations and usage, about 8 kB each."""
    timeline_bytes: int = Field(32 << 20, ge=0)
    """Bytes of one tenant's stored timelines, of which a busy hour of a job takes some 20 kB. Beyond it the oldest
    hours are deleted; those of jobs whose episodes are deleted go with these."""

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, given: Any) -> Any:
        return given.upper() if isinstance(given, str) else given

    @property
    def artifacts(self) -> tuple[str, str]:
        """Where artifacts are kept: URL and endpoint."""
        return self.artifacts_url, self.artifacts_endpoint


class EdgeSettings(Section):
    """The limits of one client. A request above a limit is refused with its name, and counted."""

    json_bytes: int = Field(1 << 20, ge=1 << 10)
    """Largest JSON body; parsing it holds up everybody for some milliseconds. A prompt of 100,000 token ids has 0.7 MB.
    The Python client uploads rows of a job that have more than 256 kB as a dataset."""
    training_bytes: int = Field(16 << 20, ge=1 << 10)
    """Largest body of training data of a Tinker client. Its SDK splits them into requests of 5 MB."""
    tenant_body_bytes: int = Field(256 << 20, ge=1 << 10)
    """Bodies of one tenant's requests in memory at once, in bytes; more get status 429. One alone has its own limit."""
    connections: int = Field(4096, ge=8)
    """Most open connections; fewer where the limit of file descriptors allows fewer, of which 256, or half, stay free.
    For a connection above it, the oldest one that waits for a request is closed; without one the new one is."""
    host_bytes: int = Field(8 << 20, ge=1 << 16)
    """Largest message of a tenant's environment host: prompts, or the answer of an environment."""


class LimitSettings(Section):
    """Budgets: the most that one job or one tenant may ask of the service. A job beyond a limit is refused with the
    numbers; work beyond a limit waits."""

    row_bytes: int = Field(256 << 10, ge=1 << 10)
    """Largest row of an uploaded dataset: a row travels with each of its episodes."""
    job_tokens: int = Field(1 << 25, ge=1)
    """Sampled tokens that the groups of one job may hold in memory: `groups_per_step` x (`max_staleness` + 1), summed
    over the policies that train, x `group_size` x `max_tokens` x turns. A token takes about 80 bytes of the service. A
    tenant's running jobs together hold at most twice as many; further ones are queued."""
    job_episodes: int = Field(4096, ge=2)
    """Episodes of one job that run at once, in whole groups, at least one. Further groups start when others end. An
    evaluation has as many in addition."""
    start_crashes: int = Field(6, ge=1)
    """Crashes of the service in a row that a job was shown to have caused (the service worked on its start alone, or
    grew by half a gigabyte) after which it is paused until a person resumes it. Before, it starts after a growing
    delay, from 2 s to ten minutes. Other jobs resume by themselves."""
    allowed_models: str = ""
    """Hub ids (`organisation/model`), comma-separated, that tenants may name in addition to the catalogue's models, by
    their names or hub ids, and those of `models`; `*` allows every hub id. The administrator may name any hub id, and
    alone other folders than those of `models`. Tenants see no model that they may not name."""
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
    bytes; more get status 429. They are kept in memory: after the loss of a worker they are computed again. Where the
    batches of several training runs fill this, one of them has room for as much again. A batch that exceeds it alone
    fails."""
    tenant_adapters: int = Field(2000, ge=1)
    """Adapters that one tenant stores: kept versions, checkpoints, uploads. At the limit new jobs, training runs,
    checkpoints and uploads are refused."""
    tenant_bytes: int = Field(100 << 30, ge=1 << 20)
    """Bytes of the adapters and datasets that one tenant stores, with those of uploads under way; at the limit as
    above, and an upload that comes to it is refused."""
    tenant_database_bytes: int = Field(32 << 30, ge=1 << 10)
    """Bytes of one tenant's rows in the database that its work makes: prompts and episodes of jobs, steps, evaluations,
    events, and the calls of clients with their results. A row counts as 512 bytes and its texts. At the limit jobs
    pause before their next step, and new jobs, samples and gradients get status 429."""
    tenant_uploads: int = Field(16, ge=1)
    """Uploads of one tenant under way at once; further ones get status 429."""
    tenant_metadata_bytes: int = Field(64 << 20, ge=1 << 10)
    """Bytes of one tenant's rows in the database that a client describes itself: jobs, uploads, and the sessions,
    training runs, samplers and checkpoints of the Tinker API with their metadata. A row counts as 512 bytes and its
    texts. At the limit new ones are refused."""
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
    get status 429, and wait up to five seconds for it where the tenant is beyond ``tenant_service_share``."""
    tenant_service_share: float = Field(0.25, gt=0, le=64)
    """Seconds of the service's processor time that requests of one tenant may take in a second while other tenants work
    here, and 40% of them while jobs of others run: its further requests wait, and get status 429 after ten seconds,
    those for work after thirty. Alone, a tenant may take all."""
    outage_retry_seconds: float = Field(30.0, gt=0)
    """A job that was paused by an outage (workers, environment host) resumes by itself after this time, then after
    twice as long each time, up to ten minutes. The database, the place of the artifacts and disks that took no writes
    are asked at every heartbeat: the first answer resumes their jobs."""


class ClusterSettings(Section):
    """Where the service starts its workers."""

    cluster: Literal["local", "ray"] = "local"
    """`local`: child processes on the service's machine. `ray`: actors on the nodes of a Ray cluster; every node has
    Rookery installed, and reaches the service at `url`, or else (also where `url` is `http://localhost:…`, which means
    another machine on each node) at the address by which Ray knows the service's machine, for which `host` must be
    `0.0.0.0`."""
    ray_address: str = "auto"
    """HOST:PORT of the Ray cluster's head. `auto` finds the one on this machine."""
    ray_cpus: float = Field(1.0, gt=0)
    """CPUs that Ray reserves for a worker; it computes with as many threads."""
    ray_gpus: Literal["auto"] | Annotated[float, Field(ge=0)] = "auto"
    """GPUs that Ray reserves for a worker. `auto` is one where a node that may run it has or had one, else none; give a
    number where the first node has yet to be started."""
    ray_spot_workers: int = Field(0, ge=0, le=1024)
    """Preemptible workers per model, on the nodes that `ray_spot_label` names. Those without a node wait for one, and
    Ray's autoscaler sees them."""
    ray_spot_label: str = Field("pool=spot", pattern="^[^=]+=[^=]+$")
    """Label of nodes that may vanish. Reserved workers (`workers` per model) and the environment host avoid them."""
    scale_min: int = Field(1, ge=0, le=1024)
    """With `scale_max`, and refused without it: the fewest rollout workers per model, whatever its jobs need; the
    `workers` per model always stay."""
    scale_max: int = Field(0, ge=0, le=1024)
    """The most rollout workers per model, those of `workers` included. The service starts and ends rollout workers by
    the wait of the trainers of asynchronous jobs; with Ray, by way of its autoscaler. 0: their number is fixed."""


class WorkerSettings(Section):
    """A worker's process, and the connection between service and workers or environment hosts."""

    heartbeat_seconds: float = Field(2.0, gt=0)
    """Interval between heartbeats of a worker or an environment host."""
    suspect_seconds: float = Field(10.0, gt=0)
    """Without a heartbeat for this long a worker is suspect and its requests move: five heartbeats, so that one slow
    slice raises no alarm."""
    rejoin_seconds: float = Field(60.0, gt=0)
    """A suspect worker, or an environment host without episodes, that has not returned by then is gone."""
    resume_seconds: float = Field(15.0, gt=0)
    """A reconnected worker continues requests that nobody has resumed for this long, so that a restarted service finds
    them. The service's value holds for its workers."""
    stuck_seconds: float = Field(120.0, gt=0)
    """Heartbeats that show work but no finished compute slice for this long mean a stuck worker; the longest honest
    slice is one prompt of a whole context."""
    flush_seconds: float = Field(0.1, gt=0)
    """Sampled tokens wait at most this long in a worker before they are sent: the most that a kill can cost."""
    request_timeout_seconds: float = Field(1800.0, gt=0)
    """A request without a new token, or a training operation without an answer, for this long fails or is retried
    although its worker sends heartbeats. Time counts only while the worker computes no tokens of requests before it,
    and ends no operation that came before."""
    site: SiteName = ""
    """Where a worker, or the service, runs, such as `frankfurt`: adapters and models cross once to each site and spread
    there among its workers. The names of one deployment only need to agree."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that workers compute on. `auto` is a GPU where PyTorch sees one; `CUDA_VISIBLE_DEVICES` gives each worker
    its own."""
    threads: int = Field(0, ge=0)
    """Cores that a worker computes with. 0 is all of them, or what the container is given; local workers started by
    `models` and `workers` share them."""
    lanes: Literal["turns", "beside", "auto"] = "turns"
    """How a worker with several cores generates and trains: in `turns`, each on all cores, the one `beside` the other
    on half of them, or, with `auto`, as is predicted to end the present jobs sooner: the worker measures both when it
    starts, which takes seconds."""
    plan_depth: int = Field(1, ge=0, le=4)
    """With `ROOKERY_LANES=auto`: choices ahead that a prediction looks; 0 holds each choice until the present stages of
    all jobs have ended."""
    allocator: str = "tcmalloc_minimal"
    """Memory allocator that workers are started with: a library's name without `lib` and `.so`. Where the machine lacks
    it, or with an empty name, the C library's is used; tcmalloc is about 10% faster."""
    memory_bytes: int = Field(0, ge=0)
    """Memory of one worker in bytes, on a GPU the device's: base model, KV caches, adapters, training states and
    activations together. What is full evicts or waits. 0 takes `memory_share`, or nine tenths of a
    GPU's free memory: give a number where others compute on it, too."""
    memory_share: float = Field(0.6, gt=0, le=1)
    """Share of the free memory of the machine, or of its container, that the workers of a service, or a worker started
    by hand, use at most: the rest is for the service, environments and other programs."""
    adapter_cache_bytes: int = Field(4 << 30, ge=1 << 20)
    """Pulled adapters that a worker keeps on disk, in bytes."""
    drain_seconds: float = Field(4.0, gt=0)
    """Longest time that a draining worker takes for the end of its slice and its uploads together. Keep it below
    `stop_seconds`."""


class EngineSettings(Section):
    """Generation: engine, batch size, caches, and how requests share them."""

    inference_engine: Literal["auto", "native", "transformers", "vllm"] = "auto"
    """Engine of a worker. `auto` is `native` for the families that the native decoder knows and `transformers`, which
    is several times slower, for every other causal language model (`rookery models` shows it). `vllm` needs the `vllm`
    extra, and an environment whose packages agree with it."""
    vllm_url: str = ""
    """Address of a running `vllm serve` that a worker with the engine `vllm` fronts instead of starting its own."""
    vllm_adapters: int = Field(8, ge=2)
    """Adapters that vLLM holds at once (`max_loras`); requests of further versions wait. At least two: a policy's next
    version is loaded while requests run on the present one. Each takes the memory of rank `max_rank`."""
    max_rows: int = Field(64, ge=1)
    """Sequences that decode together. On two cores throughput is flat from about 64 on; a GPU needs more, such as
    256."""
    max_rank: int = Field(64, ge=1)
    """Largest adapter rank; higher ranks are refused when a job is submitted."""
    pack_weights: bool = True
    """On a CPU, also keep the base model in the layout of its matrix kernels: faster, at the cost of the model's size
    once more in each worker."""
    cpu_kernels: bool = True
    """On a CPU that can run them (`rookery doctor`), sample and train with compiled kernels: decoding is up to twice as
    fast, and training computes the sampled log-probabilities bit for bit. Off, PyTorch's operations do the work; its
    texts may differ."""
    speculation: bool = True
    """On a CPU, verify draft tokens (what a request's own text or its group's went on with in such a place) in decode
    steps where measured times and acceptance promise more tokens per second. Texts and log-probabilities stay the
    same."""
    engine_gap_limit: float = Field(0.5, gt=0)
    """Largest difference between the engine's and the trainer's log-probabilities of a canary text, in nats per token:
    above it a worker with vLLM refuses the version, so that its job pauses with that reason."""
    slo_gate: bool = True
    """Interactive requests (chat, the OpenAI API) have the objectives below: rollouts and training slices of their
    worker run only as far as these allow. Off, they are admitted before rollouts, without objectives."""
    ttft_ms: float = Field(2000.0, gt=0)
    """Objective of an interactive request's first token, in milliseconds. Where nothing interrupts a training slice
    (`slice_tokens`), twice the longest one, so that one that has just begun breaks none."""
    tpot_ms: float = Field(250.0, gt=0)
    """Objective of each further token, on average: the pace of a fast reader. 64 rows of a 135M model decode on two
    cores in about that time."""
    slo_overrides: str = ""
    """Other objectives, comma-separated `NAME=TTFT/TPOT` in milliseconds. NAME is a base model or a class of requests:
    `chat`, `completion` (OpenAI API), `sample` (`rookery chat`, and `Client.sample`); a class goes before a model."""


class TrainingSettings(Section):
    """Training in workers: trainer, size of a pass, memory for training states, retries."""

    trainer: Literal["auto", "native", "transformers"] = "auto"
    """The trainer. `auto` as for `inference_engine`. Where the two differ, the worker holds the base model twice."""
    slice_tokens: int = Field(512, ge=16)
    """Tokens of one training micro-batch on a CPU: about a second on two cores, the longest that rollouts wait.
    Interactive requests are computed between its layers where the CPU kernels train; elsewhere they wait too, and fewer
    tokens keep `ttft_ms` on slow cores."""
    trainer_processes: int = Field(1, ge=1, le=64)
    """Processes of a training group on a worker's machine, one per GPU, over which FSDP2 shards a policy. Above 1 every
    policy is trained there, one at a time; at 1 only full-parameter policies, and LoRA in the worker's own process."""
    activation_checkpointing: bool = False
    """A training group computes each layer again in the backward pass instead of keeping its activations: a third more
    work, for the memory of one layer."""
    trainer_slots: int = Field(8, ge=1)
    """Tinker models that train on a worker at once (90 MB each at rank 16 of a 135M model; fewer where `memory_bytes`
    allows fewer). Others wait for a slot; an idle one makes room."""
    retry_limit: int = Field(3, ge=0)
    """Retries of a training step on other workers before its job pauses: a step that kills every worker must not go
    round for ever."""


class OffloadSettings(Section):
    """RLBoost's Algorithm 1: rollouts offloaded to remote workers."""

    seed_initial_seconds: float = Field(10.0, ge=0)
    """First value of T_seed: seconds that a training worker generates before it trains, until its first cycle was
    measured."""


class Settings(Section):
    """All settings. Fields of the sections may be given by their own names: ``Settings(max_rows=8)``."""

    data: Path = Path("~/.rookery")
    """Folder of database, artifacts, metrics, keys and logs: everything that must survive."""
    cache: Path = Path("~/.cache/rookery")
    """Folder of base models and pulled adapters: everything that can be fetched or made again."""
    server: ServerSettings = ServerSettings()
    cluster: ClusterSettings = ClusterSettings()
    edge: EdgeSettings = EdgeSettings()
    worker: WorkerSettings = WorkerSettings()
    engine: EngineSettings = EngineSettings()
    training: TrainingSettings = TrainingSettings()
    limits: LimitSettings = LimitSettings()
    offload: OffloadSettings = OffloadSettings()

    @model_validator(mode="before")
    @classmethod
    def _into_sections(cls, given: Any) -> Any:
        """Moves each field that a section has into that section. A field and its section may share a name: ``cluster``
        is the section where its value is one."""
        fields = {
            name: value
            for name, value in given.items()
            if name in SECTION_OF and not isinstance(value, Mapping | Section)
        }
        values = {name: value for name, value in given.items() if name not in fields}
        for name, value in fields.items():
            values[SECTION_OF[name]] = {**values.get(SECTION_OF[name], {}), name: value}
        return values

    @property
    def base_url(self) -> str:
        """Address of the service for clients."""
        scheme = "https" if self.server.tls_cert else "http"
        return self.server.url or join_address(scheme, dialled_host(self.server.host), self.server.port)

    @property
    def trusted(self) -> str:
        """File of the certificates that this process trusts as a client; empty is the system's."""
        return self.server.ca_file or self.server.tls_cert

    def flat(self) -> dict[str, Any]:
        """Every field by its own name, without sections."""
        values = {name: getattr(self, name) for name in ("data", "cache")}
        return values | {name: getattr(getattr(self, section), name) for name, section in SECTION_OF.items()}

    @classmethod
    def alone(cls, environment: Mapping[str, str] = os.environ, **given: object) -> Self:
        """Settings of a service in this process for one run: the variables in :data:`STANDING_SETTINGS` are not read,
        so that it keeps everything in its data folder, and at least one local worker starts. Raises
        :class:`UserError`."""
        uses = {"data", "cache", *SECTION_OF} - {*STANDING_SETTINGS}
        settings = cls.load(environment, uses=uses, **given)
        return settings.replace(workers=max(1, settings.server.workers))

    def replace(self, **changes: object) -> Self:
        """A copy with these fields changed."""
        return self.model_validate(self.flat() | changes)

    @classmethod
    def load(
        cls, environment: Mapping[str, str] = os.environ, *, uses: Collection[str] | None = None, **given: object
    ) -> Self:
        """Settings from ``ROOKERY_<FIELD>`` variables, without white space around their values; ``given`` (None is
        absent) wins. Raises :class:`UserError`.

        ``uses`` has the fields and sections that the caller uses (None: all): the variables of others are not read, so
        that a wrong one fails only the commands that it concerns. Variables that a platform sets
        (:func:`variable_notes`) are not settings."""
        explicit = {name: value for name, value in given.items() if value is not None}
        names = [
            name for name in ("data", "cache", *SECTION_OF) if uses is None or {name, SECTION_OF.get(name)} & {*uses}
        ]
        variables = {name: f"ROOKERY_{name.upper()}" for name in names}
        values: dict[str, object] = {
            name: environment[variable].strip()  # a value from a file ends with a newline
            for name, variable in variables.items()
            if variable in environment and not _is_platforms(variable, environment[variable])
        } | explicit
        if uses is not None and values.get("url"):  # the address says both
            values = {name: value for name, value in values.items() if name in explicit or name not in ("host", "port")}
        for name, value in values.items():
            if isinstance(value, str | Path) and not str(value).strip() and name not in MAY_BE_EMPTY:
                raise UserError(
                    f"setting ROOKERY_{name.upper()}: it is empty, which means nothing; give a value, or unset it"
                )
        for name in ("url", "public_url", "artifacts_endpoint"):
            if url := values.get(name):
                service_url(str(url), f"setting ROOKERY_{name.upper()}")
        try:
            settings = cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            variable = f"ROOKERY_{str(first['loc'][-1]).upper()}"
            problem = first["msg"].removeprefix("Value error, ")
            raise UserError(f"setting {variable}: given {first['input']!r}, {problem}") from None
        named = {name: getattr(settings.server, name) for name in FILES}
        files = {name: str(expanded(Path(path))) for name, path in named.items() if path.startswith("~")}
        return settings.replace(data=expanded(settings.data), cache=expanded(settings.cache), **files)


FILES = ("tls_cert", "tls_key", "ca_file", "plan")
"""Settings that name a file, whose ``~`` is replaced as that of a folder: where a variable comes from a file, no shell
has done it."""

CLIENT_SETTINGS = ("data", "cache", "host", "port", "url", "key", "tls_cert", "ca_file")
"""Fields that a client of a service uses: the address, the key, and the folder where the administrator's key is."""

WORKER_SETTINGS = ("cache", "worker", "engine", "training", "log_level", "tls_cert", "ca_file")
"""Fields and sections that a worker uses."""

HOST_SETTINGS = ("log_level", "tls_cert", "ca_file", "sandbox", "reachable_hosts", "judges", "verifiers", "games")
"""Fields that the host of the built-in environments uses."""

STANDING_SETTINGS = (
    "database", "artifacts_url", "artifacts_endpoint", "host", "port", "url", "public_url", "key",
    "tls_cert", "tls_key", "ca_file", "plan", *ClusterSettings.model_fields,
)  # fmt: skip
"""Fields of a service that stands: its places, its address and its fleet. A service for one run has none of them."""

STORAGE_SETTINGS = ("data", "database", "artifacts_url", "artifacts_endpoint")
"""Fields that a backup and a restoration use."""

MAY_BE_EMPTY = (
    "reachable_hosts",
    "judges",
    "sinks",
    "verifiers",
    "games",
    "models",
    "allocator",
    "allowed_models",
    "artifacts_endpoint",
    "slo_overrides",
)
"""Settings whose empty value is a choice. That of another one is a variable that nobody filled in: an empty key would
be the administrator's, an empty folder the working directory, an empty certificate plain HTTP."""

_ADDRESS = re.compile(r"(tcp|udp|sctp)://[^/]+")
"""The value that Kubernetes and Docker give to ``<NAME>_PORT`` for a service or linked container of that name."""

_PLATFORM = re.compile(
    r"ROOKERY(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)"
    r"|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|ADDR|START|END|PORT(_(START|END))?))?)?)"
)
"""Names of the variables that these two set for a service or container whose name begins with ``rookery``."""

_LINK = re.compile(r"/[^/]+/[^/]+")
"""The value that Docker gives to ``<NAME>_NAME`` for a linked container; ``<NAME>_ENV_…`` are then its variables."""


def _is_platforms(name: str, value: str) -> bool:
    """Whether a variable with a setting's name was set for a service or container. The address of a setting that
    somebody wrote so, such as ``tcp://minio:9000``, is a mistake to name."""
    return bool(_PLATFORM.fullmatch(name) and _ADDRESS.fullmatch(value))


def trim_variables(environment: MutableMapping[str, str]) -> None:
    """Remove white space around the values of ``ROOKERY_*`` variables, such as the end of a line of a file that was
    written on Windows. The command line reads some of them by itself, as options: without this, a folder's name would
    end with it."""
    for name in [name for name in environment if name.startswith("ROOKERY_")]:
        environment[name] = environment[name].strip()


def variable_notes(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A line for every ``ROOKERY_*`` variable that is no setting: the platform's, in one line, and unknown names, each
    with the closest setting."""
    settings = {f"ROOKERY_{name.upper()}" for name in ("data", "cache", *SECTION_OF)} | {TOKEN_VARIABLE}
    given = {name: value for name, value in environment.items() if name.startswith("ROOKERY_")}
    links = [name for name, value in given.items() if name.endswith("_NAME") and _LINK.fullmatch(value)]
    copied = tuple(f"{name.removesuffix('NAME')}ENV_" for name in links)
    theirs, unknown = [], []
    for name in sorted(given):
        if name in settings:
            is_theirs = _is_platforms(name, given[name])
        else:
            is_theirs = bool(_PLATFORM.fullmatch(name) or name in links or name.startswith(copied))
        if is_theirs:
            theirs.append(name)
        elif name not in settings and len(name) <= LONGEST_NAME:
            endings = sorted(known.removeprefix("ROOKERY_") for known in settings)
            close = difflib.get_close_matches(name.removeprefix("ROOKERY_"), endings, 1)
            unknown.append(f"{name} is no setting" + (f"; did you mean ROOKERY_{close[0]}?" if close else ""))
    if theirs:
        reason = "Kubernetes or Docker sets them for a service or container named rookery"
        unknown.append(f"ignored: {', '.join(theirs)} ({reason}; enableServiceLinks: false in the pod avoids them)")
    return unknown


LONGEST_NAME = 64
"""Characters of an unknown variable's name that is worth a comparison with every setting."""

SECTION_OF: dict[str, str] = {
    field: section
    for section, info in Settings.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
    for field in info.annotation.model_fields
}
"""The section that holds each field."""
