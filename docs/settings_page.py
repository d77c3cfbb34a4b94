"""Prints ``docs/settings.md`` from the table of settings: ``python docs/settings_page.py > docs/settings.md``."""

from __future__ import annotations

from typing import Final

from hicache_obs.config import SETTINGS, Setting, TextSetting

HEAD: Final = """\
# Settings

<!-- Generated: python docs/settings_page.py > docs/settings.md -->

Environment variables, read when a process starts. An option of the command line wins over its variable; what
`hicache-obs doctor` prints is what holds in the environment it runs in, and it names variables that are no settings.
A value that is not allowed ends a command with exit code 2; the plugin logs it, and the server runs unobserved.
"""

GROUPS: Final = {
    "In the server": (
        "mode", "agent", "processes", "read_ids", "link_gb_s", "tensor_syncs", "gpu_trace", "ring_slots", "arena_ids",
    ),
    "In the server and in the agent": ("ring_dir",),
    "In the agent": (
        "port", "bind", "tls_cert", "tls_key", "token_file", "basic_auth_file", "created", "journal",
        "journal_max_bytes", "agent_cpu_percent", "poll_ms", "finished", "finished_rings", "accepted", "events",
        "events_max_bytes", "events_interval_s", "span_one_in", "span_queue",
    ),
}  # fmt: skip
OPTIONS: Final = {"ring_dir": "--dir", "agent_cpu_percent": "--cpu-percent"} | {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "port", "bind", "tls_cert", "tls_key", "token_file", "basic_auth_file", "journal", "journal_max_bytes",
        "accepted", "events",
    )
}  # fmt: skip
"""Options of ``hicache-obs agent``, by setting."""


def default(setting: Setting | TextSetting) -> str:
    """The default in words that hold for every user."""
    if setting.name == "ring_dir":
        return "`$XDG_RUNTIME_DIR/hicache-obs`, else `/tmp/hicache-obs-<uid>`"
    value = setting.default if isinstance(setting, Setting) else setting.default({})
    return f"{value} {setting.unit}".strip() or "none"


def page() -> str:
    """The whole page."""
    by_name = {setting.name: setting for setting in SETTINGS}
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(
            f"\n## {title}\n\n| variable | default | allowed | option | what it decides |\n|---|---|---|---|---|\n"
        )
        for setting in (by_name.pop(name) for name in names):
            option = f"`{OPTIONS[setting.name]}`" if setting.name in OPTIONS else ""
            cells = (f"`{setting.variable}`", default(setting), setting.allowed, option, setting.purpose)
            parts.append(f"| {' | '.join(cells)} |\n".replace("<name>", "NAME"))
    assert not by_name, f"settings of no group: {', '.join(by_name)}"
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
