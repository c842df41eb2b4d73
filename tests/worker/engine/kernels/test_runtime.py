"""Kernels raise instead of reading a wrong address; their code is compiled once for all processes, and a machine that
cannot run them gets a reason."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests.support.disks import small_files

from rookery.worker.engine.native.kernels import runtime


@pytest.mark.parametrize(
    ("tensor", "shape", "reason"),
    [
        (torch.zeros(2, 16, dtype=torch.bfloat16), (2, 16), r"torch.float32 \(2, 16\)"),
        (torch.zeros(2, 16), (3, 16), r"torch.float32 \(3, 16\)"),
        (torch.zeros(16, 2).t(), (2, 16), "contiguous"),
        (torch.zeros(2, 16, device="meta"), (2, 16), "on cpu"),
    ],
)
def test_wrong_tensor_raises(tensor: torch.Tensor, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        runtime.Arguments().tensor(tensor, torch.float32, *shape)


def test_wrong_numbers_and_rows_raise() -> None:
    with pytest.raises(ValueError, match="-1"):
        runtime.Arguments().number(-1)
    runtime.check_rows(3, 5, 8)
    for first, count in ((4, 5), (-1, 2), (0, -1)):
        with pytest.raises(ValueError, match="8 rows"):
            runtime.check_rows(first, count, 8)


@pytest.mark.parametrize(
    ("system", "processor", "vectors", "numba", "named"),
    [
        ("linux", "x86_64", "AVX2", True, ""),
        ("linux", "AMD64", "AVX512", True, ""),
        ("linux", "x86_64", "AVX2", False, "numba"),
        ("linux", "x86_64", "DEFAULT", False, "AVX2"),
        ("linux", "aarch64", "AVX2", True, "aarch64"),
        ("darwin", "x86_64", "AVX2", True, "darwin"),
    ],
)
def test_reasons_name_the_missing_part(system: str, processor: str, vectors: str, numba: bool, named: str) -> None:
    reason = runtime.missing_part(system, processor, vectors, numba=numba)
    assert named in reason if named else reason == ""


KERNEL = """
import logging, sys
from pathlib import Path
from rookery.worker.engine.native.kernels import runtime, vec

def write(args: int) -> None:
    if vec.fetch_increment(args, 0) == 0:
        vec.write_int(vec.read_int(args, 2), 0, 7)

if __name__ == "__main__":
    import torch
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    kernel, out = runtime.Kernel(write), torch.zeros(1, dtype=torch.int64)
    runtime.load([kernel], Path(sys.argv[1]))
    kernel(runtime.Arguments().tensor(out, torch.int64, 1))
    print("result", out.item(), kernel._compiled.cache_hits, file=sys.stderr)
"""


@pytest.mark.skipif(bool(runtime.why_unavailable()), reason=runtime.why_unavailable())
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    command = [sys.executable, str(script), str(tmp_path / "cache")]
    started = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=240)[1] for process in started]
    hits = sorted(output.split("result 7 ")[1].strip() for output in outputs)
    assert hits == ["0", "1"]
    assert sum("compiling kernels" in output for output in outputs) == 1


@pytest.mark.skipif(bool(runtime.why_unavailable()), reason=runtime.why_unavailable())
@pytest.mark.parametrize("full", [False, True])
def test_cache_that_cannot_be_written_costs_time_only(
    full: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    from rookery.worker.engine.native.kernels import vec

    def write(args: int) -> None:
        if vec.fetch_increment(args, 0) == 0:
            vec.write_int(vec.read_int(args, 2), 0, 7)

    blocked = tmp_path / "file"
    blocked.write_text("")
    kernel, out = runtime.Kernel(write), torch.zeros(1, dtype=torch.int64)
    disk = small_files(1) if full else nullcontext()
    with caplog.at_level(logging.WARNING, logger="rookery.kernels"), disk:
        runtime.load([kernel], tmp_path if full else blocked / "cache")
    assert "compiled at every start" in caplog.text
    kernel(runtime.Arguments().tensor(out, torch.int64, 1))
    assert out.item() == 7
