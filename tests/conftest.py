"""Before any test imports torch: the worker's own setting of the OpenMP runtime."""

import rookery.worker  # noqa: F401
