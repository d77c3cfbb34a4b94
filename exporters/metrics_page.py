"""``docs/metrics.md``, and what an agent serves at ``/docs/metrics``: the catalogue for readers."""

from __future__ import annotations

from typing import Final

from hicache_obs.exporters.catalogue import CATALOGUE
from hicache_obs.exporters.metric_row import Label


def markdown() -> str:
    """The text of ``docs/metrics.md``."""
    return "\n".join([_INTRO, *_metric_table(), *_label_table(), *_bucket_table(), _NOTES])


_INTRO: Final = """\
# Metrics

<!-- Generated: python -m hicache_obs.exporters.catalogue > docs/metrics.md -->

Every metric also carries the labels `tp_rank`, `pp_rank` and `dp_rank`, named as in SGLang's own cache
metrics. Every series exists at 0 from the start, so the first violation is an increase and not a new series.
Page, request, node and stream ids are never labels.
"""

_NOTES: Final = """\
## Reading them

- `violations_total` is 0 both when all is well and when nothing was looked at. Read it together with
  `checks_total`; for one hazard also with `hazard_observable`.
- `unknown_total` above 0 means some pairs could not be judged, mostly because records were dropped. That is
  not clean either.
- A scrape in OpenMetrics has exemplars: `fingerprint` on the counters of findings, `op_id` (the operation id of NVTX
  ranges and journals) on fence waits, `transfer` on transfers, `trace_id` and `span_id` once a span was delivered; and,
  unless switched off, `_created` series: the Unix time since which a counter or histogram counts.
- The bucket counts of a histogram always agree with each other; its sum may be one observation behind.
- A ratio is computed in the query, never exported. The share of fence waits in the time transfers took:

```promql
sum(rate(hicache_obs_fence_wait_seconds_sum[5m])) / (sum(rate(hicache_obs_op_seconds_sum[5m])) > 0)
```
"""


def _metric_table() -> list[str]:
    lines = ["| metric | type | counts or unit | labels | question | fed by |", "|---|---|---|---|---|---|"]
    for r in CATALOGUE:
        labels = ", ".join(f"`{label.name}`" for label in r.labels) or "–"
        lines.append(f"| `{r.name}` | {r.type.value} | {r.unit} | {labels} | {r.question} | {r.source} |")
    return [*lines, ""]


def _label_table() -> list[str]:
    lines = ["## Labels", "", "| metric | label | values |", "|---|---|---|"]
    seen: dict[Label, list[str]] = {}
    for r in CATALOGUE:
        for label in r.labels:
            seen.setdefault(label, []).append(f"`{r.name}`")
    for label, names in seen.items():
        values = ", ".join(f"`{v}`" for v in label.values) or "one per process"
        lines.append(f"| {', '.join(names)} | `{label.name}` | {values} |")
    return [*lines, ""]


def _bucket_table() -> list[str]:
    lines = ["## Buckets", "", "Upper bounds in seconds, inclusive.", "", "| metric | bounds |", "|---|---|"]
    seen: dict[tuple[int, ...], list[str]] = {}
    for r in CATALOGUE:
        if r.buckets_ns:
            seen.setdefault(r.buckets_ns, []).append(f"`{r.name}`")
    for bounds_ns, names in seen.items():
        lines.append(f"| {', '.join(names)} | {', '.join(f'{b / 1e9:g}' for b in bounds_ns)} |")
    return [*lines, ""]
