"""The Python SDK: submit jobs to a service, follow them, use what they learned.

* Every error is a :class:`~rookery.errors.RookeryError` with one line that says what to do.
* A connection that breaks while something is followed is taken up again where it was; a submit that is sent twice makes
  one job.
* Files that a job names (a dataset's ``path``, a ``warm_start.peft`` folder) are read here and uploaded: the service
  never reads a path of ours.
* An :class:`~rookery.Environment` that is given runs in this process, in threads of its own, until its job has ended or
  the client is closed.
"""

from __future__ import annotations

from rookery.client.client import Client
from rookery.client.connection import Record, RequestRefused
from rookery.client.job import AdapterFolder, Job, JobTimeout

__all__ = ["AdapterFolder", "Client", "Job", "JobTimeout", "Record", "RequestRefused"]
