"""Algorithms by name: advantages and schedules (pure Python, the controller's), losses (torch, the worker's)."""
