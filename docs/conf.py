"""Settings of Sphinx, and the table of settings, which is made from the config classes at every build."""

from __future__ import annotations

from pathlib import Path

import rayvec
from rayvec.config import CONFIGS
from rayvec.config.schema import describe

project = "rayvec"
author = "rayvec maintainers"
copyright = "2026, rayvec maintainers"
version = release = rayvec.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "configuration-table.md"]

html_theme = "furo"
html_title = f"rayvec {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
default_role = "code"


def write_configuration_table() -> None:
    """Writes ``configuration-table.md``, which ``configuration.md`` includes."""
    lines: list[str] = []
    for name, cls in CONFIGS.items():
        lines += [f"## `rayvec train {name}`", "", f"{cls.__name__}: {(cls.__doc__ or '').splitlines()[0]}", ""]
        lines += ["| setting | option | type | default | |", "|---|---|---|---|---|"]
        for row in describe(cls):
            kind = f"{row.type}, {row.bounds}" if row.bounds else row.type
            cells = (f"`{row.name}`", f"`--{row.name.replace('_', '-')}`", kind, f"`{row.default}`", row.doc)
            lines.append("| " + " | ".join(cell.replace("|", r"\|").replace("<", r"\<") for cell in cells) + " |")
        lines.append("")
    Path(__file__).with_name("configuration-table.md").write_text("\n".join(lines), encoding="utf-8")


write_configuration_table()
