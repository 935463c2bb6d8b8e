"""Log lines of this process that another process logs, where a person sees them."""

from __future__ import annotations

import logging
import sys
from logging.handlers import MemoryHandler


class LogLines(MemoryHandler):
    """Collects the warnings and errors of the logger ``rayvec`` in this process."""

    def __init__(self) -> None:
        super().__init__(sys.maxsize)
        self.setLevel(logging.WARNING)
        logging.getLogger("rayvec").addHandler(self)

    def take(self) -> list[str]:
        """Returns the lines logged since the last call."""
        records, self.buffer = self.buffer, []
        return [record.getMessage() for record in records]

    def close(self) -> None:
        """Collects no more lines: this process shows later ones itself."""
        logging.getLogger("rayvec").removeHandler(self)
        super().close()
