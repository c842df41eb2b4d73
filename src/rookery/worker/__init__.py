"""A process that holds one base model and plays rollout, train or both.

Threads that wait for each other sleep instead of spinning: the worker shares its cores with the controller, the
environments and whatever else its machine does, and a spinning thread holds up the one that it waits for. Measured with
two compute threads and two other busy processes on two cores: 8 times the tokens per second. The OpenMP runtime reads
its settings when torch loads it, so they are made here, before anything of a worker imports torch.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
