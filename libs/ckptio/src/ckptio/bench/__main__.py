"""`python -m ckptio.bench`: the command `ckptio bench` alone."""

from __future__ import annotations

import sys

from ckptio.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
