"""What the cells of ``bench-fences`` say: table, sentences and JSON. No engine is run here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from hicache_obs.cli.fence_tally import NAMES
from hicache_obs.costs import TransferKind
from hicache_obs.findings import Verdict

if TYPE_CHECKING:
    from hicache_obs.cli.fence_cells import Cell, Setting
    from hicache_obs.streams.serving_cost import ServingCosts


@dataclass(frozen=True, slots=True)
class Removed:
    """What the fence ``page`` leaves of the avoidable wait of the fence ``stream``, behind the same barrier.

    Attributes:
        barrier, kind: Which fences.
        stream_ns, page_ns: Avoidable wait of all of them.
    """

    barrier: str
    kind: TransferKind
    stream_ns: int
    page_ns: int

    @property
    def share(self) -> float | None:
        """Removed share, ``None`` where there was nothing to remove."""
        return 1 - self.page_ns / self.stream_ns if self.stream_ns else None


@dataclass(frozen=True, slots=True)
class Advice:
    """The best of the cells of one setting that are in proven order and have a fence.

    Attributes:
        setting: Of the cells.
        best: Lowest p99 of the time to the first token; of equal ones the lowest p99 of the load-backs, then the
            fewest avoidable nanoseconds, then the first.
        against: The one with the highest, likewise; the same cell if there is no other.
        removed: Per barrier that has both fences, and per kind of transfer.
    """

    setting: Setting
    best: Cell
    against: Cell
    removed: tuple[Removed, ...]

    @property
    def first_token_ns(self) -> int:
        """Saved at p99 of the time to the first token."""
        return self.against.first_token.p99_ns - self.best.first_token.p99_ns

    @property
    def restore_ns(self) -> int:
        """Saved at p99 of the load-backs; negative if they got slower."""
        return self.against.restore.p99_ns - self.best.restore.p99_ns

    def sentences(self) -> Iterator[str]:
        """In words."""
        best, against = self.best, self.against
        if best is against:
            yield f"Barrier {best.barrier} with fence {best.fence} is the only fenced cell in proven order."
        elif not self.first_token_ns and not self.restore_ns:
            yield "No fenced barrier differs from another at p99."
        else:
            yield (
                f"Barrier {best.barrier} with fence {best.fence} saves {_ms(self.first_token_ns)} ms at p99 of the "
                f"time to the first token ({_ms(against.first_token.p99_ns)} → {_ms(best.first_token.p99_ns)} ms) and "
                f"{_ms(self.restore_ns)} ms at p99 of a load-back ({_ms(against.restore.p99_ns)} → "
                f"{_ms(best.restore.p99_ns)} ms), against barrier {against.barrier} with fence {against.fence}."
            )
        for removed in self.removed:
            if removed.share is not None:
                yield (
                    f"Behind barrier {removed.barrier}, fence page removes {removed.share:.1%} of what fence stream "
                    f"makes {NAMES[removed.kind]} wait in vain ({_ms(removed.stream_ns)} → {_ms(removed.page_ns)} ms)."
                )

    def as_json(self) -> dict[str, Any]:
        """The documented JSON entry."""
        return {
            **asdict(self.setting),
            "best": {"barrier": self.best.barrier, "fence": self.best.fence},
            "against": {"barrier": self.against.barrier, "fence": self.against.fence},
            "first_token_p99_saved_ms": self.first_token_ns / 1e6,
            "restore_p99_saved_ms": self.restore_ns / 1e6,
            "avoidable": [
                {
                    "barrier": removed.barrier,
                    "op": removed.kind.value,
                    "stream_ms": removed.stream_ns / 1e6,
                    "page_ms": removed.page_ns / 1e6,
                    "removed_share": removed.share,
                }
                for removed in self.removed
            ],
            "text": " ".join(self.sentences()),
        }


def by_setting(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of each setting, in the order of the grid."""
    return [list(group) for _, group in groupby(cells, key=lambda cell: cell.setting)]


def advise(cells: Sequence[Cell]) -> Advice | None:
    """About the cells of one setting; ``None`` if none of them is fenced and in proven order."""
    fenced = [cell for cell in cells if cell.fence != "none" and cell.clean]
    if not fenced:
        return None
    best = min(fenced, key=_cost)
    return Advice(fenced[0].setting, best, max(fenced, key=_cost) if len(fenced) > 1 else best, _removed(fenced))


def _cost(cell: Cell) -> tuple[int, int, int]:
    return cell.first_token.p99_ns, cell.restore.p99_ns, cell.tally.avoidable_ns


def _removed(fenced: Sequence[Cell]) -> tuple[Removed, ...]:
    tallies = {(cell.barrier, cell.fence): cell.tally for cell in fenced}
    removed = []
    for barrier in dict.fromkeys(cell.barrier for cell in fenced):
        stream, page = (tallies.get((barrier, fence)) for fence in ("stream", "page"))
        if stream is not None and page is not None:
            for kind in TransferKind:
                avoidable = (tally.waits[kind].in_all_ns[2] for tally in (stream, page))
                removed.append(Removed(barrier, kind, *avoidable))
    return tuple(removed)


# -- for people ----------------------------------------------------------------------------------------------


def costs_line(costs: ServingCosts, clients: int) -> str:
    """The cost model, in words."""
    return (
        f"{clients} clients; {costs.kv_token_bytes:,} bytes of KV per token, {costs.copy_bytes_per_s / 1e9:g} GB/s "
        f"between host and device each way, {costs.kernel_bytes_per_s / 1e9:g} GB/s of device memory; a round takes "
        f"{costs.round_ns / 1e6:g} ms or {costs.token_ns / 1e3:g} us per token, whichever is more, and its KV on top; "
        f"a host call {costs.host_call_ns / 1e3:g} us."
    )


def table(cells: Sequence[Cell], *, storage: bool) -> Table:
    """The cells of one setting; ``storage``: there is a third tier."""
    head, setting = cells[0], cells[0].setting
    hits = (head.device_hit_tokens, head.host_hit_tokens, head.storage_hit_tokens)
    device, host, stored = (_percent(tokens, head.admitted_tokens) for tokens in hits)
    title = (
        f"{setting.device_tokens:,} tokens on the device, {setting.host_ratio} × in host memory, pages of "
        f"{setting.page_size}, {setting.write_policy}\n{head.rounds:,} rounds, {head.restored_pages:,} restored pages; "
        f"prompt hits: {device} device, {host} host" + (f", {stored} of it from storage" if storage else "")
    )
    made = Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    for name in ("", "barrier"), ("", "fence"):
        made.add_column("\n".join(name), no_wrap=True)
    for name in (
        ("load", "p99"), ("token", "p99"), ("load", "wait"), ("", "vain"), ("write", "wait"), ("", "vain"),
        ("races", "struck"), ("", "latent"),
    ):  # fmt: skip
        made.add_column("\n".join(name), justify="right", overflow="fold")
    for cell in cells:
        waits = [waits.in_all_ns for waits in cell.tally.waits.values()]
        times_ns = [cell.restore.p99_ns, cell.first_token.p99_ns]
        times_ns += [ns for waited, _, avoidable in waits for ns in (waited, avoidable)]
        made.add_row(
            cell.barrier,
            cell.fence,
            *map(_short, times_ns),
            _alarm(cell.tally.verdicts[Verdict.VIOLATION]),
            f"{cell.tally.verdicts[Verdict.LATENT]:,}",
        )
    return made


def remarks(cells: Sequence[Cell]) -> Iterator[str]:
    """What the table of one setting does not say, and must be known."""
    idle = [cell for cell in cells if not cell.restored_pages or not cell.pairs_checked]
    unchecked = "no page was restored, so nothing was checked; use more --requests or fewer --device-tokens."
    if len(idle) == len(cells):
        yield f"In every cell {unchecked}"
    for cell in cells:
        where = f"barrier {cell.barrier}, fence {cell.fence}"
        if cell in idle and len(idle) < len(cells):
            yield f"{where}: {unchecked}"
        if cell.lost:
            yield f"{where}: {cell.lost} records were lost, so verdicts may be missing."
        for verdict in (Verdict.UNKNOWN, Verdict.CONTRADICTION):
            if cell.tally.verdicts[verdict]:
                yield f"{where}: {cell.tally.verdicts[verdict]:,} pairs are {verdict.value}."


def _short(time_ns: int) -> str:
    """Milliseconds, or seconds with their unit: a longer number would be broken in two in 80 columns."""
    return f"{time_ns / 1e6:,.0f}" if time_ns < 99_999.5e6 else f"{time_ns / 1e9:,.0f}s"


def _ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:,.2f}"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"


def _alarm(count: int) -> str:
    return f"[bold red]{count:,}[/]" if count else "0"


# -- for programs --------------------------------------------------------------------------------------------


def cell_json(cell: Cell) -> dict[str, Any]:
    """The documented JSON entry of a cell."""
    return {
        **asdict(cell.setting),
        "barrier": cell.barrier,
        "fence": cell.fence,
        "outcome": "findings" if cell.tally.verdicts.total() else "clean" if cell.clean else "nothing-checked",
        "rounds": cell.rounds,
        "retractions": cell.retractions,
        "restored_pages": cell.restored_pages,
        "output_tokens": cell.output_tokens,
        "prompt_tokens": cell.admitted_tokens,
        "device_hit_tokens": cell.device_hit_tokens,
        "host_hit_tokens": cell.host_hit_tokens,
        "storage_hit_tokens": cell.storage_hit_tokens,
        "virtual_s": cell.virtual_ns / 1e9,
        "restore": cell.restore.as_json(),
        "first_token": cell.first_token.as_json(),
        "fences": cell.tally.fences_json(),
        "pairs_checked": cell.pairs_checked,
        "lost_records": cell.lost,
        "verdicts": cell.tally.verdicts_json(),
    }
