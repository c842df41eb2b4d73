"""PEFT folders without torch: every option of PEFT is judged, and the weights file is read as safetensors reads it."""

from __future__ import annotations

import dataclasses
import io
import json
import struct
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from safetensors.numpy import load, save
from tests.support.draws import examples

from rookery.errors import UserError
from rookery.spec.peft_folder import OPTIONS, PeftLora, check_finite, read_header, read_lora

LAYER = "base_model.model.model.layers"


def weights(modules: Mapping[str, tuple[int, int]], rank: int = 4, dtype: Any = np.float32) -> bytes:
    """A and B of each module by its (in, out) features."""
    tensors = {}
    for name, (inputs, outputs) in modules.items():
        tensors[f"{LAYER}.{name}.lora_A.weight"] = np.ones((rank, inputs), dtype)
        tensors[f"{LAYER}.{name}.lora_B.weight"] = np.ones((outputs, rank), dtype)
    return save(tensors)


Q = weights({"0.self_attn.q_proj": (8, 6)})
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def read(changes: Mapping[str, Any] = {}, content: bytes = Q) -> PeftLora:
    return read_lora(json.dumps({**CONFIG, **changes}).encode(), io.BytesIO(content), len(content))


def test_every_option_of_the_installed_peft_is_judged() -> None:
    assert {field.name for field in dataclasses.fields(LoraConfig)} - set(OPTIONS) == set()


def test_a_new_configuration_of_peft_is_accepted() -> None:
    written = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    options = {name: sorted(value) if isinstance(value, set) else value for name, value in written.items()}
    lora = read(options)
    assert (lora.rank, lora.alpha, lora.rslora, lora.prefix) == (4, 8, False, "model.layers")
    assert lora.shapes == {(0, "q"): (8, 6)} and lora.targets == ["q"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "corda"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "lora_ga"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "OLoRA"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "loftq"}, r"may change .*merge_and_unload"),
        ({"init_lora_weights": "of_tomorrow"}, "init_lora_weights"),
        ({"init_lora_weights": 1}, "init_lora_weights"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({"use_dora": True}, r"use_dora = true is not supported: convert it with peft\.save_as_lora"),
        ({"use_dora": "yes"}, "use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern .*save_as_lora"),
        ({"alpha_pattern": {"q_proj": 2}}, r"alpha_pattern .*save_as_lora"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save .*merge_and_unload"),
        ({"bias": "all"}, r"bias .*merge_and_unload"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"megatron_config": {}, "arrow_config": {"top_k": 1}}, "arrow_config"),
        ({"megatron_config": {"a": 1}}, "megatron_config"),
        ({"kasa_config": {"beta": 0.1}}, "kasa_config"),
        ({"velora_config": {"rank": 1}}, "velora_config"),
        ({"monteclora_config": {"n": 1}}, "monteclora_config"),
        ({"enable_lora": [True, False]}, "enable_lora"),
        ({"runtime_config": {"of_tomorrow": True}}, "runtime_config"),
        ({"of_tomorrow": True, "peft_version": "9.9"}, r"'of_tomorrow' \(of PEFT 9\.9\) is not known here"),
        ({"of_tomorrow": None}, "'of_tomorrow' is not known here"),
        ({"x" * 500: 1}, r"'x{77}\.\.\.'"),
        ({"peft_type": "IA3"}, r"IA3.*only LoRA"),
        ({"peft_type": "ADALORA"}, "only LoRA"),
        ({"r": 8}, "do not fit rank r = 8"),
        ({"r": True}, "the option r = true"),
        ({"r": 4.0}, r"the option r = 4\.0"),
        ({"r": 0}, "the option r = 0"),
        ({"r": "4"}, "the option r"),
        ({"lora_alpha": float("nan")}, "lora_alpha = NaN"),
        ({"lora_alpha": float("inf")}, "lora_alpha = Infinity"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha = null"),
        ({"lora_dropout": 2}, "lora_dropout"),
        ({"use_rslora": "no"}, "use_rslora"),
        ({"fan_in_fan_out": 1}, "fan_in_fan_out"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": ["k_proj"]}, "PEFT would ignore"),
        ({"target_modules": []}, "PEFT would ignore"),
        ({"target_modules": "k_proj"}, "PEFT would ignore"),
        ({"target_modules": ["proj"]}, "PEFT would ignore"),
        ({"target_modules": [["q_proj"]]}, "target_modules"),
        ({"target_modules": "(a"}, "not a pattern that is supported"),
        ({"target_modules": ".{1,9}"}, "not a pattern that is supported"),
        ({"target_modules": "." * 2000}, "not a pattern that is supported"),
        ({"target_modules": r"(?V1)[[a-z]--[q]]*"}, "not a pattern that is supported"),
        ({"exclude_modules": ["q_proj"]}, "PEFT would ignore"),
        ({"exclude_modules": r".*\.q_proj"}, "PEFT would ignore"),
        ({"layers_to_transform": [1]}, "PEFT would ignore"),
        ({"layers_to_transform": 1}, "PEFT would ignore"),
        ({"layers_to_transform": [0.0]}, "layers_to_transform"),
        ({"layers_to_transform": [0], "layers_pattern": "h"}, "PEFT would ignore"),
        ({"layers_to_transform": [0], "layers_pattern": "(layers|h)"}, "layers_pattern"),
    ],
    ids=str,
)
def test_an_option_that_is_not_known_to_mean_a_lora_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as refusal:
        read(changes)
    assert "\n" not in str(refusal.value) and str(refusal.value).startswith("adapter: ")
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "gaussian", "eva_config": None},
        {"target_modules": ["model.layers.0.self_attn.q_proj"], "layers_to_transform": [7]},  # as PEFT reads it
        {"target_modules": ["self_attn.q_proj", "v_proj"], "exclude_modules": ["v_proj"]},
        {"target_modules": r".*\.self_attn\.(q|k|v)_proj"},
        {"target_modules": "all-linear"},
        {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {"layers_to_transform": 0, "layers_pattern": ["h", "layers"]},
        {"layers_to_transform": []},
        {"exclude_modules": []},
        {"merge_weights": False, "enable_lora": None, "auto_mapping": {"base_model_class": "x"}},
        {"rank_pattern": {}, "alpha_pattern": None, "modules_to_save": [], "bias": "none"},
    ],
    ids=str,
)
def test_options_that_change_nothing_are_accepted(changes: dict[str, Any]) -> None:
    assert read(changes).shapes == {(0, "q"): (8, 6)}


def test_a_pattern_that_takes_exponential_time_is_refused_within_a_second_or_two() -> None:
    content = weights({f"{layer}.{'a' * 60}.q_proj": (8, 6) for layer in range(50)})
    began = time.thread_time()
    with pytest.raises(UserError, match="takes too long"):
        read({"target_modules": r"(?:[.\w]|a|aa)*q_proj."}, content)
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (b"", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "has no peft_type"),
        (b'{"peft_type": "LORA"}', "has no r;"),
        (b"\xff", "not JSON"),
        (b" " * ((1 << 20) + 1), "larger than"),
    ],
)
def test_a_configuration_that_is_none_is_refused(config: bytes, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_lora(config, io.BytesIO(Q), len(Q))


def tensors(**named: np.ndarray[Any, Any]) -> bytes:
    return save({name.replace("__", "."): array for name, array in named.items()})


A, B = np.ones((4, 8), np.float32), np.ones((6, 4), np.float32)
NAME = f"{LAYER}.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (save({}), "holds no weights"),
        (save({f"{NAME}.lora_A.weight": A}), "has no lora_B"),
        (save({f"{NAME}.lora_B.weight": B}), "has no lora_A"),
        (save({f"{NAME}.lora_A.weight": A, f"{NAME}.lora_B.weight": B.T.copy()}), "do not fit rank r = 4"),
        (save({f"{NAME}.lora_A.weight": A[0], f"{NAME}.lora_B.weight": B}), "do not fit rank r = 4"),
        (save({f"{NAME}.lora_A.default.weight": A, f"{NAME}.lora_B.default.weight": B}), "is no LoRA"),
        (save({f"{NAME}.lora_A.weight"[17:]: A, f"{NAME}.lora_B.weight"[17:]: B}), "is no LoRA"),
        (save({f"{NAME}.lora_magnitude_vector": A}), "is no LoRA"),
        (save({f"{NAME}.weight": A}), "is no LoRA"),
        (save({"base_model.model.lm_head.lora_A.weight": A}), "is no LoRA"),
        (weights({"0.q": (8, 6)}), "is no LoRA"),
        (weights({"00.self_attn.q_proj": (8, 6)}), "is no LoRA"),
        (weights({"0." + "x" * 600 + ".q_proj": (8, 6)}), "is no LoRA"),
        (weights({"0.self_attn.q_proj": (0, 6)}), "do not fit"),
        (weights({"0.self_attn.q_proj": (8, 6)}, dtype=np.int32), "is of type I32"),
        (Q + weights({}), "safetensors"),
        (
            save({**load(Q), **{name.replace("model.layers", "h"): array for name, array in load(Q).items()}}),
            "in 2 lists",
        ),
    ],
)
def test_weights_that_are_no_lora_are_refused(content: bytes, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(content=content)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("bits", ["nan", "inf", "-inf", "largest"])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(dtype: str, bits: str) -> None:
    """In the last of more numbers than are scanned at once."""
    size = {"F64": 8, "F32": 4}.get(dtype, 2)
    patterns = {
        "F64": (0x7FF8 << 48, 0x7FF << 52, 0xFFF << 52, 0x47EFFFFFE0000000),
        "F32": (0x7FC00001, 0x7F800000, 0xFF800000, 0x7F7FFFFF),
        "F16": (0x7E00, 0x7C00, 0xFC00, 0x7BFF),
        "BF16": (0x7FC0, 0x7F80, 0xFF80, 0x7F7F),
    }[dtype]
    number = patterns[["nan", "inf", "-inf", "largest"].index(bits)]
    count = 700_000
    data = bytes(size * (count - 1)) + number.to_bytes(size, "little")
    header = json.dumps({"x": {"dtype": dtype, "shape": [count], "data_offsets": [0, len(data)]}}).encode()
    content = struct.pack("<Q", len(header)) + header + data
    if bits == "largest":
        check_finite(io.BytesIO(content), len(content))
    else:
        with pytest.raises(UserError, match="'x' has a number that is NaN or infinite"):
            check_finite(io.BytesIO(content), len(content))


def test_a_number_that_is_infinite_in_float32_is_refused() -> None:
    content = save({"x": np.array([1e300])})
    with pytest.raises(UserError, match="NaN or infinite"):
        check_finite(io.BytesIO(content), len(content))


HEADERS = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 64) | st.sampled_from(["F32", "BF16", "x", "__metadata__"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "b", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)
ENTRIES = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__"]),
    st.fixed_dictionaries({
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F9"]),
        "shape": st.lists(st.integers(0, 3), max_size=2),
        "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2),
    })
    | HEADERS,
    max_size=2,
)  # fmt: skip


@settings(max_examples=examples(400), deadline=None)
@given(header=ENTRIES | HEADERS, data=st.integers(0, 24), shift=st.integers(-2, 2), cut=st.integers(0, 12))
def test_a_file_that_is_accepted_is_one_for_safetensors(header: Any, data: int, shift: int, cut: int) -> None:
    raw = json.dumps(header).encode()
    content = struct.pack("<Q", max(0, len(raw) + shift)) + raw + bytes(data)
    content = content[: len(content) - cut] if shift == 2 else content
    try:
        entries = read_header(io.BytesIO(content), len(content))
    except UserError as refusal:
        assert "\n" not in str(refusal)
        return
    if all(entry.dtype in ("F32", "BF16") for entry in entries.values()):
        found = safetensors.deserialize(content)
        assert {name: tuple(about["shape"]) for name, about in found} == {n: e.shape for n, e in entries.items()}


@given(sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4), rank=st.integers(1, 5))
@settings(deadline=None)
def test_the_shapes_of_every_module_are_read(sizes: list[tuple[int, int]], rank: int) -> None:
    modules = {f"{layer}.self_attn.q_proj": size for layer, size in enumerate(sizes)}
    lora = read({"r": rank}, weights(modules, rank))
    assert lora.shapes == {(layer, "q"): size for layer, size in enumerate(sizes)}
