"""The controller: one asyncio process that makes every decision and computes no tensor.

:class:`rookery.controller.controller.Controller` is what the HTTP service, the command line and the simulator use:

* ``start`` and ``stop``; ``serve_worker`` and ``serve_host`` run one connection each.
* Commands about jobs: ``submit``, ``dry_run``, ``pause``, ``resume``, ``cancel``; also ``sample``, ``add_dataset``,
  ``add_adapter``. They are scoped by ``tenant`` (an id) and raise :class:`~rookery.errors.NotFound` for another's job.
* ``queries``: the read side, such as ``list``, ``show``, ``metrics``, ``versions``, ``workers``, ``health``.
* ``completions`` for direct requests, ``sessions`` for Tinker clients, ``tickets`` for ``/wire``.

Packages import each other in one direction only: ``jobs``, ``sessions`` > ``rollout``, ``training`` > ``weights`` >
``fleet``.
"""
