"""``bench-fences --plot``: what the fences of each cell waited for, as an SVG that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from hicache_obs.costs import TransferKind

if TYPE_CHECKING:
    from hicache_obs.cli.fence_cells import Cell

_LABELS: Final = 150
_BAR: Final = 420
_FIGURES: Final = 330
_ROW: Final = 22
_NEEDED, _AVOIDABLE = "#4c78a8", "#f58518"


def chart(settings: Sequence[Sequence[Cell]]) -> str:
    """One bar per cell, needed and avoidable wait of its load-backs; the figures beside it. One scale for all bars."""
    longest = max((_waits(cell)[0] for cells in settings for cell in cells), default=0) or 1
    lines: list[str] = []
    y = 40
    for cells in settings:
        setting = cells[0].setting
        y += 12
        title = (
            f"{setting.device_tokens:,} tokens on the device × {1 + setting.host_ratio}, pages of {setting.page_size}, "
            f"{setting.write_policy}"
        )
        lines.append(f'<text x="0" y="{y}" font-weight="bold">{escape(title)}</text>')
        for cell in cells:
            y += _ROW
            lines += _row(cell, y, longest)
        y += _ROW
    width, height = _LABELS + _BAR + _FIGURES, y + 10
    legend = (
        f'<rect x="{_LABELS}" y="8" width="12" height="12" fill="{_NEEDED}"/>'
        f'<text x="{_LABELS + 18}" y="18">needed wait</text>'
        f'<rect x="{_LABELS + 120}" y="8" width="12" height="12" fill="{_AVOIDABLE}"/>'
        f'<text x="{_LABELS + 138}" y="18">avoidable wait of all load-backs</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13">\n<rect width="{width}" height="{height}" fill="white"/>\n{legend}\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def _waits(cell: Cell) -> tuple[int, int, int]:
    """Waited, needed and avoidable, of all fences in front of load-backs."""
    return cell.tally.waits[TransferKind.RESTORE].in_all_ns


def _row(cell: Cell, y: int, longest: int) -> list[str]:
    waited_ns, *parts_ns = _waits(cell)
    needed, avoidable = (round(_BAR * time_ns / longest, 1) for time_ns in parts_ns)
    races = cell.tally.verdicts.total()
    figures = f"{waited_ns / 1e6:,.1f} ms; first token p99 {cell.first_token.p99_ns / 1e6:,.1f} ms"
    if races:
        figures += f"; {races:,} races"
    return [
        f'<text x="0" y="{y + 11}">{escape(cell.barrier)}, {escape(cell.fence)}</text>',
        f'<rect x="{_LABELS}" y="{y}" width="{needed}" height="14" fill="{_NEEDED}"/>',
        f'<rect x="{_LABELS + needed}" y="{y}" width="{avoidable}" height="14" fill="{_AVOIDABLE}"/>',
        f'<text x="{_LABELS + needed + avoidable + 8}" y="{y + 11}">{escape(figures)}</text>',
    ]
