"""The entry point of the group ``sglang.srt.plugins``. While ``HICACHE_OBS`` is not set it does nothing at all.

SGLang calls ``register`` in every process that loads plugins; only a scheduler's has a cache to observe, and nothing
is hooked, and no module of SGLang imported, in the others.
"""

from __future__ import annotations

import os


def register() -> None:
    """Register the hooks if this process is to be observed. Never raises."""
    if os.environ.get("HICACHE_OBS", "off") == "off":
        return
    import logging

    try:
        from hicache_obs.sglang.install import install_sglang

        install_sglang()
    except Exception as error:  # the server comes first
        wrong_value = type(error).__name__ == "ConfigError"  # which says it all, and may not even be importable
        logging.getLogger("hicache_obs.sglang").error(
            "hicache-obs: not installed: %s", error, exc_info=None if wrong_value else error
        )
