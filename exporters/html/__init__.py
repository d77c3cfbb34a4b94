"""The HTML report: one file that needs nothing else, made of what was concluded from traces."""

from hicache_obs.exporters.html.page import MARK, Card, FenceRow, Pair, Section, Table, render

__all__ = ["MARK", "Card", "FenceRow", "Pair", "Section", "Table", "render"]
