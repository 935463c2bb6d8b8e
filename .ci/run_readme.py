"""Runs the Python blocks of a page one after another, as one script, with fewer steps: ``run_readme.py README.md``."""

import re
import sys
from pathlib import Path

NOT_RUN = "# Not run by the tests: "


def main(page: Path) -> None:
    """Runs the blocks; the first that fails ends it."""
    namespace = {"__name__": "page"}
    for fence in re.finditer(r"^```python[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
        if not fence[1].startswith(NOT_RUN):
            code = re.sub(r"total_steps=[\d_]+", "total_steps=1_024, eval_episodes=2", fence[1])
            exec(compile(code, str(page), "exec"), namespace)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
