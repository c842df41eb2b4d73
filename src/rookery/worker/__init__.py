"""A process that holds one base model and plays rollout, train or both.

Threads that wait for each other spin briefly and then sleep. A worker shares its cores with the controller, the
environments and whatever else its machine does, and a thread that spins on holds up the one that it waits for; one
that sleeps at once is woken too late, hundreds of times per decode step. How briefly is a compromise
(``benchmarks/spinning.py``, docs/speed.md): 30,000 turns instead of 3,000 decode 4% quicker on quiet cores, and three
times as slowly beside one process that wants a core. The OpenMP runtime reads its settings when torch loads it, so
they are made here, before anything of a worker imports torch.

Large tensors ask for large pages: an engine's caches grow by new ones, and touching them first, 4 KiB at a time, took
twice as long as copying into them.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "3000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
