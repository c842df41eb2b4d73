"""Views of episodes, of their groups and of a dry run, as every API returns them.

As in :mod:`rookery.controller.views`, the HTTP API uses the models as they are. A number that is not finite becomes
null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rookery.controller.views import BestConstantView

Prompt = Annotated[Any, Field(description="Null where it is not kept any more")]


class RowView(BaseModel):
    """Base of the views; it is built of the fields of a row or a struct, or of values."""

    model_config = ConfigDict(from_attributes=True)


class MessageView(RowView):
    """A chat message."""

    role: str
    content: str


class TrajectoryView(RowView):
    """One sequence. ``prompt`` precedes the first reply; the other lists have one entry per later token. Where ``mask``
    is false the token comes from the environment or the template: it has no loss, log-probability 0 and version -1."""

    prompt: list[int]
    tokens: list[int]
    mask: list[bool]
    logprobs: list[float]
    versions: list[int]


class MemberView(RowView):
    """An episode of a group. ``replies``, ``tokens`` and ``finish`` are present where one group is read."""

    episode: str
    member: int
    state: str
    version: int | None = Field(description="The oldest version among its tokens")
    policy: str = Field("", description="Whose reward and advantage these are, in a job with several policies")
    reward: float | None
    advantage: float | None = Field(description="As the job's algorithm computes it within the group")
    error: str
    finished: float | None
    replies: list[str] | None = Field(None, description="Empty where its text is not kept any more")
    speakers: list[str] | None = Field(None, description="The policy of each reply; empty in a job with one policy")
    tokens: int | None = Field(None, description="Sampled")
    finish: str | None = None
    metrics: dict[str, float | None] | None = None


class GroupView(RowView):
    """The episodes of one prompt."""

    group: str
    ordinal: int
    state: str
    reason: str = Field(description="Why it was dropped or failed")
    consumed_by: int | None = Field(description="The version that trained on it, with several policies the newest use")
    uses: dict[str, int] = Field({}, description="By policy, the version that trained on it, where several train")
    policy: str = Field("", description="Whose rewards and oldest version these are, in a job with several policies")
    min_version: int | None = Field(description="The oldest version among its tokens")
    created: float
    finished: float | None
    prompt: Prompt
    zero_variance: bool = Field(description="All rewards are equal: it carries no gradient")
    members: list[MemberView]


class GroupPage(RowView):
    groups: list[GroupView]
    total: int = Field(description="Groups on all pages")
    version: int | None = Field(description="The version that contains the step, where one is given")


class EpisodeLine(MemberView):
    """An episode in a list."""

    group: str
    ordinal: int = Field(description="The group's number in the job")
    consumed_by: int | None
    prompt: Prompt


class EpisodePage(RowView):
    episodes: list[EpisodeLine]
    next: str | None = Field(
        description="For ``before`` of the next page; null on the last one. A page of a search may be short, or empty, "
        "before the last one: it ends after a time"
    )
    reached: float | None = Field(description="The end of the oldest episode that was looked at; null on the last page")


class TurnView(RowView):
    """One reply and the environment's step after it."""

    reward: float | None
    metrics: dict[str, float | None]
    finish: str
    tokens: int
    queue_seconds: float
    generation_seconds: float
    environment_seconds: float
    workers: list[tuple[int, str]] = Field(description="Workers that sampled it, each with its first token's number")
    policy: str = Field("", description="The policy that replied")
    rewards: dict[str, float | None] = Field({}, description="Of single policies, in addition to ``reward``")
    trained: bool = Field(True, description="False for a call of an agent that is not trained on")
    message: int = Field(description="The place of the reply in ``messages``")
    follows: int | None = Field(
        None, description="The turn that an agent's call continues, where that is not the one before; -1: it begins a"
                          " conversation")  # fmt: skip


class TokenStrip(TrajectoryView):
    """The tokens of a trajectory. The texts are null where the tokenizer is not on the service's machine."""

    prompt_texts: list[str] | None
    texts: list[str] | None
    trainer_logprobs: list[float | None] | None = Field(
        description="Of the trainer at the step that consumed it; null where no gradient was computed"
    )
    workers: list[tuple[int, str]] = Field(description="Tokens at which another worker began, with its name")
    replies: list[tuple[int, int, str]] = Field(
        [], description="The tokens of each reply, from one to before another, and the policy that sampled them"
    )


class EpisodeReading(MemberView):
    """An episode whole."""

    group: str
    ordinal: int
    group_state: str
    consumed_by: int | None
    uses: dict[str, int] = Field({}, description="By policy, the version that trained on it, where several train")
    seed: int
    prompt: Prompt
    members: list[MemberView] = Field(description="All episodes of its group")
    messages: list[MessageView] | None
    turns: list[TurnView]
    trajectories: list[TokenStrip]
    seconds: dict[str, float] | None


class EpisodeView(RowView):
    """An episode that ended. ``messages``, ``trajectories`` and ``finish`` are present while its text is kept."""

    episode: str
    group: str
    ordinal: int = Field(description="The group's number in the job")
    group_state: str
    consumed_by: int | None = Field(description="The version that trained on it")
    prompt: Prompt
    state: str
    version: int | None
    reward: float | None
    metrics: dict[str, float | None]
    error: str
    finished: float | None
    messages: list[MessageView] | None = None
    trajectories: list[TrajectoryView] | None = None
    finish: Literal["done", "max_turns", "context"] | None = None
    seconds: dict[str, float] | None = Field(
        None, description="Time in the queue, in generation and in the environment"
    )


class FailureView(RowView):
    error: str
    episodes: int


class PromptView(RowView):
    messages: list[dict[str, str]]
    text: str = Field(description="The prompt as the chat template renders it")
    tokens: int


class DryRun(RowView):
    """A job with every default filled in, three of its prompts as the policy would read them, and by policy the reward
    of the best constant reply on the held-out prompts, without any on the first training prompts."""

    spec: dict[str, Any]
    warnings: list[str] = Field(description="Settings that are allowed and hardly meant, a line each")
    prompts: list[PromptView]
    constants: dict[str, BestConstantView]
