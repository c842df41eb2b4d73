"""Messages between the controller and workers: registration, heartbeats, generation, adapters, training.

A worker introduces itself with :class:`Hello`; :class:`Welcome` gives the connection its epoch. Tokens of a request are
numbered from 0 and ``TokenChunk.offset`` is the number of the chunk's first token: a receiver takes only the part that
extends its copy, so a chunk sent twice counts once.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rookery.bounds import ENTRIES, MAX_FRAME, Count, ErrorText, Integer, Line, Name
from rookery.protocol.common import Adam, AdapterRef, EpochMessage, HelloRejected, Loss, Manifest, Message, Struct
from rookery.protocol.gauges import Gauges
from rookery.protocol.reads import ReadKey
from rookery.protocol.tokens import TokenChunk

# --- worker → controller --------------------------------------------------------------------------------------------

Names = Annotated[list[Name], Meta(max_length=ENTRIES)]
"""Hashes of artifacts, ids of requests."""


class Hello(Message, kw_only=True):
    """First frame of a worker. ``instance`` is drawn once per process; ``running`` are requests still held from
    an earlier connection, so that a controller that knows them resumes their streams instead of resending.

    A worker that still loads its base model sets ``loading`` and sends :class:`Ready` when it is loaded."""

    protocol: Integer
    name: Name
    instance: Name
    model: Line
    model_hash: Name
    roles: Annotated[list[Literal["rollout", "train"]], Meta(max_length=2)]
    kind: Literal["reserved", "preemptible"] = "reserved"
    price: float = 0.0
    """Cost of one hour, in any unit: the operator's choice."""
    address: Line = ""
    """Where other workers may read artifacts from it; empty: it serves none."""
    site: Name = ""
    """Where it runs: workers of one site reach each other faster than those of another."""
    loading: bool = False
    max_rows: Count
    """Sequences that decode at the same time."""
    max_context: Count
    """Tokens of the longest text that it holds, prompt included; 0 while it loads."""
    max_rank: Count
    engine: Name = ""
    """``native``, ``transformers`` or ``vllm``; empty while it loads."""
    device: Name
    dtype: Name
    pid: Count = 0
    host: Name = ""
    cache: Name = ""
    """Names its cache of artifacts: workers of one host with the same one share the files."""
    adapters: Names = msgspec.field(default_factory=list)
    """Hashes of the adapters in its cache, which it can serve."""
    loaded: Names = msgspec.field(default_factory=list)
    """Hashes of those that are in its engine's memory only: it generates with them."""
    running: Names = msgspec.field(default_factory=list)


class Ready(EpochMessage, kw_only=True):
    """The base model is loaded: the worker accepts work."""

    model_hash: Name
    max_context: Count
    engine: Name = ""
    device: Name
    dtype: Name


LOADED = tuple(name for name in Ready.__struct_fields__ if name != "epoch")
"""The fields of :class:`Ready`, which a :class:`Hello` has too: known once the base model is loaded."""


class AdaptersCached(EpochMessage, kw_only=True):
    """These adapters are complete in the worker's cache, in addition to those reported before."""

    hashes: Names


class AdaptersEvicted(EpochMessage, kw_only=True):
    """These adapters left the worker's cache to make room: it serves no new reader of them."""

    hashes: Names


class VersionStaged(EpochMessage, kw_only=True):
    """A training operation has written its version, which is not uploaded yet, to the private folder ``folder`` of the
    worker's cache: workers that share the cache may have it (:class:`HandOver`)."""

    op: Name
    hash: Name
    folder: Name


class HandedOver(EpochMessage, kw_only=True):
    """A version of :class:`HandOver` is here, and has the hash that names it."""

    hash: Name


class PullFailed(EpochMessage, kw_only=True):
    """An adapter that work named could not be received, from no worker and not from the service."""

    hash: Name
    error: ErrorText


class Heartbeat(EpochMessage, kw_only=True):
    """Sent at a fixed interval: the figures that decisions use, and ``gauges`` for the operator. ``progress`` counts
    finished compute slices, and bytes of adapters while nothing computes: a worker whose progress stands still while it
    is :attr:`busy` is stuck rather than dead."""

    progress: Count
    active: Count
    """Requests that decode."""
    waiting: Count
    """Requests that do not decode yet."""
    training: Count
    """Training operations that are queued or run."""
    generated: Count
    """Tokens sampled since the process began."""
    decode_seconds: float
    """Compute time of generation since the process began; likewise ``train_seconds``."""
    train_seconds: float
    interactive: Count = 0
    """Requests with objectives (:class:`Generate`) that it holds now."""
    slo_slack: float = 0.0
    """Their least slack of the last second, in seconds: below 0 an objective is predicted to be missed."""
    free_tokens: Count = 0
    """Of the KV cache: those that no running request occupies."""
    costs: Annotated[
        dict[Literal["prefill", "decode", "train"], Annotated[list[tuple[float, float]], Meta(max_length=1000)]],
        Meta(max_length=3),
    ] = msgspec.field(default_factory=dict)
    """(tokens, seconds) of slices by kind, as measured lately (:class:`rookery.scheduling.costs.CostTable`)."""
    receiving: Annotated[dict[Name, Count], Meta(max_length=1000)] = msgspec.field(default_factory=dict)
    """By hash, the bytes that are here of the artifacts that it receives."""
    stalled: Line = ""
    """The reason why its work makes no progress; empty while it does."""
    lanes: Line = ""
    """How it trains and generates at once, and why: ``beside: …`` or ``turns: …``; empty where it does not train."""
    slowdowns: tuple[float, float] = (2.0, 2.0)
    """Of generation and training while it has both: seconds over those alone, 2 in turns."""
    memory_parts: Annotated[dict[Name, tuple[Count, Count]], Meta(max_length=100)] = msgspec.field(default_factory=dict)
    """(used, budget) in bytes of each part of the memory budget."""
    gauges: Gauges = msgspec.field(default_factory=dict)
    """Figures for the operator, by their names in :data:`rookery.protocol.gauges.GAUGES`."""

    @property
    def busy(self) -> bool:
        """Whether it has work that runs or waits."""
        return bool(self.active or self.waiting or self.training)


class Output(EpochMessage, kw_only=True):
    """One flush: new tokens of any number of requests."""

    chunks: Annotated[list[TokenChunk], Meta(max_length=ENTRIES)]


class SourcesRequest(EpochMessage, kw_only=True):
    """A source of an artifact that work named has failed: asks for others, which :class:`Sources` brings."""

    hash: Name
    failed: Line
    """Its address."""


FailureCategory = Literal["stale", "failed", "lost", "too small"]
"""Whether a retry of an operation that was not carried out can help: ``stale`` (parent or lease does not match: send
again with state), ``failed`` (this operation cannot succeed), ``lost`` (the worker had to drop it; any worker may
retry), ``too small`` (the policy never fits this worker's memory; another one may have more)."""

LOGPROB_BYTES = 4
"""Bytes of each of the :attr:`OperationDone.logprobs`."""


class OperationDone(EpochMessage, kw_only=True):
    """Answer to :class:`ForwardBackward`, :class:`OptimStep` or :class:`InitAdapter`. ``error`` and ``category`` are
    empty on success."""

    op: Name
    error: ErrorText = ""
    category: Literal["", FailureCategory] = ""
    metrics: Annotated[dict[Name, float], Meta(max_length=1000)] = msgspec.field(default_factory=dict)
    logprobs: Annotated[bytes, Meta(max_length=MAX_FRAME)] = b""
    """With forward_only, or where requested: float32 little-endian, the groups' loss tokens in order of the batch, then
    the data's targets."""
    more: bool = False
    """It brings log-probabilities only, and the answer itself follows in another message, after all of them."""
    manifest: Manifest | None = None
    """With an upload ticket: the uploaded artifact."""


class Draining(EpochMessage, kw_only=True):
    """The worker drains: it accepts nothing new and its unfinished requests move to other workers."""

    reason: ErrorText = ""
    """The line with which it ends, if it ends because it does not work."""
    refused: bool = False
    """With a ``reason``: a restart does not help, such as for a model that it cannot compute."""


# --- controller → worker --------------------------------------------------------------------------------------------


class Welcome(Message, kw_only=True):
    """``epoch`` is valid for this connection alone. Artifacts, batches and uploads are read and written at the address
    that the worker dialled."""

    name: str
    epoch: int
    heartbeat_seconds: float
    flush_seconds: float
    """Tokens wait at most this long in the worker before they are sent."""
    reads: ReadKey
    """Signs and checks reads of artifacts among the workers that have the same key."""
    time: float
    """The service's seconds in which signatures count: those of its wall clock when it started, and monotonic since."""
    resume_seconds: float = 15.0
    """For so long the worker keeps requests of an earlier connection that this one has not named."""


class LogitsParams(Struct, kw_only=True):
    """Changes of the logits before a token is drawn. A trainer does not reproduce them: no loss reads such a text.
    Their order is bias, penalties, schema, then (above temperature 0) ``min_p``, ``top_k``, ``top_p``."""

    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: list[tuple[int, float]] = msgspec.field(default_factory=list)
    top_logprobs: int = 0
    """With each sampled token, how many of the likeliest tokens in its place are returned."""
    schema: str = ""
    """The text is JSON of this schema, or the beginning of it where it is cut off; empty: any text."""
    unless: str = ""
    """A text that begins with this one, such as a call of a tool, follows no schema; empty: each does."""


TEXT_PARAMETERS = (
    "prompt", "shared_prefix", "max_tokens", "temperature", "seed", "stop_tokens", "stop", "in_flight",
    "prompt_logprobs", "top_logprobs", "logits",
)  # fmt: skip
"""The parameters of a request, besides its adapter, that a text must share with one that it continues."""


class Generate(Message, kw_only=True):
    """One generation. The sequence is ``prompt`` + ``prefix_tokens`` + the sampled tokens; sampled token i uses noise
    from (``seed``, i), i counted from the first token of ``prefix_tokens``, so a resumed text equals an uninterrupted
    one.

    The first ``shared_prefix`` tokens of ``prompt`` are common to the episode's group: their cache is kept once for all
    requests that agree on (adapter, these tokens). ``episode`` names the cache that a later turn may extend."""

    request: str
    assignment: str = ""
    """Names the request's stay at this worker, and is never given twice. Tokens carry it. A worker that holds the
    request with this text since an earlier connection continues it under the new name."""
    adapter: AdapterRef | None
    prompt: list[int]
    shared_prefix: int
    prefix_tokens: list[int] = msgspec.field(default_factory=list)
    max_tokens: int
    """Counted from the first token of ``prefix_tokens``."""
    temperature: float
    """0 is greedy; its log-probabilities are those at temperature 1."""
    seed: int
    stop_tokens: list[int]
    stop: list[str] = msgspec.field(default_factory=list)
    """A stop string ends the text with the token that completes it; that token is kept."""
    episode: str = ""
    group: str = ""
    """The id of the episode's group; empty for a request without one. Requests of one group draft from each other's
    texts (speculative decoding): a group is one tenant's."""
    in_flight: Literal["finish", "switch", "recompute"] = "finish"
    """Reaction to a newer version. Unless it is ``finish``, a running request may also be resumed by a newer version
    than it runs on; with ``switch`` it extends the episode's cache also where an older version computed it."""
    prompt_logprobs: int = 0
    """How many of the prompt's last tokens are scored too (its first token never is); ``shared_prefix`` must be 0."""
    top_logprobs: int = 0
    """With each scored token, how many of the likeliest tokens in its place are returned."""
    logits: LogitsParams | None = None
    """None: tokens are drawn from the model's own distribution."""
    client: bool = False
    """A client waits for the result: rollouts and training leave it its time, also where it has no reserved row, and
    its tokens are sent first."""
    reserved: bool = False
    """It has a reserved row: admitted before requests without one, which may lose their rows to it and resume later
    from the same token. The service decides so when it assigns the request. Does not affect the text."""
    ttft_ms: float = 0.0
    """Of a client's request: milliseconds from now until its first token is due; 0: no objective. Rollouts and training
    slices of the worker run as far as the objectives allow (:mod:`rookery.scheduling.slo`)."""
    tpot_ms: float = 0.0
    """Of a client's request: the milliseconds that each further token may take, on average; 0: no objective."""
    tenant: Name = ""
    """Whose it is: tenants share a worker's time (:mod:`rookery.scheduling.worker_time`)."""
    weight: float = 1.0
    """The tenant's share of that time, relative to those of the others."""
    order: float = 0.0
    """Of the waiting requests with a reserved row, and of those without one, the least is admitted first, among equals
    the first to come: the tenant's token counter (:mod:`rookery.scheduling.queues`) when the request was assigned."""

    def same_text(self, other: Generate) -> bool:
        """Whether the tokens of one are those of the other, if the same version samples both: service and workers ask
        this before a request continues a text that is there."""
        return all(getattr(self, name) == getattr(other, name) for name in TEXT_PARAMETERS)


class Abort(Message, kw_only=True):
    """Stops a request, of which nothing more is sent. As with :class:`SwitchAdapter`, a worker that holds the request
    under another assignment ignores it."""

    request: str
    assignment: str = ""
    resume: bool = False
    """It continues elsewhere: the tokens sampled are sent, the last chunk has ``finish`` ``abort``."""


class SwitchAdapter(Message, kw_only=True):
    """A running request continues with ``adapter``, a newer version of its policy, from the next token after it is
    loaded. Its attention cache stays as the older version computed it, unless ``recompute``. Tokens sampled before
    keep the version that sampled them: a :class:`TokenChunk` never mixes two."""

    request: str
    assignment: str = ""
    adapter: AdapterRef
    recompute: bool = False


class Replicate(Message, kw_only=True):
    """These versions are in use: receive them and report each with :class:`AdaptersCached` when it is complete."""

    refs: list[AdapterRef]


class HandOver(Message, kw_only=True):
    """Another worker of the machine made ``ref`` in the private folder ``folder`` of the cache that both share. It is
    not committed: have it ready, and neither list nor serve it before work names it, or :class:`Replicate`. Its
    ``version`` is not known yet, and 0."""

    ref: AdapterRef
    folder: str


class Withdraw(Message, kw_only=True):
    """These versions of :class:`HandOver`, or of the worker's own operations, are not committed: delete them."""

    hashes: list[str]


class Sources(Message, kw_only=True):
    """Answer to :class:`SourcesRequest`; ``sources`` as in :class:`AdapterRef`. Without a request, the worker leaves
    its present source for these."""

    hash: str
    sources: list[str]


class Retain(Message, kw_only=True):
    """The worker is the last reserved holder of these artifacts, which are in use: it evicts them last. Replaces the
    list sent before."""

    hashes: list[str]


class StepOperation(Message, kw_only=True):
    """Base class of the operations of an optimizer step.

    ``parent`` names the committed state from which the policy's current step began, ``steps`` the optimizer steps
    since then on this lease, ``operations`` the :class:`ForwardBackward` that the gradient contains before this one.
    The worker answers ``stale`` unless it holds (policy, lease, parent, steps, operations), or both counts are 0 and it
    can load the parent. A gradient is never cleared: it is stepped on, or abandoned with its lease. Operations that
    leave the state as it is (``forward_only``, a commit without a step) do not look at ``operations``."""

    op: str
    policy: str
    lease: int
    parent: AdapterRef
    steps: int
    operations: int = 0
    upload: str = ""
    """An upload ticket for what the operation makes, or empty."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share of the trainer, relative to those of the others."""

    @property
    def is_share(self) -> bool:
        """Whether it computes the gradient of a share for another worker. It needs no optimizer's state, and no state
        of the policy stays."""
        return False


class ForwardBackward(StepOperation, kw_only=True):
    """Adds the gradient of Σ weight·term over the batch to the policy's accumulated gradient. With ``upload`` the
    gradient of this batch alone is uploaded as float32, and the worker keeps no state of the policy: the batch is a
    share of one that the policy's worker divides with others."""

    batch_ticket: str
    """``GET {base}/wire/batches/{ticket}`` answers an encoded :class:`~rookery.protocol.TrainingBatch`."""
    loss: Loss
    temperature: float
    kl_weight: float = 0.0
    reference: AdapterRef | None = None
    """The version that the KL penalty, or a loss of pairs, compares with; None: the base model."""
    forward_only: bool = False
    logprobs: bool = False
    """Return ``OperationDone.logprobs`` also where a gradient is computed."""
    gradients: list[AdapterRef] = msgspec.field(default_factory=list)
    """Artifacts with gradients of other workers on the same parent, added in this order after the batch's own."""

    @property
    def is_share(self) -> bool:
        return self.upload != ""


class OptimStep(StepOperation, kw_only=True):
    """One AdamW step of one policy on its accumulated gradient. With a NaN or infinity in gradient or loss nothing is
    applied, the state stays as it was, and ``OperationDone.metrics['skipped']`` is 1. With ``upload`` the worker then
    writes adapter and trainer state as artifact files, ``PUT {base}/wire/uploads/{upload}/{shard}``, and answers with
    the manifest. Without ``adam`` it only commits: no step is taken and the gradient stays as it is."""

    adam: Adam | None
    scale: float = 1.0
    """Multiplies the accumulated gradient before it is clipped: a normalisation that is only known after the last
    ``ForwardBackward``."""


class VersionCommitted(Message, kw_only=True):
    """The controller made ``ref`` durable: the worker's state of that policy is now this version with 0 steps."""

    policy: str
    lease: int
    ref: AdapterRef


class CancelOperation(Message, kw_only=True):
    """Abandon a training operation that has not answered."""

    op: str


class EvictArtifacts(Message, kw_only=True):
    """No request or operation will name these artifacts again, or this policy's trainer state is not needed here."""

    hashes: list[str] = msgspec.field(default_factory=list)
    policy: str = ""
    offload: bool = False
    """The policy's state may be needed again: keep it in main memory, if there is room."""


class InitAdapter(Message, kw_only=True):
    """Creates version 0: a LoRA with B = 0 and A drawn from ``seed`` (or the weights of ``source``, a PEFT artifact),
    no optimizer state; with ``rank`` 0 the whole base model. Uploaded under ``upload``; :class:`OperationDone` brings
    the manifest."""

    op: str
    policy: str
    rank: int
    alpha: float
    targets: list[str]
    """Any of q k v o gate up down."""
    seed: int
    upload: str = ""
    """An upload ticket."""
    source: AdapterRef | None = None


StateOperation = ForwardBackward | OptimStep
"""An operation on the state of a policy that it names."""
TrainingOperation = StateOperation | InitAdapter
"""An operation that :class:`OperationDone` answers."""


def made_version(operation: OptimStep | InitAdapter, digest: str) -> AdapterRef:
    """The version with this hash that ``operation`` has made. It has no number before its commit: that is 0."""
    like = operation if isinstance(operation, InitAdapter) else operation.parent
    return AdapterRef(policy=operation.policy, version=0, hash=digest, rank=like.rank, alpha=like.alpha)


WorkMessage = (
    AdaptersCached | AdaptersEvicted | VersionStaged | HandedOver | PullFailed | Output | SourcesRequest | OperationDone
)
"""About a worker's work, not about the worker itself."""
FromWorker = Hello | Ready | Heartbeat | Draining | WorkMessage
ToWorker = (
    Welcome
    | HelloRejected
    | Generate
    | Abort
    | SwitchAdapter
    | Replicate
    | HandOver
    | Withdraw
    | Sources
    | Retain
    | TrainingOperation
    | VersionCommitted
    | CancelOperation
    | EvictArtifacts
)
