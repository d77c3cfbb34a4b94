"""A HiCache controller and transfer engine with fences, imported as hicache_obs.controller."""
