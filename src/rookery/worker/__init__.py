"""A process that holds one base model and plays rollout, train or both.

Threads that wait for each other spin briefly and then sleep. A worker shares its cores with the controller, the
environments and whatever else its machine does, and a thread that spins on holds up the one that it waits for; one
that sleeps at once is woken too late, hundreds of times per decode step. How briefly is a compromise
(``benchmarks/spinning.py``): 10,000 turns make a step of a job 2 to 10% quicker than 3,000 and decode
nearly as quickly as 30,000, and half as quickly beside one process that wants a core. The OpenMP runtime reads its
settings when torch loads it, so they are made here, before anything of a worker imports torch.

Where a processor has no bfloat16, MKL multiplies what oneDNN does not. On Intel's its quickest kernels add up a row in
an order that depends on the other rows; strictly reproducible ones take no longer (``worker/exact.py``). Elsewhere it
has one kind, and its rows are exact.

Large tensors ask for large pages: an engine's caches grow by new ones, and touching them first, 4 KiB at a time, took
twice as long as copying into them.
"""

import os
from pathlib import Path

_PROCESSORS = Path("/proc/cpuinfo")

os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
if _PROCESSORS.exists() and "GenuineIntel" in _PROCESSORS.read_text(errors="replace"):
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
