"""``Struct`` for a machine without ``msgspec``, such as one where ``make gpu-check`` runs and installs nothing.

Does the same as ``msgspec.Struct`` as far as ``hicache_obs.records`` needs it, at the speed of a dataclass.
"""

from __future__ import annotations

import dataclasses


class Struct:
    """Base of records: ``class Name(Struct, frozen=True, eq=False, gc=False)``."""

    def __init_subclass__(cls, *, frozen: bool, eq: bool, gc: bool) -> None:
        dataclasses.dataclass(frozen=frozen, eq=eq)(cls)
