"""The OpenMP threads of a worker: each thread that computes has a separate team, and all teams together have no more
threads than there are cores to compute with.

Promise: after :func:`reserve`, a thread that asked for no team computes alone, so that there are no teams but
those of the lanes. The GNU runtime lets threads spin briefly once a process has more of them in teams than the machine
has processors, which makes a decode step of few rows half as fast. A team grows and shrinks with the number that its
thread asks for; it ends with its thread.

A result does not depend on the number of threads where the kernels compute in bfloat16 and the processor multiplies it
natively (:func:`why_inexact`).
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rookery.machine import cores
from rookery.worker.engine.native.kernels import runtime
from rookery.worker.model.batch_invariance import uses_amx
from rookery.worker.model.decoder import best_dtype

OPENMP, MKL = "omp_set_num_threads", "MKL_Set_Num_Threads_Local"


@cache
def _setter(name: str) -> Any:
    """The function of this name in the runtime that PyTorch uses; None where it has none. PyTorch's own function calls
    both :data:`OPENMP` and :data:`MKL`, and also sets the number that other threads begin with."""
    for library in (None, *sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.so"))):
        function = getattr(ctypes.CDLL(None if library is None else str(library)), name, None)
        if function is not None:
            function.argtypes, function.restype = (ctypes.c_int,), None
            return function
    return None


def reserve(threads: int) -> int:
    """The calling thread computes with ``threads`` (0: as many as there are cores for this process), every other one
    alone until it asks for more. Returns the number."""
    present = torch.get_num_threads()  # asked first: PyTorch sets a thread's number at its first question
    chosen = threads or min(present, cores())
    torch.set_num_threads(chosen)
    runtime.reserve(chosen)
    others = threading.Thread(target=torch.set_num_threads, args=(1,), name="teams")
    others.start()
    others.join()
    return chosen


def use(threads: int) -> None:
    """The calling thread computes with so many from now on."""
    if torch.get_num_threads() == threads:
        return
    for name in (OPENMP, MKL):  # MKL has a separate number, which PyTorch has set
        if (setter := _setter(name)) is not None:
            setter(threads)


def why_inexact(device: torch.device, dtype: torch.dtype, *, kernels: bool) -> str:
    """Why results would depend on the number of threads; empty where they do not. ``kernels``: engine and trainer
    compute by compiled kernels."""
    if device.type != "cpu":
        return ""
    if not kernels:
        return "engine and trainer do not compute by CPU kernels"
    if dtype != torch.bfloat16:
        return "float32 products depend on the number of threads"
    if best_dtype(device) != dtype:
        return "bfloat16 products that this processor emulates depend on the number of threads"
    if uses_amx(dtype, device):
        return "products by tile instructions depend on the number of threads"
    gnu = runtime.openmp_parallel() is not None and _setter(OPENMP) is not None
    return "" if gnu else "PyTorch does not use GNU OpenMP here"
