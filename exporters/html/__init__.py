"""The HTML report: one file that needs nothing else, made of what was concluded from traces."""

from hicache_obs.exporters.html.document import MARK
from hicache_obs.exporters.html.fleet import Bar, Defect, Divergence, FleetPage, render_fleet
from hicache_obs.exporters.html.page import Card, FenceRow, Pair, Section, Table, render

__all__ = [
    "MARK",
    "Bar",
    "Card",
    "Defect",
    "Divergence",
    "FenceRow",
    "FleetPage",
    "Pair",
    "Section",
    "Table",
    "render",
    "render_fleet",
]
