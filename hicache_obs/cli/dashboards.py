"""``hicache-obs dashboards``: alerts, dashboards, manifests and runbooks, with the addresses of your site."""

from __future__ import annotations

from pathlib import Path

import click

from hicache_obs.dashboards.addresses import GRAFANA, RUNBOOKS, site_files
from hicache_obs.errors import ConfigError


@click.command("dashboards")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", required=True, help="New or empty directory.")
@click.option("--runbooks", metavar="URL", default=RUNBOOKS, help="Where you serve the folder 'runbooks'.")
@click.option("--grafana", metavar="URL", default=GRAFANA, help="Where your Grafana is.")
@click.option("--tls", is_flag=True, help="Agents have a certificate: boards lead to their pages by https.")
def command(out: Path, runbooks: str, grafana: str, tls: bool) -> int:
    """Write rules and alerts for Prometheus, routes for Alertmanager, dashboards for Grafana, manifests for Kubernetes
    and a runbook per alert.

    Without the two addresses the alerts' links lead nowhere.
    """
    files = site_files(runbooks=runbooks, grafana=grafana, tls=tls)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out}: is there already; expected a new or empty directory")
        for name, text in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; expected a directory that can be written") from None
    click.echo(f"{len(files)} files in {out}")
    if runbooks == RUNBOOKS or grafana == GRAFANA:
        click.echo("hicache-obs: links of the alerts lead nowhere yet: give --runbooks and --grafana", err=True)
    return 0
