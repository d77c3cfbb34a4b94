"""Prove that a restored KV-cache page is never raced by the forward pass, and price the fences for it."""

__version__ = "0.1.0"
