"""Adapters: PEFT reads what is written and gives the same logits, and the other way round; what is no LoRA is refused;
the loras serves many at once."""

from __future__ import annotations

import gc
import json
import math
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.tiny import divide, reference, small
from tests.worker.model.test_decoder import Causal

from rookery.errors import UserError
from rookery.tokenization.registry import BaseReference
from rookery.worker.model.adapter import PARTS, Adapter, init_adapter, read_adapter, write_adapter
from rookery.worker.model.config import SITES
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager, batched_matmul
from rookery.worker.trainer.optim import AdapterExport


def filled(decoder: Decoder, rank: int, seed: int, targets: list[str], rslora: bool = False) -> Adapter:
    fresh = init_adapter(decoder.config, rank, 24.0, targets, seed)
    generator = torch.Generator().manual_seed(seed)
    weights = {site: (a, torch.randn(b.shape, generator=generator) * 0.1) for site, (a, b) in fresh.weights.items()}
    return Adapter(rank, 24.0, weights, rslora)


def loras(decoder: Decoder, **adapters: Adapter) -> LoraManager:
    made = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    for key, adapter in adapters.items():
        made.add(key, adapter)
    return made


def logits(decoder: Decoder, keeper: LoraManager, key: str, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        lora = keeper.batch_product([key], [len(tokens)])
        hidden = decoder.forward(tokens, torch.arange(len(tokens)), Causal(decoder.config), lora)
        return decoder.compute_logits(hidden)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral window", "smollm3"])
@pytest.mark.parametrize(("rank", "targets", "rslora"), [(8, list(PARTS), False), (5, ["q", "v", "down"], True)])
def test_peft_gives_the_same_logits(tmp_path: Path, family: str, rank: int, targets: list[str], rslora: bool) -> None:
    decoder = small(family, torch.float32)
    adapter = filled(decoder, rank, 1, targets, rslora)
    write_adapter(tmp_path, adapter, "base")
    model = peft.PeftModel.from_pretrained(reference(family), tmp_path).eval()
    tokens = torch.randint(0, 211, (23,))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
        with model.disable_adapter():
            base = model(tokens[None]).logits[0]
    assert (expected - base).abs().max() > 0.5
    back = read_adapter(tmp_path, decoder.config)
    assert (back.rank, back.alpha, back.modules, back.rslora) == (rank, 24.0, adapter.modules, rslora)
    torch.testing.assert_close(logits(decoder, loras(decoder, x=back), "x", tokens), expected, atol=2e-4, rtol=1e-4)


def trained(**options: Any) -> peft.PeftModel:
    """A PEFT model with these options whose trainable weights have moved."""
    config = peft.LoraConfig(**{"r": 6, "lora_alpha": 12, "task_type": "CAUSAL_LM"} | options)
    model = peft.get_peft_model(reference("llama"), config).eval()
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
    return model


def same_as_peft(folder: Path) -> Adapter:
    """The adapter in ``folder``, which gives PEFT's logits. Raises ``UserError``."""
    decoder, tokens = small("llama", torch.float32), torch.arange(5, 22)
    adapter = read_adapter(folder, decoder.config)
    model = peft.PeftModel.from_pretrained(reference("llama"), folder).eval()
    with torch.no_grad():
        expected, base = model(tokens[None]).logits[0], reference("llama")(tokens[None]).logits[0]
    assert (expected - base).abs().max() > 0.1
    torch.testing.assert_close(logits(decoder, loras(decoder, x=adapter), "x", tokens), expected, atol=2e-4, rtol=1e-4)
    return adapter


LISTED = {"target_modules": ["q_proj", "down_proj"]}
PARTLY = {"layers_to_transform": [0, 2], "layers_pattern": "layers"}


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear", "init_lora_weights": False},
        {**LISTED, "use_rslora": True},
        {**LISTED, "init_lora_weights": "gaussian", "lora_dropout": 0.1},
        {**LISTED, "init_lora_weights": "orthogonal"},
        {**LISTED, "init_lora_weights": "mica"},
        {**LISTED, "fan_in_fan_out": True},
        {**LISTED, "ensure_weight_tying": True},
        {**LISTED, "lora_alpha": -3.5},
        {**LISTED, **PARTLY},
        {**LISTED, "layers_to_transform": 1},
        {"target_modules": r".*layers\.[02]\..*\.(q_proj|up_proj)", "exclude_modules": r".*\.2\..*q_proj"},
        {"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.up_proj"], "exclude_modules": ["mlp.down_proj"]},
        {**LISTED, "runtime_config": peft.LoraRuntimeConfig(ephemeral_gpu_offload=False), "megatron_core": "other"},
        {**LISTED, "qalora_group_size": 32, "task_type": None},
    ],
    ids=str,
)
def test_accepted_options_of_peft_give_its_logits(tmp_path: Path, options: dict[str, Any]) -> None:
    trained(**options).save_pretrained(tmp_path)
    same_as_peft(tmp_path)


def test_an_adapter_with_eva_gives_the_logits_of_peft(tmp_path: Path) -> None:
    """A real initialisation needs a data loader; the file differs by its options only."""
    trained(**LISTED).save_pretrained(tmp_path)
    change(tmp_path, init_lora_weights="eva", eva_config={"rho": 2.0, "tau": 0.99})
    same_as_peft(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"alora_invocation_tokens": [5, 6]},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}},
        {"lora_bias": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 2]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
    ],
    ids=str,
)
def test_other_options_of_peft_are_refused_by_name(tmp_path: Path, options: dict[str, Any]) -> None:
    """The error does not name the folder's path."""
    trained(**LISTED | options).save_pretrained(tmp_path)
    name = "embed_tokens|lm_head" if "target_modules" in options else next(iter(options))
    with pytest.raises(UserError, match=name) as refusal:
        read_adapter(tmp_path, small("llama").config)
    assert str(tmp_path) not in str(refusal.value)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_that_peft_converts_to_a_lora_are_accepted(tmp_path: Path, init: str, rslora: bool) -> None:
    model = peft.get_peft_model(
        reference("llama"), peft.LoraConfig(r=6, init_lora_weights=init, use_rslora=rslora, **LISTED)
    )
    model.save_pretrained(tmp_path / "initial")
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.05 * torch.randn(weight.shape)
    tokens = torch.arange(5, 22)
    with torch.no_grad():
        expected = model.eval()(tokens[None]).logits[0]
    model.save_pretrained(tmp_path / "made", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    adapter, decoder = same_as_peft(tmp_path / "made"), small("llama", torch.float32)
    torch.testing.assert_close(logits(decoder, loras(decoder, x=adapter), "x", tokens), expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"rank_pattern": {"q_proj": 2}}], ids=str)
def test_adapters_that_peft_extracts_as_a_lora_are_accepted(tmp_path: Path, options: dict[str, Any]) -> None:
    peft.save_as_lora(tmp_path, trained(**LISTED | options), rank=6)
    assert same_as_peft(tmp_path).rank == 6


def test_an_adapter_names_its_base_model_and_revision(tmp_path: Path) -> None:
    adapter = filled(small("llama", torch.float32), 4, 0, ["q"])
    AdapterExport(adapter, base=BaseReference("org/model", "c0ffee")).write(tmp_path)
    config = peft.PeftConfig.from_pretrained(tmp_path)
    assert (config.base_model_name_or_path, config.revision) == ("org/model", "c0ffee")


def change(folder: Path, **options: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def test_an_adapter_that_peft_would_complete_at_random_is_refused(tmp_path: Path) -> None:
    trained(target_modules=["q_proj"], init_lora_weights=False).save_pretrained(tmp_path)
    change(tmp_path, target_modules=["q_proj", "k_proj"])
    with pytest.raises(UserError, match="layer 0 k is in target_modules and has no weights"):
        read_adapter(tmp_path, small("llama").config)
    change(tmp_path, init_lora_weights=True)  # zero then
    same_as_peft(tmp_path)


def test_reading_adapters_keeps_no_memory(tmp_path: Path) -> None:
    model = small("llama").config
    write_adapter(tmp_path, init_adapter(model, 4, 8.0, PARTS, 0), "small")
    before, reads, tensors = 0, 100, 2 * len(PARTS) * model.layers
    for read in range(2 * reads):
        if read == reads:
            gc.collect()
            before = sys.getallocatedblocks()
        read_adapter(tmp_path, model)
    gc.collect()
    assert sys.getallocatedblocks() - before < reads * tensors / 4  # a leak has two for each tensor; threads have some


def test_version_zero_is_the_base_and_depends_on_its_seed() -> None:
    decoder = small("llama", torch.float32)
    tokens = torch.randint(0, 211, (9,))
    made = [init_adapter(decoder.config, 4, 8.0, ["q", "up"], seed) for seed in (0, 0, 1)]
    keeper = loras(decoder, a=made[0])
    assert torch.equal(logits(decoder, keeper, "a", tokens), logits(decoder, keeper, "", tokens))
    assert all(torch.equal(made[0].weights[site][0], made[1].weights[site][0]) for site in made[0].weights)
    assert not torch.equal(made[0].weights[0, "q"][0], made[2].weights[0, "q"][0])


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    decoder = small("llama", torch.float32)
    with pytest.raises(UserError, match=r"^adapter: adapter_config\.json is missing$"):
        read_adapter(tmp_path, decoder.config)
    write_adapter(tmp_path, filled(small("qwen3", torch.float32), 4, 0, list(PARTS)))
    with pytest.raises(UserError, match=r"layer 0 \w+ does not fit this base model: it is for 64 to \d+ features"):
        read_adapter(tmp_path, decoder.config)
    write_adapter(tmp_path, filled(decoder, 4, 0, list(PARTS)))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for old, new, match in (
        ("layers.2.", "layers.3.", "layer 3 .* does not have"),
        ("model.layers", "model.h", "no projection of this base model"),
        ("down_proj", "fc_proj", "no projection of this base model"),
    ):
        save_file({name.replace(old, new): w for name, w in tensors.items()}, tmp_path / "adapter_model.safetensors")
        change(tmp_path, target_modules="all-linear")
        with pytest.raises(UserError, match=match):
            read_adapter(tmp_path, decoder.config)
    for content in (b"no", b""):
        (tmp_path / "adapter_model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match="no safetensors file"):
            read_adapter(tmp_path, decoder.config)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize(
    "counts",
    [
        {"k3": 30, "k0": 3, "": 2, "k4": 3, "k1": 1},
        {"k0": 9, "k1": 9, "k2": 9},
        {"k0": 3, "k4": 2},
        {"k0": 14, "": 1, "k4": 9},
        {"k2": 11},
    ],
    ids=["one far larger", "even", "few", "uneven", "one"],
)
def test_many_adapters_of_different_ranks_in_one_batch(
    counts: dict[str, int], divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = small("llama", torch.float32)
    if divided:
        divide(monkeypatch, depth=24, rows=8)
    made = {f"k{i}": filled(decoder, rank, i, list(PARTS)[i % 3 :]) for i, rank in enumerate([3, 16, 20, 64, 8])}
    keeper = loras(decoder, **made)
    x, y = torch.randn(sum(counts.values()), 64), torch.randn(sum(counts.values()), 192)
    lora = keeper.batch_product(list(counts), list(counts.values()))
    assert lora is not None
    got = lora(1, "gate_up", x, y.clone())
    begin = 0
    for key, count in counts.items():
        rows = slice(begin, begin + count)
        begin += count
        expected = y[rows].clone()
        if key:
            for part, columns in (("gate", slice(0, 96)), ("up", slice(96, 192))):
                a, b = made[key].weights[1, part]
                expected[:, columns] += made[key].scale * x[rows] @ a.T @ b.T
        torch.testing.assert_close(got[rows], expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_in_use_stays_until_its_last_request_ends() -> None:
    decoder = small("llama")
    keeper = loras(decoder, a=filled(decoder, 4, 0, ["q"]))
    keeper.acquire("a")
    keeper.evict("a")
    assert "a" not in keeper and len(keeper) == 1
    keeper.release("a")
    assert len(keeper) == 0
    keeper.evict("a")
    with pytest.raises(UserError, match="max_rank 64"):
        keeper.add("b", filled(decoder, 65, 0, ["q"]))


def test_the_stack_follows_a_changing_set_of_adapters() -> None:
    decoder = small("llama", torch.float32)
    made = {f"k{i}": filled(decoder, 4 + 4 * i, i, list(PARTS)) for i in range(6)}
    keeper, x, y = loras(decoder, **made), torch.randn(12, 64), torch.zeros(12, 64)
    for turn in range(300):
        keys = [f"k{(turn // 40 + i) % 6}" for i in range(1 + turn % 3)]
        keeper.assign_slots(keys)
        keys.sort(key=keeper.slot_order)
        ends = torch.tensor(keeper.slot_ends(keys, [12 // len(keys)] * len(keys), 12), dtype=torch.int32)
        lora = keeper.grouped_product(ends, batched_matmul)
        got = lora(0, "o", x, y.clone())
        for i, key in enumerate(keys):
            rows = slice(12 // len(keys) * i, 12 // len(keys) * (i + 1))
            a, b = made[key].weights[0, "o"]
            torch.testing.assert_close(got[rows], made[key].scale * x[rows] @ a.T @ b.T, atol=1e-4, rtol=1e-4)
        if turn == 150:
            keeper.evict("k0")
            keeper.add("k0", made["k0"])


@pytest.mark.parametrize(
    "counts", [[58, 6], [20, 12, 32], [20, 9, 32, 3], [16, 16, 16, 16], [300, 5, 2], [7, 2], [9, 1, 2, 7, 2]]
)
@pytest.mark.parametrize(("site", "width"), [("o", 64), ("qkv", 128)])
@pytest.mark.parametrize("spoilt", [False, True])
def test_rows_get_the_same_bits_in_every_batch(counts: list[int], site: str, width: int, spoilt: bool) -> None:
    decoder = small("llama")
    made = {f"k{i}": filled(decoder, 16 - 8 * (i % 2), i, list(PARTS)) for i in range(len(counts))}
    alone = loras(decoder, **made)
    if spoilt:
        made["k1"].weights[0, SITES[site][0]][1][0, 0] = math.inf
    together = loras(decoder, **made)
    x, y = (torch.randn(sum(counts), size).to(decoder.dtype) for size in (64, width))
    for rest in (0, 3):  # the last rows may be the base model's
        keys, given = [*made, ""], [*counts[:-1], counts[-1] - min(rest, counts[-1] - 1), min(rest, counts[-1] - 1)]
        lora = together.batch_product(keys, given)
        assert lora is not None
        got = lora(0, site, x, y.clone())
        for i, (key, rows) in enumerate(zip(keys, torch.arange(len(x)).split(given), strict=True)):
            one = alone.batch_product([key], [max(len(rows), 2)])
            padded = [torch.cat((part[rows], part[:2]))[: max(len(rows), 2)] for part in (x, y)]
            expected = padded[1] if one is None else one(0, site, *padded)
            if i != 1 or not spoilt:
                assert torch.equal(got[rows], expected[: len(rows)]), key
            else:
                assert not got[rows].isfinite().all()
