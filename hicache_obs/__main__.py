"""`python -m hicache_obs` is the `hicache-obs` command."""

import sys

from hicache_obs.cli import main

if __name__ == "__main__":
    sys.exit(main())
