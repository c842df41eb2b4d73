"""Example tasks, each runnable by itself: ``python examples/shopping.py``, ``rookery run examples/sums.yaml``.

``contacts``, ``shopping``, ``phone_book`` and ``slow_clerk`` are the four tasks of ``rookery demo``. Each shows the
model one worked example and rewards the form first, then the content, so that a group of eight episodes nearly always
has better and worse ones. No task can be solved with one constant reply, and each says how much the best constant reply
earns.
"""
