"""The page itself: what each file gave as plain data, and ``render``, which makes one document of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hicache_obs.exporters.html.document import json_markup, render_document
from hicache_obs.exporters.html.heat_map import HeatMap
from hicache_obs.exporters.html.timeline import Drawing
from hicache_obs.findings import BlastRadius
from hicache_obs.records import OpId

_SCRIPTS: Final = ("figures.js", "columns.js", "chart.js", "explorer.js")
COLORS: Final = {
    "VIOLATED": "bad", "CONTRADICTION": "bad", "LATENT RACES": "warn", "NOT DECIDABLE": "warn",
    "NOTHING CHECKED": "warn", "AS ACCEPTED": "warn", "SAFE": "good",
}  # fmt: skip
"""Words a verdict can begin with, the worst first."""
MAX_SPOILED: Final = 20_000
"""Rounds, and transfers, of one blast radius that are marked on the timeline."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two operations of a finding, or of what could not be decided.

    Attributes:
        earlier, later: Their numbers in the drawing.
        text: What the page calls them.
    """

    earlier: OpId
    later: OpId
    text: str


@dataclass(frozen=True, slots=True)
class Card:
    """All findings of one fingerprint, or all undecided pairs with one cause.

    Attributes:
        name: Fingerprint; empty for undecided pairs.
        verdict: One word.
        hazard: Its name.
        bad: Whether it is sure to have gone wrong.
        count: How many pairs, in words.
        story: Paragraphs.
        facts: Label and text.
        accepted: Until when and why; empty if it is not.
        replay: Command that shows it again; empty if there is none.
        link: Address of a public report of the same kind; empty if none is known.
        pairs: Those that can be shown, the one that the text is about first.
        radius: What that one has spoiled.
    """

    name: str
    verdict: str
    hazard: str
    bad: bool
    count: str
    story: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    accepted: str = ""
    replay: str = ""
    link: str = ""
    pairs: Sequence[Pair] = ()
    radius: BlastRadius | None = None


@dataclass(frozen=True, slots=True)
class FenceRow:
    """A fence that cost time: its operation, and its cells in the order of the table's heads."""

    op: OpId
    cells: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts; the first cell of a row is its head."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """What one file, or one rank of a journal, gave.

    Attributes:
        source: Where it came from.
        sentence: Verdict and coverage; begins with one of ``COLORS`` and a colon.
        coverage: Further lines on how much was looked at.
        cards: Findings, worst first.
        more_cards: Name, verdict, hazard and count of those without a card.
        fences: Sums over all fences, one row per direction; ``None`` without fences.
        fence_heads, worst_fences: Single fences, the most avoidable first.
        stalls: Waits that cost time, in words.
        preflight: Each check: whether it is good, its name, what the file shows, and what would mend it.
        level: How far the file goes; empty for what is no profile.
        blind: What was not seen or not looked at.
        drawing: Timeline; ``None`` if nothing ran.
        maps: Heat maps of its pages.
    """

    source: str
    sentence: str
    coverage: Sequence[str] = ()
    cards: Sequence[Card] = ()
    more_cards: Table | None = None
    fences: Table | None = None
    fence_heads: Sequence[str] = ()
    worst_fences: Sequence[FenceRow] = ()
    stalls: Sequence[str] = ()
    preflight: Sequence[tuple[bool, str, str, str]] = ()
    level: str = ""
    blind: Sequence[str] = ()
    drawing: Drawing | None = None
    maps: Sequence[HeatMap] = field(default_factory=list)

    @property
    def word(self) -> str:
        """The verdict without the rest."""
        return self.sentence.partition(":")[0]

    @property
    def color(self) -> str:
        """Class of the verdict."""
        return COLORS[self.word]

    def data(self) -> dict[str, Any]:
        """What ``explorer.js`` needs for the charts."""
        assert self.drawing is not None
        sides = (op for card in self.cards for pair in card.pairs for op in (pair.earlier, pair.later))
        places = self.drawing.places(sides)
        pairs = [
            [places.get(pair.earlier, -1), places.get(pair.later, -1), number]
            for number, card in enumerate(self.cards)
            for pair in card.pairs
        ]
        spoiled = [
            {
                "rounds": list(card.radius.rounds[:MAX_SPOILED]) if card.radius else [],
                "transfers": list(card.radius.transfers[:MAX_SPOILED]) if card.radius else [],
            }
            for card in self.cards
        ]
        maps = [heat_map.as_json() for heat_map in self.maps]
        return {**self.drawing.as_json(), "pairs": pairs, "spoiled": spoiled, "maps": maps}


def render(sections: Sequence[Section]) -> str:
    """The report as one HTML document; the same for the same sections.

    Raises:
        ModuleNotFoundError: ``jinja2`` or ``bokeh`` is not installed: they are in the extra ``report``.
    """
    drawn = any(section.drawing is not None for section in sections)
    return render_document(
        "report.html.jinja",
        _SCRIPTS if drawn else (),
        title=_headline(sections),
        color=max((section.color for section in sections), key=["good", "warn", "bad"].index),
        several=len(sections) > 1,
        sections=sections,
        data=[json_markup(section.data()) if section.drawing is not None else None for section in sections],
    )


def _headline(sections: Sequence[Section]) -> str:
    """The one sentence a reader sees first; of several files, the worst."""
    if len(sections) == 1:
        return sections[0].sentence
    for word in COLORS:
        count = sum(section.word == word for section in sections)
        if count:
            return f"{word}: {count} of {len(sections)} recordings; each has its own verdict below"
    raise AssertionError("no section has a verdict")
