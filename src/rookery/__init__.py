"""Rookery: many LoRA policies learn by reinforcement at once, on one resident base model."""
