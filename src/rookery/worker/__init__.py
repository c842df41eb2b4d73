"""A process that holds one base model and plays rollout, train or both.

Threads that wait for each other spin briefly and then sleep. A worker shares its cores with the controller, the
environments and whatever else its machine does, and a thread that spins on holds up the one that it waits for; one
that sleeps at once is woken too late, hundreds of times per decode step. Decoding 64 sequences over 4 adapters, 12
new tokens, two compute threads, tokens/s, medians of 3 in one run on two cores, quiet / beside two processes that
want a core each: the runtime's default 1081 / no repeat within 38 s; 10,000 turns 1043 / 71; 3,000 turns 1007 / 500;
1,000 turns 984 / 343; 300 turns 575 / 486; sleeping at once 465 / 487. So 3,000 costs 7% on quiet cores. The busy
figures are noisy: another run gave 245 for 3,000 turns. The OpenMP runtime reads its settings when torch loads it, so
they are made here, before anything of a worker imports torch.

Large tensors ask for large pages: an engine's caches grow by new ones, and touching them first, 4 KiB at a time, took
twice as long as copying into them.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "3000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
