"""The inputs of a GPU, checked without one: the GPU's runner and the trainer's passes run on a device that computes
nothing, on which every tensor has a shape, a type and a place but no numbers.

Whatever would mix devices fails there, as does a kernel that does not take its arguments' shapes, types or strides, and
anything that asks the device for a number: a recorded step could not hold it. What the kernels compute is not seen.

The device is registered for good, so all families run in a separate process, which is this file's ``main``.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.tiny import reference
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from rookery.worker.engine.native.cuda.graph_runner import CudaGraphRunner
from rookery.worker.engine.native.runner import DenseRunner
from rookery.worker.engine.sequences import SequenceChunk
from rookery.worker.model import varlen_attention
from rookery.worker.model.adapter import init_adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import GroupedMatmul, LoraManager, batched_matmul, grouped_matmul
from rookery.worker.model.published import fuse
from rookery.worker.trainer.loss_head import token_logprobs
from rookery.worker.trainer.native.attention import VarlenAttention
from rookery.worker.trainer.native.backbone import ForwardPass
from rookery.worker.trainer.optim import AdapterExport, PolicyState
from rookery.worker.trainer.packed_pass import PackedLora, PolicyRows
from rookery.worker.trainer.packing import LossToken, LossTokens, PackedGroup, pack_groups

pytestmark = pytest.mark.heavy

DTYPE = torch.bfloat16
EVERY = ["q", "k", "v", "o", "gate", "up", "down"]
ROOT = Path(__file__).parents[3]
DONE = "the host's numbers and the device's never met"


def test_nothing_is_asked_of_the_device() -> None:
    """Over 10 s: four families generate with two products and train."""
    command = [sys.executable, "-m", "tests.worker.engine.test_cuda_nan", "qwen3", "mistral window", "llama biased"]
    command.append("smollm3")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert DONE in done.stdout, done.stderr[-3000:]


def main(families: list[str]) -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("numberless")
    torch._C._set_only_lift_cpu_tensors(True)  # tensors of lists are made on the host and sent, as on a real device
    varlen_attention.has_fused_kernels = lambda q: True
    for family in families:
        check(family)


def check(family: str) -> None:
    model = reference(family)
    # a GPU's table of rotations is whole from the start
    config = replace(DecoderConfig.from_hf(model.config.to_dict()), context=512)
    weights = fuse(config, {name: weight.detach() for name, weight in model.state_dict().items()})
    device = torch.device("numberless", 0)
    with FakeTensorMode():
        decoder, wide = (
            Decoder(config, {name: torch.empty(w.shape, dtype=dtype, device=device) for name, w in weights.items()})
            for dtype in (DTYPE, torch.float32)
        )
        _device_has_no_numbers(device)
        for product in (grouped_matmul, batched_matmul):
            _generates(decoder, product)
        _trains(decoder)
        _generates_as_a_cpu_does(wide)


def _device_has_no_numbers(device: torch.device) -> None:
    """Or everything else here would pass whatever it did."""
    number = torch.zeros(1, device=device)
    with pytest.raises(DataDependentOutputException):
        float(number)
    with pytest.raises(Exception, match="device"):
        number + torch.zeros(1)


def _generates(decoder: Decoder, product: GroupedMatmul) -> None:
    """A slice of prefill after a shared prompt (where it is one product: the other way begins with numbers of the
    host), then decode steps with the shared prompt and without. On a device that is no GPU they run unrecorded."""
    loras = _loras(decoder)
    runner = CudaGraphRunner(decoder, loras, 1 << 20, product)
    runner.prepare_adapters(["0", "1", "2"])
    prompt = runner.store.allocate(20)
    keys = [*sorted(["0", "1", "2", "0"], key=loras.slot_order), ""]
    with torch.no_grad():
        for shared in (prompt, None):
            length = 20 if shared is not None else 0
            streams = [SequenceChunk(key, [1, 2, 3], 0, runner.store.allocate(64), shared, length) for key in keys]
            if product is grouped_matmul:
                hidden, last = runner.prefill(streams)
                assert (hidden.shape, last.shape) == ((3 * len(keys), decoder.config.hidden), (len(keys),))
            for stream in streams:
                stream.tokens, stream.start = [4], 3
            logits = runner.decode(streams)
            assert (len(logits) >= len(keys), logits.device, logits.dtype) == (True, decoder.device, DTYPE)


def _generates_as_a_cpu_does(decoder: Decoder) -> None:
    """The work of a GPU without fused kernels: prefill after a shared prompt, and decode steps of rows in any order."""
    loras = _loras(decoder)
    runner = DenseRunner(decoder, loras, 1 << 24)
    prompt = runner.store.allocate(20)
    keys = ["0", "1", "2", "0", ""]
    with torch.no_grad():
        for shared in (prompt, None):
            length = 20 if shared is not None else 0
            streams = [
                SequenceChunk(key, [1, 2, 3], 0, runner.store.allocate(64), shared, length) for key in sorted(keys)
            ]
            hidden, last = runner.prefill(streams)
            assert (hidden.shape, last.shape) == ((3 * len(keys), decoder.config.hidden), (len(keys),))
            for stream in streams:
                stream.tokens, stream.start = [4], 3
            logits = runner.decode(streams)
            assert (len(logits), logits.device, logits.dtype) == (len(keys), decoder.device, decoder.dtype)


def _loras(decoder: Decoder) -> LoraManager:
    """With three adapters of unlike rank."""
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    FakeTensor.__bool__ = lambda self: True  # that an adapter is finite is asked when it comes, not when it is used
    for seed, rank in enumerate((4, 16, 32)):
        loras.add(str(seed), init_adapter(decoder.config, rank, 2.0 * rank, EVERY, seed))
    del FakeTensor.__bool__
    return loras


def _trains(decoder: Decoder) -> None:
    """A packed pass of two policies forward and back, its layers kept and computed twice."""
    some, all_of_them = (
        PolicyState(
            AdapterExport(init_adapter(decoder.config, rank, 16.0, sites, rank)), decoder.config, DTYPE, decoder.device
        )
        for rank, sites in ((8, ["q", "v", "o", "down"]), (16, EVERY))
    )
    stream = pack_groups([_unit(7, [5, 9, 1]), _unit(1, [12]), _unit(11, [7, 2])], decoder.device)
    (first, _), (_, second), (third, end) = stream.row_ranges
    for recompute in (False, True):
        lora = PackedLora([PolicyRows(first, second, some), PolicyRows(third, end, all_of_them)])
        attend = VarlenAttention(decoder, stream)
        passed = ForwardPass(decoder, stream, attend, lora, recompute=recompute)
        scores = token_logprobs(decoder, passed.hidden[stream.sources], stream.targets, None, derivatives=True)
        assert scores.slopes is not None
        back = torch.zeros(passed.hidden.shape, dtype=scores.slopes.dtype, device=decoder.device)
        passed.backward(back.index_add_(0, stream.sources, scores.slopes).to(DTYPE))


def _unit(prompt: int, tails: list[int]) -> PackedGroup:
    rng, total = random.Random(prompt), prompt + sum(tails)
    return PackedGroup(
        prompt=[rng.randrange(200) for _ in range(prompt)],
        tails=[[rng.randrange(200) for _ in range(n)] for n in tails],
        loss=LossTokens.of([LossToken(total - 1, 1, 0.0, 1.0, 1.0)]),
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
    print(DONE, flush=True)
    os._exit(0)  # the device's registration does not always survive the interpreter's end
