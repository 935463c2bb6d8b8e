"""Log lines of this process that another process logs, where a person sees them."""

from __future__ import annotations

import logging

__all__ = ["LogLines"]


class LogLines(logging.Handler):
    """Collects the warnings and errors of the logger ``rayvec`` in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []
        logging.getLogger("rayvec").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Collects a line."""
        self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        """Returns the lines logged since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def close(self) -> None:
        """Collects no more lines: this process shows later ones itself."""
        logging.getLogger("rayvec").removeHandler(self)
        super().close()
