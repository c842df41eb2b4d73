"""The Tinker-compatible face: existing training code of the ``tinker`` SDK runs unmodified against a Rookery service.

It speaks the protocol of SDK 0.38 and needs that package for its protobuf schema (the extra ``tinker``)."""
