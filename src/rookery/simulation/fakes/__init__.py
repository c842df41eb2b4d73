"""Fake workers and environment hosts that speak the wire protocol and compute nothing, and a controller around them."""
