"""Records in, findings and costs out; pure."""

from hicache_obs.analyzer.check import Analyzer, Totals
from hicache_obs.analyzer.explain import explain

__all__ = ["Analyzer", "Totals", "explain"]
