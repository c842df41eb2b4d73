"""A process that holds one base model and plays the roles rollout, train or both.

Threads that wait for each other spin briefly and then sleep. A worker shares its cores with the controller, the
environments and everything else on its machine: a thread that spins delays the one that it waits for, and one that
sleeps at once wakes too late, hundreds of times per decode step. The spin count is a compromise
(``benchmarks/micro/neighbours.py``): 10,000 turns make a step of a job 2 to 10% faster than 3,000 and decode nearly as
fast as 30,000, and half as fast while another process uses a core: then :mod:`rookery.worker.spinning` shortens it.
The OpenMP runtime reads its settings when torch loads it, so they are set here, before any module of a worker imports
torch.

On a processor without bfloat16 instructions, MKL computes the products that oneDNN does not. On Intel processors its
fastest kernels add up a row in an order that depends on the other rows; strictly reproducible ones take no longer (see
:mod:`rookery.worker.model.batch_invariance`). On other processors MKL has one kind of kernel, whose rows are exact.

oneDNN, and PyTorch's layer above it, keep the compiled kernels of the last 1,024 shapes that they met, some 400 kB
each. Nearly every prompt, batch and training pass has different shapes, so a worker would grow by 750 MB and compute
no faster: the last 64 shapes hold those that repeat, which are the steps of one batch.

Large tensors request large pages: an engine's caches grow by new ones, and the first access to them in pages of 4 KiB
takes twice as long as copying into them.
"""

import os
from pathlib import Path

_PROCESSORS = Path("/proc/cpuinfo")

os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
if _PROCESSORS.exists() and "GenuineIntel" in _PROCESSORS.read_text(errors="replace", encoding="utf-8"):
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
