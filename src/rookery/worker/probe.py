"""Whether transformers' model of a family computes here as it was published: tried on a few tokens when it is loaded.

transformers has about 190 families of causal language models, and a new one may attend, route or cache in a way that
the engine's and the trainer's streams of tokens do not follow. So a loaded model generates a few tokens and computes
one gradient with a LoRA. A model whose pass fails, or whose logits differ from those of its own code, is refused in one
line; the refusal is kept with the prepared model for as long as the same versions of the packages are installed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rookery import protocol
from rookery.errors import RookeryError, UserError, short
from rookery.tokenization import registry
from rookery.worker.engine.runner import Runner
from rookery.worker.engine.sequences import SequenceChunk
from rookery.worker.memory import NoRoom
from rookery.worker.model.adapter import PARTS, Adapter, init_adapter
from rookery.worker.model.lora import LoraManager
from rookery.worker.model.transformers_model import TransformersModel
from rookery.worker.trainer.hf.trainer import TransformersBackbone
from rookery.worker.trainer.optim import AdapterExport, PolicyState
from rookery.worker.trainer.packed_pass import PolicyRows
from rookery.worker.trainer.packing import PackedGroup, pack_groups

log = logging.getLogger("rookery.worker")

PROMPT, TAIL, DECODED = 7, 8, 4
"""Tokens of the tried sequences: a prompt that two tails share, and the last of a tail that are decoded one by one."""

LARGEST_ERROR = {torch.float32: 1e-2, torch.bfloat16: 0.15, torch.float16: 0.15}
"""Difference of the logits from those of the model's own code, as a share of their size. The order of sums gives 1e-6
in float32 and a hundredth in 16 bits, more where a rounded router chooses another expert."""

_KEY = "probe"


class Unfaithful(Exception):
    """The model computes, and gives something else."""


@contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """Within, a failure of the model in the prepared ``folder`` is raised as ``UserError`` of one line, and recorded. A
    lack of memory and a device's failure are raised as they are."""
    try:
        yield
    except (RookeryError, NoRoom, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        log.info("the model cannot be computed", exc_info=error)
        text = " ".join(str(error).split()) or type(error).__name__
        kind = "" if isinstance(error, Unfaithful) else f"{type(error).__name__}: "
        reason = (
            f"base_model: {registry.base_reference(folder).name} cannot be trained here, for transformers' model of its"
            f" family does not compute in Rookery's passes ({kind}{short(text)}); choose a model of another family"
        )
        registry.record_refusal(folder, reason)
        raise UserError(reason) from error


def try_engine(model: TransformersModel, runner: Runner, loras: LoraManager) -> None:
    """A prompt, a text after it and another one after a copy of it, with the base model and a LoRA. Raises whatever
    fails, :class:`Unfaithful` for other logits than those of the model's own code, and for a LoRA that changes none."""
    prompt, tails = _tokens(model)
    loras.add(_KEY, _adapter(model, scale=1.0))
    try:
        base = [_generate(model, runner, "", prompt, tail) for tail in tails]
        for logits, tail in zip(base, tails, strict=True):
            expected = _own_logits(model, prompt + tail)[-TAIL:]
            for part in (slice(None, -DECODED), slice(-DECODED, None)):
                _compare(logits[part], expected[part])
        for logits, tail in zip(base, tails, strict=True):
            changed = _generate(model, runner, _KEY, prompt, tail)
            if not changed.isfinite().all():
                raise Unfaithful("a LoRA makes its logits NaN or infinite")
            if torch.equal(changed, logits):
                raise Unfaithful("a LoRA does not change its logits")
    finally:
        loras.evict(_KEY)


def _generate(model: TransformersModel, runner: Runner, key: str, prompt: list[int], tail: list[int]) -> Tensor:
    """Logits after each token of the tail [tail, vocab]: the last ``DECODED`` one by one, those before at once."""
    shared, slot = runner.store.allocate(len(prompt)), runner.store.allocate(len(tail))
    assert shared is not None and slot is not None  # of a store that is empty
    try:
        runner.prepare_adapters([key])
        with torch.no_grad():
            runner.prefill([SequenceChunk(key, prompt, 0, shared)])
            filled = len(tail) - DECODED
            hidden, _ = runner.prefill([SequenceChunk(key, tail[:filled], 0, slot, shared, len(prompt))])
            logits = [model.compute_logits(hidden[:filled])]
            for at in range(filled, len(tail)):
                step = SequenceChunk(key, tail[at : at + 1], at, slot, shared, len(prompt))
                logits.append(runner.decode([step])[:1].clone())
            return torch.cat(logits)
    finally:
        runner.store.free(slot)
        runner.store.free(shared)


def try_trainer(model: TransformersModel, backbone: TransformersBackbone) -> None:
    """One forward and one backward pass of two texts after one prompt, with a LoRA of every projection, layers kept and
    recomputed. Raises as :func:`try_engine`, also where the gradient is none."""
    prompt, tails = _tokens(model)
    ones = [1.0] * TAIL
    members = [protocol.GroupMember(tokens=tail, logprobs=ones, advantages=ones, weights=ones) for tail in tails]
    group = protocol.SharedPrefixGroup(prompt=prompt, members=members)
    batch = pack_groups([PackedGroup.from_group(group)], model.device)
    rows = sorted(start for pack in batch.packs if pack.prefix for start, _ in pack.tails)
    hidden = backbone.infer(batch, [])
    for tail, start in zip(tails, rows, strict=True):
        taken = torch.cat([hidden[: len(prompt)], hidden[start : start + len(tail) - 1]])
        _compare(_logits(model, taken), _own_logits(model, [*prompt, *tail[:-1]]))
    state = PolicyState(AdapterExport(_adapter(model, scale=0.1)), model.projections, model.dtype, model.device)
    policies = [PolicyRows(0, len(batch.tokens), state)]
    for recompute in (False, True):
        state.gradient.zero_()
        passed = backbone.forward(batch, policies, recompute=recompute)
        scores = backbone.logprobs(passed.hidden[batch.sources], batch.targets, None, derivatives=True)
        assert scores.slopes is not None
        d_hidden = torch.zeros_like(passed.hidden, dtype=scores.slopes.dtype)
        d_hidden.index_add_(0, batch.sources, scores.slopes)
        passed.backward(d_hidden.to(model.dtype))
        if not state.gradient.isfinite().all() or not state.gradient.any():
            raise Unfaithful("the gradient of a LoRA is not finite, or 0")


def _tokens(model: TransformersModel) -> tuple[list[int], list[list[int]]]:
    """A prompt and two tails."""
    tokens = [(7919 * i + 17) % model.vocab for i in range(1, PROMPT + 2 * TAIL + 1)]
    return tokens[:PROMPT], [tokens[PROMPT : PROMPT + TAIL], tokens[PROMPT + TAIL :]]


def _adapter(model: TransformersModel, scale: float) -> Adapter:
    """An adapter of rank 2, of every projection, with a random B."""
    adapter = init_adapter(model.projections, 2, 2 * scale, PARTS, 0)
    generator = torch.Generator().manual_seed(0)
    for _, b in adapter.weights.values():
        b.copy_(torch.randn(b.shape, generator=generator) * 0.05)
    return adapter


def _logits(model: TransformersModel, hidden: Tensor) -> Tensor:
    with torch.no_grad(), model.adapted(None, 0):
        return model.compute_logits(hidden)


def _own_logits(model: TransformersModel, tokens: list[int]) -> Tensor:
    """The logits of the code that the model came with, attention and all [tokens, vocab]."""
    with torch.no_grad(), model.as_published():
        return model.model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0]


def _compare(found: Tensor, expected: Tensor) -> None:
    """Raises :class:`Unfaithful`. In 16 bits half of the tokens may differ: a rounded router chooses another expert for
    them."""
    largest, exact = LARGEST_ERROR[found.dtype], found.dtype == torch.float32
    found, expected = found.float(), expected.float()
    errors = (found - expected).norm(dim=-1) / (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    error = (errors.max() if exact else errors.quantile(0.5)).item()
    if not error <= largest:  # NaN is not
        raise Unfaithful(f"its logits differ by {error:.0%} of their size from those of its own code")
