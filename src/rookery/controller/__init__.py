"""The single controller: one asyncio process that decides everything and computes no tensor.

What faces (HTTP, command line, simulator) call is :class:`rookery.controller.controller.Controller`:

* ``async start()`` / ``async stop()``: recover what a crash left and run; end all tasks.
* ``async serve_worker(link)`` / ``async serve_host(link)``: speak with who dialled in, until the connection is over.
* jobs, all scoped by ``tenant`` (an id) and raising :class:`~rookery.errors.NotFound` for another's: ``submit``,
  ``dry_run``, ``list``, ``show``, ``pause``, ``resume``, ``cancel``, ``wait``, ``metrics``, ``follow``, ``events``,
  ``trajectories``, ``versions``, ``evaluations``, ``adapter``; ``sample``; ``add_dataset``, ``add_adapter``.
* ``models()``, ``workers()``, ``health()``; ``tickets`` for what ``/wire`` reads and writes.
"""
