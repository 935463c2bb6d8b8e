"""The documentation is true: its Python blocks run, its commands parse, its links and names lead somewhere."""

from __future__ import annotations

import importlib
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rayvec
from rayvec import cli
from rayvec.config import ADJUSTABLE

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] + [
    page for page in sorted(DOCS.rglob("*.md")) if not page.is_relative_to(DOCS / "_build")
]
NOT_RUN = "# Not run by the tests: "
NEEDS_RAY = ("rayvec.tianshou", "LearnerGroup")
SMALLER = (r"total_steps=[\d_]+", "total_steps=1_024, eval_episodes=2")
"""What is changed in every block, so that it takes seconds."""


class Block(NamedTuple):
    """A fenced block of a page."""

    info: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```([^\n`]*)\n(.*?)^```$", text, re.M | re.S)
    return [Block(fence[1], text[: fence.start()].count("\n") + 2, fence[2]) for fence in fences]


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.info.split()[:1] == ["python"]]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
every_page_with_code = pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=name_of)


def run_blocks(page: Path, skip: tuple[str, ...] = ()) -> None:
    """Runs the blocks of a page one after another, as one script, but those that name something of `skip`."""
    namespace: dict[str, Any] = {"__name__": f"page_{page.stem}"}
    for block in python_blocks(page):
        if not block.text.startswith(NOT_RUN) and not any(name in block.text for name in skip):
            text = "\n" * (block.line - 1) + re.sub(*SMALLER, block.text)
            exec(compile(text, str(page), "exec"), namespace)


@every_page_with_code
def test_python_blocks_run_without_ray(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RayVecEnv", "make_vec", "PPOConfig", "SACConfig", "IMPALAConfig"):
        monkeypatch.setattr(rayvec, name, partial(getattr(rayvec, name), num_nodes=0, workers_per_node=0))
    run_blocks(page, skip=NEEDS_RAY)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@every_page_with_code
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(page)


@every_page_with_code
def test_blocks_that_are_not_run_say_why(page: Path) -> None:
    for block in python_blocks(page):
        compile(block.text, str(page), "exec")
        assert ("notest" in block.info) == block.text.startswith(NOT_RUN), f"line {block.line}"


def commands(page: Path) -> list[str]:
    """Returns the shell commands of a page: lines of blocks that are not Python, and code in its text."""
    lines = [
        line
        for block in blocks(page)
        if not block.info.startswith("python")
        for line in re.sub(r"\\\n\s*", "", block.text).splitlines()
    ]
    lines += re.findall(r"^    (.+)$", prose(page), re.M)
    lines += [code for code in re.findall(r"`([^`\n]+)`", prose(page)) if " --" in code]
    return [re.sub(r"\s#.*", "", line).strip().removeprefix("$ ").removeprefix(".venv/bin/") for line in lines]


PLACEHOLDERS = {"ADDRESS": "127.0.0.1:6379", "RUN_DIR": "runs/first", "PATH": "prices.yaml"}


def done(*_: Any, **settings: Any) -> rayvec.TrainResult:
    """Stands for a run: the settings have been made, which checks them."""
    return rayvec.TrainResult(Path(), 0, 0.0, 0.0)


@every_page
def test_commands_parse(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option of ``rayvec`` fails here, and so does a target of make or a script that does not exist."""
    for name in ("train", "resume"):
        monkeypatch.setattr(f"rayvec.training.loop.{name}", done)
    monkeypatch.setattr("rayvec.training.run_dir.load_config", lambda path: rayvec.PPOConfig())
    for command_class in (cli.Eval, cli.Plot, cli.Doctor):
        monkeypatch.setattr(command_class, "run", lambda self: None)
    for name in ("scaling", "model"):
        monkeypatch.setattr(f"rayvec.bench.{name}.run", lambda settings: 0)
    targets = set(re.findall(r"^([.\w-]+):", (ROOT / "Makefile").read_text(), re.M)) | {"SEED=1", "MINUTES=10"}
    for command in commands(page):
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)]
        if words[:1] == ["rayvec"] and "..." not in command:
            try:
                code = cli.main(words[1:])
            except SystemExit as stop:
                code = stop.code
            assert code == 0, f"{command}\n{capsys.readouterr()}"
        elif words[:1] == ["make"]:
            assert set(words[1:]) <= targets, command
        elif words[:1] == ["python"] and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), command


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(prose(page)):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


@every_page
def test_names_of_rayvec_exist(page: Path) -> None:
    for name in sorted(set(re.findall(r"`(rayvec(?:\.\w+)+)", prose(page)))):
        value: Any = rayvec
        for i, part in enumerate(name.split(".")[1:], 2):
            module = ".".join(name.split(".")[:i])
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(module)


def test_modules_that_drawings_name_exist() -> None:
    named = {
        name
        for drawing in (DOCS / "images").glob("*.svg")
        for name in re.findall(r">([a-z_]+\.[a-z_]+)<", drawing.read_text())
    }
    assert "cluster.stream" in named
    assert [name for name in sorted(named) if not (ROOT / "rayvec" / f"{name.replace('.', '/')}.py").exists()] == []


def test_tests_that_pages_name_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))}
    assert not {name for name in named if f"def {name}(" not in sources}


def test_messages_that_the_page_on_failures_quotes_exist() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "rayvec").rglob("*.py"))
    quoted = re.findall("“(.+?)”", (DOCS / "failures.md").read_text(encoding="utf-8"))
    phrases = {re.sub(r"`.*", "", message).strip(". ") for message in quoted}
    assert phrases and not {phrase for phrase in phrases if phrase not in sources}


ODD_WORDS = re.compile(r"\b(whoever|nobody|somebody|made anew|by turns|in flight|under way|goes on|is told)\b", re.I)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "benchmarking.md"], ids=name_of)
def test_prose_is_plain_and_its_lines_are_short(page: Path) -> None:
    lines = prose(page).splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|") and "http" not in line]
    assert not ODD_WORDS.findall(prose(page))


def test_the_site_has_every_page() -> None:
    listed = "\n".join(
        (DOCS / name).read_text(encoding="utf-8").replace("generated/", "") for name in ("index.md", "decisions.md")
    )
    pages = {str(page.relative_to(DOCS)).removesuffix(".md") for page in PAGES if page.is_relative_to(DOCS)}
    assert not {page for page in pages - {"index"} if not re.search(rf"^{page}$", listed, re.M)}


def test_getting_started_names_what_may_change_on_resume() -> None:
    text = (ROOT / "docs" / "getting-started.md").read_text()
    flags = [f"`--{name.replace('_', '-')}`" for name in ADJUSTABLE]
    assert not [flag for flag in flags if flag not in text]
