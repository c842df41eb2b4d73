"""The single controller: one asyncio process that decides everything and computes no tensor.

What faces (HTTP, command line, simulator) call is :class:`rookery.controller.controller.Controller`:

* ``async start()`` / ``async stop()``: recover what a crash left, run, end all tasks. ``await Controller.serving()``.
* ``async serve_worker(link)`` / ``async serve_host(link)``: hand over a connected :class:`~rookery.controller.links.Link`
  (``async send(bytes)``, ``async receive() -> bytes`` raising ``LinkClosed``, ``async close(reason)``); returns when
  the connection is over.
* jobs, all scoped by ``tenant`` (an id) and raising :class:`~rookery.errors.NotFound` for another's:
  ``async submit(tenant, data, key=None) -> JobView``, ``async dry_run(tenant, data) -> dict`` (resolved spec, three
  rendered prompts), ``async list(tenant)``, ``async show(tenant, job)``, ``async pause``, ``async resume``,
  ``async cancel``, ``async wait(tenant, job) -> JobView``, ``async metrics(tenant, job, after=-1) -> list[dict]``,
  ``follow(tenant, job, after=-1) -> AsyncIterator[dict]``, ``async events(tenant, job, limit)``,
  ``async trajectories(tenant, job, limit, version=None) -> list[dict]``,
  ``async versions(tenant, job, policy=None) -> list[dict]``, ``async evaluations(tenant, job) -> list[dict]``,
  ``async adapter(tenant, job, policy, version) -> Manifest`` (bytes through ``artifacts``).
* ``async sample(tenant, target, messages, sampling) -> Sampled`` where target is a base model, ``JOB``, ``JOB@VERSION``.
* ``async add_dataset(tenant, bytes) -> hash``, ``async add_adapter(tenant, files) -> hash`` (uploads that jobs name).
* ``models() -> list[dict]``, ``workers() -> list[dict]``, ``health() -> dict``.
* ``tickets``: :class:`~rookery.controller.tickets.Tickets` checks what ``/wire`` reads and writes.
"""
