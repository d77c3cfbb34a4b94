"""Rings to reports: one loop for the ring of this process (``Agent``), one for those of a node (``NodeAgent``)."""

from hicache_obs.agent.fanout import Fanout
from hicache_obs.agent.inline import Agent
from hicache_obs.agent.node import NodeAgent, NodeOptions
from hicache_obs.agent.pipeline import Follower, RankPipeline
from hicache_obs.agent.rank import WatchedRing

__all__ = ["Agent", "Fanout", "Follower", "NodeAgent", "NodeOptions", "RankPipeline", "WatchedRing"]
