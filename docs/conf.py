"""Settings of Sphinx. Each build also writes the pages that are made from other files of the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

import rayvec
from rayvec.config import CONFIGS
from rayvec.config.schema import docs_of, fields_of

project = "rayvec"
author = "rayvec maintainers"
copyright = "2026, rayvec maintainers"
version = release = rayvec.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown", ".markdown": "markdown"}
exclude_patterns = ["_build", "generated/configuration-table.markdown"]

html_theme = "furo"
html_title = f"rayvec {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True
default_role = "code"

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GENERATED = DOCS / "generated"
# Links in the pages point to where a file is in the repository, so that they also work there. The site has copies.
PAGES = {
    "benchmarks/RESULTS.md": "results",
    "benchmarks/README.md": "measurements",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "tests/README.md": "testing",
}
written: set[Path] = set()
ORPHAN = "---\norphan: true\nnosearch: true\n---\n\n"
LINK = re.compile(r"(?<=\]\()(?!https?:|#|/)([\w./-]+)")


def write_configuration_table() -> None:
    """Writes the tables that ``configuration.md`` includes."""
    lines: list[str] = []
    for algorithm, cls in CONFIGS.items():
        lines += [f"## `rayvec train {algorithm}`", "", f"{cls.__name__}: {(cls.__doc__ or '').splitlines()[0]}", ""]
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        types = {}
        for base in reversed(cls.__mro__):
            types |= vars(base).get("__annotations__", {})
        for name, each in fields_of(cls).items():
            default = each.get_default(call_default_factory=True)
            shown = "unset" if default is None else default
            cells = (f"`{name}`", f"`{types[name]}`", f"`{shown}`", docs_of(cls)[name])
            lines.append("| " + " | ".join(cell.replace("|", r"\|").replace("<", r"\<") for cell in cells) + " |")
        lines.append("")
    write("configuration-table", "\n".join(lines))


def write_pages() -> None:
    """Copies `PAGES`, and each source file that a page links to, into the documentation."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        write(page, text)
    for path in {target for page in pages() for target in links(page) if target.suffix in (".py", ".sh")}:
        name = str(path.relative_to(ROOT))
        up = "../" * (name.count("/") + 2)
        language = "bash" if name.endswith(".sh") else "python"
        write(name, f"{ORPHAN}# {name}\n\n```{{literalinclude}} {up}{name}\n:language: {language}\n```\n")


def pages() -> list[Path]:
    """Returns the pages that are written by hand."""
    return [ROOT / source for source in PAGES] + [
        page for page in DOCS.rglob("*.md") if not page.is_relative_to(DOCS / "_build")
    ]


def links(page: Path) -> set[Path]:
    """Returns the files of the repository that a page links to."""
    return {(page.parent / link).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))}


def write(page: str, text: str) -> None:
    """Writes a generated page, unless it is there already: Sphinx then need not read it again."""
    path = GENERATED / f"{page}.markdown"
    written.add(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def remove_old_pages() -> None:
    """Removes pages whose source was moved since an earlier build: Sphinx would not find what they include."""
    for path in set(GENERATED.rglob("*.markdown")) - written:
        path.unlink()


def link_to_pages(app: Sphinx, docname: str, content: list[str]) -> None:
    """Lets links to files outside ``docs/`` lead to the pages that are generated from them."""
    sources = {page: ROOT / source for source, page in PAGES.items()}
    folder = sources.get(docname.removeprefix("generated/"), DOCS / docname).parent

    def moved(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        name = str(target.relative_to(ROOT)) if target.is_relative_to(ROOT) else ""
        if name in PAGES:
            return f"/generated/{PAGES[name]}.markdown"
        if target.suffix in (".py", ".sh"):
            return f"/generated/{name}.markdown"
        return "/" + os.path.relpath(target, DOCS) if target.exists() else link[1]

    content[0] = LINK.sub(moved, content[0])


def setup(app: Sphinx) -> None:
    """Registers the hook that resolves links."""
    app.connect("source-read", link_to_pages)


write_configuration_table()
write_pages()
remove_old_pages()
