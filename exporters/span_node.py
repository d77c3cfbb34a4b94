"""A span in the making, and the tree of its trace."""

from __future__ import annotations

from typing import NamedTuple

from hicache_obs._struct import Struct
from hicache_obs.exporters.spans import Attributes, Link, Observation
from hicache_obs.findings import AccessInfo, Finding
from hicache_obs.records import OpId, PageIds


class SpanNode(Struct, eq=False):
    """One span in the making.

    Attributes:
        number: Round or transfer id, or the operation's id of the other kinds.
        issued_ns: Host clock at the first call.
        findings: Emptied with the trace, so that no chain of nodes stays.
        untimed: Operations without device times.
        ops: Its operations.
        loaded: Of a layer wait, the load-back waited for.
        rows: Of a round, as in ``Kernel``.
    """

    name: str
    number: int
    issued_ns: int
    attributes: Attributes
    ops: list[OpId]
    children: list[SpanNode]
    findings: list[Side]
    parent: SpanNode | None = None
    untimed: int = 0
    start_ns: int | None = None
    end_ns: int | None = None
    links: tuple[Link, ...] = ()
    observation: Observation | None = None
    loaded: SpanNode | None = None
    rows: PageIds | None = None


class Side(NamedTuple):
    """One access of a finding, on the node that it is part of."""

    finding: Finding
    access: AccessInfo
    other: SpanNode | None


def make_node(name: str, number: int, issued_ns: int) -> SpanNode:
    return SpanNode(name, number, issued_ns, {}, [], [], [])


def tree(root: SpanNode) -> list[SpanNode]:
    """``root`` and all below it, parents first."""
    nodes = [root]
    for node in nodes:
        nodes += node.children
    return nodes


def adopt(parent: SpanNode, *nodes: SpanNode) -> None:
    for node in nodes:
        node.parent = parent
        parent.children.append(node)
