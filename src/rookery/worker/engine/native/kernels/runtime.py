"""Kernels: compiled ahead of first use, called through PyTorch's own thread pool, with checked arguments.

Promises:

* This module imports no Numba, and a machine without it, or without the processor that the kernels need, gets a reason
  from ``why_unavailable`` instead of an error; the plain PyTorch path serves there.
* A kernel gets addresses of tensors whose dtype, shape, device and contiguity ``Arguments`` checked: a wrong one raises
  ``ValueError``.
* Compiled code is cached on disk by source, processor, and versions of Python, Numba and llvmlite. Workers that start
  together compile once: the others wait and read. A cache that cannot be written costs the time to compile, nothing
  else.

A kernel is a Numba function of one address: that of int64 words, which ``Arguments`` builds. Its work is divided into
``blocks``. Every thread takes the next block from a shared counter until none is left, so a thread that another process
delays takes fewer. The calls go to the OpenMP runtime that PyTorch uses: a second pool would compete for the cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger("rookery.kernels")

FIRST = 2
"""Index of a kernel's first argument: the words before it are the counters of blocks and of threads."""


@cache
def why_unavailable() -> str:
    """Why the kernels cannot run on this machine; empty where they can."""
    vectors = torch.backends.cpu.get_cpu_capability()
    if reason := missing_part(sys.platform, platform.machine(), vectors, numba=find_spec("numba") is not None):
        return reason
    return "" if openmp_parallel() is not None else "PyTorch does not use the GNU OpenMP interface here"


def missing_part(system: str, processor: str, vectors: str, *, numba: bool) -> str:
    """The first part that kernels need and a machine lacks; empty where it has all. ``vectors``: the instructions that
    PyTorch uses there."""
    if system != "linux" or processor not in ("x86_64", "AMD64"):
        return f"they need Linux on x86-64, this is {system} on {processor}"
    if not vectors.startswith("AVX"):
        return "the processor has no AVX2"
    return "" if numba else "numba is not installed"


@cache
def openmp_parallel() -> Any:
    """``GOMP_parallel(function, data, threads, flags)`` of the runtime that PyTorch uses; None where it has none."""
    libraries = [None, *sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.so"))]
    for library in libraries:
        function = getattr(ctypes.CDLL(None if library is None else str(library)), "GOMP_parallel", None)
        if function is not None:
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            function.restype = None
            return function
    return None


_reserved = 1


def reserve(threads: int) -> None:
    """Kernels have room for so many threads at least, whatever the number is when their arguments are made."""
    global _reserved
    _reserved = threads


class Arguments:
    """The int64 words that one kernel reads: two counters, then its arguments in the order in which they are added. The
    tensors stay alive as long as this object. At most ``threads`` run the kernel: as many as its caller has then."""

    def __init__(self) -> None:
        self.threads = max(_reserved, torch.get_num_threads())
        self._words = [0] * FIRST
        self._tensors: list[Tensor] = []
        self._array: np.ndarray | None = None

    def number(self, value: int) -> Arguments:
        """Adds a number; a negative one raises ``ValueError``."""
        if value < 0:
            raise ValueError(f"a kernel's number is {value}; it must be 0 or more")
        self._words.append(value)
        return self

    def tensor(self, tensor: Tensor, dtype: torch.dtype, *shape: int) -> Arguments:
        """Adds the address of a contiguous CPU tensor; raises ``ValueError`` if it has another dtype or shape."""
        self._words.append(checked_address(tensor, dtype, shape))
        self._tensors.append(tensor)
        return self

    def replace(self, index: int, *words: int) -> None:
        """Sets the arguments from ``index`` on, which are the last ones: numbers, and what ``checked_address`` returned
        for tensors that the caller keeps. They need not have been added."""
        if self._array is None or len(self._array) != index + len(words):
            del self._words[index:]
            self._words += words
            self._array = None
        else:
            _packer(len(words)).pack_into(self._array.data, 8 * index, *words)  # a fifth of NumPy's time

    def reset(self) -> int:
        """Sets the counters to 0 and returns the address of the words. None can be added afterwards."""
        if self._array is None:
            self._array = np.array(self._words, dtype=np.int64)
            self._address = self._array.ctypes.data
        _COUNTERS.pack_into(self._array.data, 0, *[0] * FIRST)
        return self._address


_COUNTERS = struct.Struct(f"{FIRST}q")


@cache
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"{count}q")


def checked_address(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The address of a tensor's first element; raises ``ValueError`` if a kernel that expects this dtype and shape, and
    contiguous memory of the CPU, must not read it."""
    if not tensor.is_cpu or tensor.dtype != dtype or tensor.shape != shape:
        found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        raise ValueError(f"a kernel needs {dtype} {shape} on cpu, given {found}")
    if not tensor.is_contiguous():
        raise ValueError(f"a kernel needs contiguous memory, given strides {tensor.stride()} of {tuple(tensor.shape)}")
    return tensor.data_ptr()


def check_rows(first: int, count: int, rows: int) -> None:
    """Raises ``ValueError`` unless ``first`` and the ``count`` rows from it on lie within ``rows``."""
    if not (first >= 0 and count >= 0 and first + count <= rows):
        raise ValueError(f"a kernel's block of {count} rows from row {first} on does not lie within {rows} rows")


class Kernel:
    """A kernel by its Python function ``function(address) → None``. Every thread runs the whole function: it takes its
    number from ``fetch_increment(address, 1)`` and its blocks from ``fetch_increment(address, 0)``."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function
        self._compiled: Any = None
        self._code = 0

    @property
    def compiled(self) -> bool:
        return self._compiled is not None

    def compile(self, *, cached: bool) -> None:
        """Compiles it, or reads it from Numba's cache."""
        import numba

        decorate = numba.cfunc(numba.void(numba.int64), cache=cached, error_model="numpy")
        self._compiled = decorate(self._function)
        self._code = self._compiled.address

    def __call__(self, arguments: Arguments) -> None:
        """Returns when all blocks are done. ``load`` comes first."""
        assert self._code, f"kernel {self._function.__name__} is not compiled"
        openmp_parallel()(self._code, arguments.reset(), min(arguments.threads, torch.get_num_threads()), 0)


def load(kernels: Sequence[Kernel], folder: Path | None) -> None:
    """Compiles the kernels that are not compiled yet. Their code is cached in Numba's own folder if the environment
    names one (``NUMBA_CACHE_DIR``), else under ``folder``, if given."""
    kernels = [kernel for kernel in kernels if not kernel.compiled]
    if not kernels:
        return
    start = time.perf_counter()
    with _numba_cache(folder) as cached:
        try:
            _compile(kernels, cached=cached)
        except OSError as error:  # its disk is full: a new file could be made, and not written
            log.warning("kernels are compiled at every start: %s", error)
            _compile(kernels, cached=False)
    log.info("kernels loaded in %.1f s", time.perf_counter() - start)


def _compile(kernels: Sequence[Kernel], *, cached: bool) -> None:
    from rookery.worker.engine.native.kernels import product

    product.compile_product(cached=cached)
    for kernel in kernels:
        kernel.compile(cached=cached)


@contextmanager
def _numba_cache(folder: Path | None) -> Iterator[bool]:
    """Numba's cache in the part of ``folder`` that belongs to this code, processor and versions, for one process at a
    time. Yields False if there is none that can be written."""
    from numba.core import config

    given = os.environ.get("NUMBA_CACHE_DIR")
    root = Path(given) if given else folder and folder / "kernels"
    if root is None:
        yield False
        return
    folder = root / code_key()
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w", encoding="utf-8")
    except OSError as error:
        log.warning("kernels are compiled at every start: %s", error)
        yield False
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(folder.rglob("*.nbi")):
            log.info("compiling kernels for this processor, about 10 seconds, once")
        before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
        try:
            yield True
        finally:
            config.CACHE_DIR = before


@cache
def code_key() -> str:
    """Names the cache of this code and these versions; Numba adds the processor."""
    parts = [sys.version, version("numba"), version("llvmlite")]
    parts += [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
