"""The ``hicache-obs`` command."""

from hicache_obs.cli.app import main

__all__ = ["main"]
