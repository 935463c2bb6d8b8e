"""Runs the command line: `python -m rayvec`."""

from __future__ import annotations

import sys

from rayvec.cli import main

if __name__ == "__main__":
    sys.exit(main())
