"""``Struct``: ``msgspec``'s where it is installed, else a dataclass that does as much of it as this package needs.

The second is for a machine such as one where ``make gpu-check`` runs and installs nothing. It is as fast as a
dataclass.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgspec import Struct
    from msgspec.structs import replace
else:
    try:
        from msgspec import Struct
        from msgspec.structs import replace
    except ModuleNotFoundError:
        replace = dataclasses.replace

        class Struct:
            """Base of records: ``class Name(Struct, frozen=True, eq=False, gc=False)``."""

            def __init_subclass__(cls, *, frozen: bool = False, eq: bool = True, gc: bool = True) -> None:
                dataclasses.dataclass(frozen=frozen, eq=eq)(cls)


__all__ = ["Struct", "replace"]
