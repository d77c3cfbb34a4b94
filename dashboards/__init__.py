"""Grafana dashboards, built by ``python -m hicache_obs.dashboards.build`` from the metric catalogue."""
