"""The Python SDK: submit jobs to a service, follow them, and use the trained policies.

* Every error is a :class:`~rookery.errors.RookeryError` with one line that says what to do.
* When the connection breaks while a job is followed, following resumes at the same row; a submit that is sent twice
  creates one job.
* Files that a job names (a dataset's ``path``, a ``warm_start.peft`` folder) are read here and uploaded: the service
  never reads a path of the client's machine.
* An :class:`~rookery.Environment` runs in this process, in a separate thread, until its job has ended or the client is
  closed.
"""

from __future__ import annotations

from rookery.client.client import Client
from rookery.client.connection import Record, RequestRefused
from rookery.client.job import AdapterFolder, Job, JobTimeout

__all__ = ["AdapterFolder", "Client", "Job", "JobTimeout", "Record", "RequestRefused"]
