"""The SGLang plugin, and the adapter interface to write one for another engine (``docs/integrations.md``).

Nothing is imported here: the entry point ``hicache_obs.sglang.plugin:register`` must cost nothing while
``HICACHE_OBS`` is not set.
"""
