"""The GPU's benchmark, as far as a machine without one can tell: its checks hold for what is right and fail for what is
wrong, its scripts run on a tiny model, its arithmetic is that of the models."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers
from benchmarks.lib import ages, report
from benchmarks.lib.harness import HERE, RESULTS, Result, Row, Verdict
from benchmarks.micro import gpu, gpu_check, gpu_models, gpu_peers
from torch import Tensor

from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.varlen_attention import KeyRanges
from rookery.worker.model.varlen_attention import range_attention as whole

pytestmark = pytest.mark.heavy


TINY = {
    **gpu_models.SHAPES["Qwen3-0.6B"],
    "vocab_size": 1200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


CPU = torch.device("cpu")
SMALL = gpu.Load(rows=(8,), prompt=12, new_tokens=5, sequences=4, length=20)
"""Work that a CPU can do in a GPU's place."""


def test_without_a_gpu_it_reports_that_and_writes_nothing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    before = (RESULTS / "gpu.json").exists()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.micro.gpu"], cwd=HERE.parent, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "GPU: not measured here, PyTorch sees no CUDA device\n"
    assert (RESULTS / "gpu.json").exists() == before


def test_the_page_names_the_missing_gpu_and_the_machine_of_each_line(tmp_path: Path) -> None:
    about = {"machine": "another machine", "date": "2026-11-25", "commit": "0123abc"}
    other = Result("small", "Small", "measure it", **about)  # type: ignore[arg-type]
    other.rows.append(Row("a step", [2.0], "s"))
    other.verdicts.append(Verdict("a step < 3 s", "2 s", True))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "small.json").write_text(json.dumps(asdict(other)))
    found, others = report.read_folder(tmp_path)
    text = ages.unmarked(report.page([*found, *others], {}, tmp_path))
    assert "| any GPU | `make bench-gpu` |" in text and "| A | another machine |" in text
    assert "| [small](results/other/small.json) | a step < 3 s | 2 s | met | 2026-11-25, 0123abc, A |" in text


def test_right_results_pass_and_wrong_ones_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dict([next(iter(gpu_check.MODELS.items()))])
    good = gpu_check.checks(CPU, torch.float32, one)
    assert len(good) == 12 and all(check.holds for check in good)
    assert max(check.value / check.most for check in good) < 0.01, "float32 is far within what bfloat16 may differ"

    def short(q: Tensor, k: Tensor, v: Tensor, seen: KeyRanges) -> tuple[Tensor, Tensor]:
        return whole(q, k, v, KeyRanges(seen.starts, (seen.lengths - 1).clamp(min=0), seen.max_length))

    monkeypatch.setattr("rookery.worker.engine.native.cuda.graph_runner.range_attention", short)
    bad = {check.what: check.holds for check in gpu_check.checks(CPU, torch.float32, one, requests=4)}
    assert not bad["qwen3: share of tokens unlike the CPU's, float32"]
    assert not bad["qwen3: the same, largest"]
    assert bad["qwen3: gradient, norm of the difference over the norm"]
    assert not gpu_check.Check("", float("nan"), 1.0).holds


def test_generation_and_training_of_a_tiny_model() -> None:
    config = DecoderConfig.from_hf(TINY)
    decoder = Decoder(config, gpu_models.random_weights(config, CPU, torch.float32))
    generation = gpu.Generation(decoder, SMALL, 1 << 24)
    for adapters in (0, 4):
        assert generation.run(8, adapters)[0] == 8 * 5
        assert generation.step_seconds > 0
    assert generation.run(8, 0, prompts=8)[0] == 8 * 5
    run = gpu.trained(decoder, 4, SMALL)
    for _ in range(2):
        assert run()[0] == 4 * 20


def test_peers_on_a_tiny_model() -> None:
    tokens, _ = gpu_peers.generator(gpu_peers.base(TINY, CPU), [[1, 2, 3]] * 2, 4)()
    assert tokens == 8
    tokens, _ = gpu_peers.tuner(gpu_peers.base(TINY, CPU), [[1, 2, 3]] * 5, 4, 2)()
    assert tokens == 15


def test_a_part_that_does_not_run_is_noted_and_the_rest_continues() -> None:
    result = Result("gpu", "", "")

    def missing() -> object:
        raise ModuleNotFoundError("No module named 'peft'")

    assert gpu.Budget(result, 1.0).measure("PEFT", missing) == []  # type: ignore[arg-type]
    assert result.notes == ["PEFT did not run: ModuleNotFoundError: No module named 'peft'"]
    assert len(gpu.Budget(result, 1.0).measure("ours", lambda: lambda: (1, 1.0))) == gpu.REPEATS
    assert gpu.Budget(result, 0.0).measure("late", lambda: lambda: (1, 1.0)) == []
    assert "no time was left" in result.notes[-1]


def test_a_model_that_does_not_fit_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*of: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "random_weights", too_large)
    result = Result("gpu", "", "")
    roof = gpu_models.Roof(1.0, 1.0, "")
    gpu._ours(result, gpu.Budget(result, 1.0), roof, "Qwen3-0.6B", list(gpu.PART_NAMES), CPU)
    assert result.notes == ["Qwen3-0.6B, Rookery did not run: OutOfMemoryError: CUDA out of memory"]
    assert result.rows == []


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-0.6B", 0.596), ("Qwen3-1.7B", 1.72), ("Qwen3-8B", 7.57)])
def test_operations_are_counted_from_the_weights(name: str, billions: float) -> None:
    raw = gpu_models.SHAPES[name]
    config = DecoderConfig.from_hf(raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert gpu_models.linear_numbers(config) == linear == pytest.approx(billions * 1e9, rel=0.01)
    flops, moved = gpu_models.decode_work(config, 1, 0, 0, 16, 0)
    assert (flops, moved) == (2 * linear, 2 * linear)
    each = 2 * 2 * config.layers * 8 * 128
    assert gpu_models.decode_work(config, 3, 100, 300, 16, 0)[1] - moved == 300 * each
    shared = gpu_models.decode_work(config, 3, 100, 120, 16, 0)  # 90 of the 100 are a prompt that all have
    assert shared[1] - moved == 120 * each and shared[0] == gpu_models.decode_work(config, 3, 100, 300, 16, 0)[0]
    lora = gpu_models.lora_numbers(config, 16)
    assert gpu_models.decode_work(config, 1, 0, 0, 16, 4)[1] - moved == 4 * 2 * lora
    assert gpu_models.training_work(config, 10, 0, 16) == 10 * (4 * linear + 6 * lora)


def test_the_roofline_is_that_of_the_device_or_probed() -> None:
    def never() -> tuple[float, float]:
        raise AssertionError("a known device is not probed")

    assert gpu_models.roof("NVIDIA H200", never).bytes == 4.8e12
    assert gpu_models.roof("NVIDIA H100 80GB HBM3", never).flops == 989e12
    assert gpu_models.roof("NVIDIA H100 PCIe", never).flops == 756e12
    assert gpu_models.roof("NVIDIA A100-SXM4-40GB", never).bytes == 1.555e12
    other = gpu_models.roof("NVIDIA L4", lambda: (1e14, 3e11))
    assert other.flops == 1e14 and "measured" in other.source
    assert other.seconds(1e14, 3e11) == 1.0 and other.seconds(1e14, 6e11) == 2.0
