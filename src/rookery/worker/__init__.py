"""A process that holds one base model and plays rollout, train or both.

Threads that wait for each other spin briefly and then sleep. A worker shares its cores with the controller, the
environments and whatever else its machine does, and a thread that spins on holds up the one that it waits for; one that
sleeps at once is woken too late, hundreds of times per decode step. Decoding 64 sequences over 4 adapters, two compute
threads, tokens/s on two quiet cores / beside two processes that want a core each: sleeping at once 430 / 250, 3,000
turns 900 / 245, 10,000 turns 900 / 69, the runtime's default 900 / 30. The OpenMP runtime reads its settings when torch
loads it, so they are made here, before anything of a worker imports torch.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "3000")
