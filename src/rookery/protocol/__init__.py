"""Messages between the controller and the processes that dial in: workers and environment hosts.

Invariants:

* One binary WebSocket frame carries one message: MessagePack of a tagged, typed ``msgspec.Struct``. A frame that
  does not decode raises :class:`BadFrame`; the receiver closes the link, the other end becomes *suspect*.
* Every frame that a worker sends after ``Welcome`` carries the epoch it was given there. The controller ignores
  frames of any other epoch, so a worker given up for dead can never be counted twice.
* Tokens of a request are numbered from 0; ``Chunk.offset`` is the number of the chunk's first token. A receiver
  takes only the part that extends what it has.
* Big things (adapters, optimizer states, training batches) never travel here. A message names them by content hash
  and carries a ticket, good for a short time, with which the bytes are read or written over HTTP (ranges allowed).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal, TypeVar

import msgspec

PROTOCOL = 2

MAX_FRAME = 64 << 20
"""Bytes of one frame. Frames are small; the largest carry an environment's texts, and options with a job's rows. The
service and hosts close a link that brings a larger one, so whoever passes on a tenant's texts looks at their size."""


class BadFrame(ValueError):
    """A frame that is no message of this protocol."""


class Message(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of everything that crosses a link."""


class Struct(msgspec.Struct, omit_defaults=True):
    """Base of the pieces that messages are made of."""


# --- things named by hash -------------------------------------------------------------------------------------------


class Shard(Struct, kw_only=True):
    """One file of an artifact: its name inside the folder, its size in bytes, the SHA-256 of its bytes in hex."""

    name: str
    size: int
    sha256: str


class Manifest(Struct, kw_only=True):
    """An artifact: a PEFT adapter folder, with or without the trainer's state beside it.

    ``hash`` is the SHA-256 over the sorted shards' (name, size, sha256) and names the artifact everywhere.
    """

    hash: str
    shards: list[Shard]


def manifest_of(shards: Iterable[Shard]) -> Manifest:
    """The manifest of these files; its hash is that of the compact JSON ``[[name, size, sha256], …]``, by name."""
    ordered = sorted(shards, key=lambda shard: shard.name)
    listing = msgspec.json.encode([[shard.name, shard.size, shard.sha256] for shard in ordered])
    return Manifest(hash=hashlib.sha256(listing).hexdigest(), shards=ordered)


class AdapterRef(Struct, kw_only=True):
    """One immutable version of a policy, as a worker must find it. ``hash`` names its manifest."""

    policy: str
    version: int
    hash: str
    rank: int
    alpha: float
    ticket: str = ""
    """Reads ``GET {base}/wire/artifacts/{hash}/{shard}``; ``Want`` asks for a new one when it has expired."""
    peers: list[str] = msgspec.field(default_factory=list)
    """Addresses of workers that hold it and were told to lend it for this ticket: asked before the service is, at
    ``GET {peer}/artifacts/{hash}/{shard}``. The hash proves the bytes, whoever they come from."""


# --- worker → controller --------------------------------------------------------------------------------------------


class Hello(Message, kw_only=True):
    """First frame of a worker. ``instance`` is drawn once per process; ``running`` are requests still held from
    an earlier connection, so that a controller that knows them takes up their streams instead of resending.

    A worker whose base model is still on its way says so with ``loading`` and sends :class:`Ready` when it is there."""

    protocol: int
    token: str
    name: str
    instance: str
    model: str
    model_hash: str
    roles: list[Literal["rollout", "train"]]
    kind: Literal["reserved", "preemptible"] = "reserved"
    price: float = 0.0
    """What an hour of it costs, in whatever unit its owner counts."""
    address: str = ""
    """Where other workers may pull adapters from it; empty offers nothing."""
    loading: bool = False
    max_rows: int
    """Sequences that decode at the same time."""
    max_context: int
    max_rank: int
    device: str
    dtype: str
    pid: int = 0
    host: str = ""
    adapters: list[str] = msgspec.field(default_factory=list)
    running: list[str] = msgspec.field(default_factory=list)


class Ready(Message, kw_only=True):
    """The base model is loaded: the worker can be given work."""

    epoch: int
    model_hash: str
    max_context: int
    device: str
    dtype: str


class AdaptersCached(Message, kw_only=True):
    """These adapters lie whole in the worker's cache, besides those that it told of before."""

    epoch: int
    hashes: list[str]


class PullFailed(Message, kw_only=True):
    """An adapter that work named could not be pulled, neither from a peer nor from the service."""

    epoch: int
    hash: str
    error: str


class Heartbeat(Message, kw_only=True):
    """Heartbeat. ``progress`` counts finished compute slices, and bytes of adapters while nothing computes: a beat
    whose progress stands still while ``active``, ``waiting`` or ``training`` is not zero tells of a worker that is
    stuck rather than dead."""

    epoch: int
    progress: int
    active: int
    waiting: int
    training: int
    adapters: int
    generated: int
    """Tokens sampled since the process began."""
    trained: int
    """Tokens trained on since the process began (loss or not, prompts counted once in each pass)."""
    decode_seconds: float
    train_seconds: float
    memory_bytes: int
    pulled_from_peers: int = 0
    """Bytes of artifacts that other workers lent, since the process began …"""
    pulled_from_service: int = 0
    """… and that the service gave."""


class PromptLogprob(Struct, kw_only=True):
    """A prompt token's natural log-probability at temperature 1, and the likeliest tokens in its place with theirs,
    best first."""

    logprob: float
    top: list[tuple[int, float]] = msgspec.field(default_factory=list)


class TokenChunk(Struct, kw_only=True):
    """Freshly sampled tokens of one request. ``finish`` is empty until the last chunk.

    ``logprobs`` are natural logs under the distribution sampled from (temperature applied). ``version`` is the adapter
    version that the engine really applied to these tokens (0 with ``policy`` empty: the base model)."""

    request: str
    offset: int
    tokens: list[int]
    logprobs: list[float]
    version: int
    policy: str = ""
    finish: Literal["", "stop", "length", "abort", "error"] = ""
    error: str = ""
    prompt_logprobs: list[PromptLogprob] = msgspec.field(default_factory=list)
    """With the last chunk: of the prompt's last tokens, as many as were asked for."""


class Output(Message, kw_only=True):
    epoch: int
    chunks: list[TokenChunk]


class TicketRequest(Message, kw_only=True):
    """Asks for a new ticket for an artifact that a request or an operation named."""

    epoch: int
    hash: str


class OperationDone(Message, kw_only=True):
    """Answer to ``ForwardBackward`` or ``OptimStep``. ``error`` is empty on success; ``category`` tells whether
    another attempt can help: ``stale`` (parent or lease does not match: send again with state), ``failed`` (this
    operation cannot succeed), ``lost`` (the worker had to give it up; anyone may try again)."""

    epoch: int
    op: str
    error: str = ""
    category: Literal["", "stale", "failed", "lost"] = ""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    logprobs: bytes = b""
    """forward_only, or asked for: float32 little-endian, the units' loss tokens in order of the batch, then the data's
    targets."""
    manifest: Manifest | None = None
    """OptimStep with a commit: what was uploaded."""


class Draining(Message, kw_only=True):
    """The worker drains: it takes nothing new and its unfinished requests go on elsewhere."""

    epoch: int


# --- controller → worker --------------------------------------------------------------------------------------------


class Welcome(Message, kw_only=True):
    """``epoch`` is valid for this connection alone. Tickets are used at the address it dialled."""

    name: str
    epoch: int
    heartbeat_seconds: float
    flush_seconds: float
    """Tokens wait at most this long in the worker before they are sent."""


class HelloRejected(Message, kw_only=True):
    """The other end must not try again as it is; ``reason`` is one line for its operator."""

    reason: str


class Generate(Message, kw_only=True):
    """One generation. The sequence is ``prompt`` + ``given`` + what is sampled; sampled token i uses noise from
    (``seed``, i), i counted from the first token of ``given``, so text goes on as if never interrupted.

    ``shared`` tokens at the front of ``prompt`` are common to the episode's group: their cache is kept once for all
    requests that agree on (adapter, these tokens). ``episode`` names the cache that a later turn may extend."""

    request: str
    adapter: AdapterRef | None
    prompt: list[int]
    shared_prefix: int
    prefix_tokens: list[int] = msgspec.field(default_factory=list)
    max_tokens: int
    """Counted from the first token of ``given``."""
    temperature: float
    """0 is greedy; its log-probabilities are those at temperature 1."""
    seed: int
    stop_tokens: list[int]
    stop: list[str] = msgspec.field(default_factory=list)
    """A stop string ends the text with the token that completes it; that token is kept."""
    episode: str = ""
    in_flight: Literal["finish", "switch", "recompute"] = "finish"
    """What it does when a newer version comes. Where that is not ``finish``, a request that runs already is also
    claimed by a newer version than it runs on; with ``switch`` it extends the episode's cache also where an older
    version computed that."""
    prompt_logprobs: int = 0
    """How many of the prompt's last tokens are scored too (its first token never is); ``shared`` must be 0 then."""
    top_logprobs: int = 0
    """With each scored token, how many of the likeliest tokens in its place are told."""
    interactive: bool = False
    """Somebody waits for the answer: it is admitted before requests that are not ``first``, which give up rows for it
    and go on later, where they were. Decides nothing about the text."""


class Abort(Message, kw_only=True):
    request: str


class SwitchAdapter(Message, kw_only=True):
    """A running request goes on with ``adapter``, a newer version of its policy, from the next token after the adapter
    is there. Its attention cache stays as the older version computed it, or is computed anew with ``recompute``. Tokens
    sampled before keep the version that sampled them: a :class:`Chunk` never mixes two."""

    request: str
    adapter: AdapterRef
    recompute: bool = False


class PrefetchAdapters(Message, kw_only=True):
    """These versions are in use: have them in the cache, say :class:`Holding` for each as soon as it is there."""

    refs: list[AdapterRef]


class ServeArtifact(Message, kw_only=True):
    """Hand the artifact to whoever brings ``ticket``, for ``seconds`` from now."""

    hash: str
    ticket: str
    seconds: float


class TicketGrant(Message, kw_only=True):
    hash: str
    ticket: str
    peers: list[str] = msgspec.field(default_factory=list)


class Loss(Struct, kw_only=True):
    """A loss by name with its parameters (algorithms/losses). A pure sum over tokens."""

    name: str
    params: dict[str, float] = msgspec.field(default_factory=dict)


class ForwardBackward(Message, kw_only=True):
    """Adds the gradient of Σ weight·term over the batch to the policy's accumulated gradient.

    ``parent`` names the committed state from which the policy's current step began, ``steps`` the optimizer steps
    taken since on this lease: the worker answers ``stale`` unless it holds (policy, lease, parent, steps) or steps is 0
    and it can load the parent."""

    op: str
    policy: str
    lease: int
    parent: AdapterRef
    steps: int
    batch_ticket: str
    """``GET {base}/wire/offers/{ticket}`` answers an encoded :class:`Batch`."""
    loss: Loss
    temperature: float
    kl_weight: float = 0.0
    forward_only: bool = False
    zero_grad: bool = False
    """Drop the gradient accumulated so far (first operation of a step)."""
    logprobs: bool = False
    """Answer with ``Done.logprobs`` also where a gradient is computed."""
    tenant: str = ""


class Adam(Struct, kw_only=True):
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled (AdamW)."""
    clip: float = 0.0
    """Global gradient norm; 0 is off."""


class OptimStep(Message, kw_only=True):
    """One AdamW step of one policy on its accumulated gradient. Not a number in gradient or loss: nothing is applied,
    the state stays as it was, and ``Done.metrics['skipped']`` is 1. With ``commit`` the worker then writes adapter and
    trainer state as artifact files, ``PUT {base}/wire/uploads/{commit}/{shard}``, and answers with the manifest.
    Without ``adam`` no step is taken and the gradient stays as it is: only the commit."""

    op: str
    policy: str
    lease: int
    parent: AdapterRef
    steps: int
    adam: Adam | None
    scale: float = 1.0
    """Multiplies the accumulated gradient before it is clipped: a normalisation that was not known when its parts were
    computed."""
    commit: str = ""
    """An upload ticket, or empty for no commit after this step."""
    tenant: str = ""


class VersionCommitted(Message, kw_only=True):
    """The controller made ``ref`` durable: the worker's state of that policy is now this version with 0 steps."""

    policy: str
    lease: int
    ref: AdapterRef


class CancelOperation(Message, kw_only=True):
    """Give up a training operation that has not answered."""

    op: str


class EvictArtifacts(Message, kw_only=True):
    """No request or operation will name these artifacts again, or this policy's trainer state is not needed here."""

    hashes: list[str] = msgspec.field(default_factory=list)
    policy: str = ""
    offload: bool = False
    """The policy's state may be wanted again: keep it in main memory, if there is room."""


class InitAdapter(Message, kw_only=True):
    """Make version 0: a LoRA with B = 0 and A drawn from ``seed`` (or the weights of ``source``, a PEFT artifact given
    with a reading ticket), no optimizer state. Uploaded under ``commit`` and answered by ``Done`` with the manifest."""

    op: str
    policy: str
    rank: int
    alpha: float
    targets: list[str]
    """Any of q k v o gate up down."""
    seed: int
    commit: str
    source: AdapterRef | None = None


# --- the training batch (fetched with a ticket) ---------------------------------------------------------------------


class GroupMember(Struct, kw_only=True):
    """One trajectory after its unit's prompt: parallel lists, one entry per token of the tail.

    ``logprobs`` are the behaviour policy's; entries where ``weights`` is 0 are ignored (tokens of the environment carry
    no loss). ``weights`` multiply the token's loss term: the algorithm's normalisation lives there, not in the loss."""

    tokens: list[int]
    logprobs: list[float]
    advantages: list[float]
    weights: list[float]


class SharedPrefixGroup(Struct, kw_only=True):
    """Trajectories with one common prompt, which the trainer computes once, forward and backward. A prompt has at
    least one token: the first tail token is predicted from the prompt's last."""

    prompt: list[int]
    members: list[GroupMember]


class Datum(Struct, kw_only=True):
    """A sequence with targets of its own choice: ``targets[i]`` is scored as what follows ``tokens[: rows[i] + 1]``.
    The other lists are parallel to ``targets``, with the meaning that they have in :class:`Member`, except that a
    target is scored whatever its weight. A row may have several targets (a distribution), or none."""

    tokens: list[int]
    rows: list[int]
    targets: list[int]
    logprobs: list[float]
    advantages: list[float]
    weights: list[float]


class TrainingBatch(Struct, kw_only=True):
    groups: list[SharedPrefixGroup] = msgspec.field(default_factory=list)
    data: list[Datum] = msgspec.field(default_factory=list)


# --- environment hosts ----------------------------------------------------------------------------------------------


class HostedEnvironment(Struct, kw_only=True):
    """``name`` is what a job says under ``environment.hosted``; built-ins are offered as ``builtin:<id>``."""

    name: str
    deterministic: bool = False


class HostHello(Message, kw_only=True):
    protocol: int
    token: str
    """A tenant's API key, or the service's own token for a host that it spawned."""
    instance: str
    environments: list[HostedEnvironment]
    episodes: list[str] = msgspec.field(default_factory=list)
    """Episodes still alive in this process from an earlier connection."""


class HostWelcome(Message, kw_only=True):
    epoch: int
    heartbeat_seconds: float


class HostHeartbeat(Message, kw_only=True):
    epoch: int
    active: int


class ChatMessage(Struct, kw_only=True):
    """A chat message."""

    role: str
    content: str


class GetPrompts(Message, kw_only=True):
    """Prompts number ``start`` … ``start + count - 1`` of a split, in the job's order: finite splits are shuffled anew
    each epoch from ``seed`` when ``shuffle``, and start over at their end."""

    call: str
    job: str
    environment: str
    options: dict
    split: Literal["train", "eval"]
    start: int
    count: int
    seed: int
    shuffle: bool


class Prompts(Message, kw_only=True):
    """``size`` is the split's length where it is finite, else -1. Fewer than asked: only on error or in eval."""

    epoch: int
    call: str
    prompts: list[bytes] = msgspec.field(default_factory=list)
    """Each the JSON of one prompt."""
    size: int = -1
    error: str = ""


class Reset(Message, kw_only=True):
    """Begin an episode: builds the environment from (environment, options), answers ``Observed`` with turn 0."""

    call: str
    episode: str
    job: str
    environment: str
    options: dict
    prompt: bytes
    seed: int


class StepEpisode(Message, kw_only=True):
    """The policy's reply to turn ``turn``; ``turns`` is the whole conversation so far, the reply last."""

    call: str
    episode: str
    turn: int
    text: str
    tokens: list[int]
    messages: list[ChatMessage]


class Observation(Message, kw_only=True):
    """What ``reset`` or ``step`` gave. A raised exception arrives as ``error`` (one line, with its type)."""

    epoch: int
    call: str
    episode: str
    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    error: str = ""


class CloseEpisode(Message, kw_only=True):
    episode: str


FromWorker = Hello | Ready | AdaptersCached | PullFailed | Heartbeat | Output | TicketRequest | OperationDone | Draining
ToWorker = (
    Welcome
    | HelloRejected
    | Generate
    | Abort
    | SwitchAdapter
    | PrefetchAdapters
    | ServeArtifact
    | TicketGrant
    | ForwardBackward
    | OptimStep
    | VersionCommitted
    | CancelOperation
    | EvictArtifacts
    | InitAdapter
)
FromHost = HostHello | HostHeartbeat | Prompts | Observation
ToHost = HostWelcome | HelloRejected | GetPrompts | Reset | StepEpisode | CloseEpisode

_encoder = msgspec.msgpack.Encoder()
from_worker = msgspec.msgpack.Decoder(FromWorker)
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_host = msgspec.msgpack.Decoder(FromHost)
to_host = msgspec.msgpack.Decoder(ToHost)
batches = msgspec.msgpack.Decoder(TrainingBatch)


def encode(message: Message | TrainingBatch) -> bytes:
    """The bytes of one frame."""
    return _encoder.encode(message)


T = TypeVar("T")


def decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    """The message in ``frame``; raises :class:`BadFrame` for anything else."""
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from None
