"""Draws the figures of the documentation: ``python docs/images/draw.py`` writes an SVG file for each.

Each has a background of its own, so that it can be read on a light and on a dark page.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

INK, PAPER, LINE = "#1f2430", "#ffffff", "#5b6475"
DRIVER, NODE, WORKER, PLAIN, RANK = "#dbe9ff", "#fdf0d5", "#dff3e3", "#f3f4f6", "#f6e3f1"


class Figure:
    """An SVG of boxes, arrows and text."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title = (width, height), title
        self.parts: list[str] = []

    def box(self, x: int, y: int, w: int, h: int, text: str = "", fill: str = PLAIN, top: bool = False) -> None:
        """Draws a rounded box with one or more lines of text, in its middle or at its top; the first is bold."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="{fill}" stroke="{LINE}" stroke-width="1.5"/>'
        )
        lines = text.split("\n") if text else []
        first = y + 22 if top else y + h / 2 - 10 * (len(lines) - 1) + 5
        for i, line in enumerate(lines):
            self.text(x + w / 2, first + 20 * i, line, bold=i == 0)

    def text(
        self, x: float, y: float, text: str, bold: bool = False, anchor: str = "middle", small: bool = False
    ) -> None:
        """Writes one line of text."""
        weight = "600" if bold else "400"
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{14 if small else 15}" '
            f'font-weight="{weight}">{escape(text)}</text>'
        )

    def arrow(
        self, *points: tuple[int, int], text: str = "", at: tuple[int, int] | None = None, anchor: str = "middle"
    ) -> None:
        """Draws an arrow through the points, with a label at a place of its own."""
        path = " ".join(f"{'L' if i else 'M'}{x},{y}" for i, (x, y) in enumerate(points))
        self.parts.append(f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="2" marker-end="url(#head)"/>')
        if at:
            self.text(*at, text, anchor=anchor, small=True)

    def save(self, name: str) -> None:
        """Writes the file beside this script."""
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="system-ui, sans-serif" fill="{INK}"><title>{escape(self.title)}</title>\n'
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="{LINE}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>\n'
        )
        Path(__file__).with_name(name).write_text(head + "\n".join(self.parts) + "\n</svg>\n", encoding="utf-8")


def overview() -> None:
    """The picture of the README: a driver, nodes and workers."""
    figure = Figure(640, 330, "The driver collects chunks from the workers and publishes weights")
    figure.box(20, 20, 190, 290, "Driver", DRIVER, top=True)
    figure.box(38, 60, 154, 62, "Collector\njoins chunks")
    figure.box(38, 150, 154, 62, "Learner\nPPO, SAC, IMPALA")
    figure.box(38, 240, 154, 52, "Weights")
    figure.arrow((115, 122), (115, 148))
    figure.arrow((115, 212), (115, 238))
    for i, name in enumerate(("Node 1", "Node 2")):
        y = 20 + 150 * i
        figure.box(340, y, 280, 140, f"{name}: one process per core", NODE, top=True)
        for j in range(3):
            figure.box(354 + 88 * j, y + 38, 78, 88, "worker\npolicy\nenvs", WORKER)
    figure.arrow((338, 75), (194, 75), text="chunks", at=(272, 65))
    figure.arrow((338, 200), (290, 200), (290, 107), (194, 107))
    figure.arrow((194, 266), (314, 266), (314, 120), (338, 120))
    figure.arrow((314, 266), (338, 266), text="weights", at=(252, 286))
    figure.save("overview.svg")


def modes() -> None:
    """The two ways to use a cluster."""
    figure = Figure(640, 470, "The central and the decentralized mode")
    figure.text(24, 34, "Central", bold=True, anchor="start")
    figure.box(230, 52, 180, 56, "Driver\ncollects and learns", DRIVER)
    for i in range(3):
        figure.box(30 + 210 * i, 160, 160, 60, f"Node {i + 1}\nworkers sample", NODE)
    for node, driver in ((110, 246), (310, 310), (516, 376)):
        figure.arrow((node, 158), (driver, 110))
        figure.arrow((driver + 20, 110), (node + 20, 158))
    figure.text(128, 130, "chunks up", small=True)
    figure.text(528, 130, "weights down", small=True)
    figure.parts.append(f'<path d="M20,246 H620" stroke="{LINE}" stroke-dasharray="6 5"/>')
    figure.text(24, 278, "Decentralized", bold=True, anchor="start")
    for i in range(3):
        figure.box(30 + 210 * i, 300, 160, 80, f"Node {i + 1}\nworkers sample\nrank learns", RANK)
    for x in (192, 402):
        figure.arrow((x + 44, 340), (x, 340))
        figure.arrow((x, 340), (x + 44, 340))
    figure.text(320, 410, "gradients are summed over the ranks at every minibatch", small=True)
    figure.text(320, 440, "no chunk and no weight crosses the network", small=True)
    figure.save("modes.svg")


def pools() -> None:
    """Three levels of one contract."""
    figure = Figure(600, 260, "Fleets within fleets")
    figure.box(15, 15, 570, 230, "Cluster: a fleet of nodes, over the network", DRIVER, top=True)
    for i in range(2):
        x = 32 + 272 * i
        figure.box(x, 55, 262, 175, f"Machine: node {i + 1}", NODE, top=True)
        for j in range(2):
            figure.box(x + 14 + 120 * j, 95, 114, 120, "Slice\nworker\nenv env env", WORKER)
    figure.save("pools.svg")


def path(name: str, title: str, hops: list[tuple[int, str, str]], lanes: tuple[str, str, str]) -> None:
    """Draws one path: three lanes, one hop below the other; ``hops`` are lane, headline and module."""
    height = 40 + 92 * len(hops)
    figure = Figure(660, height, title)
    for i, (lane, fill) in enumerate(zip(lanes, (DRIVER, NODE, WORKER), strict=True)):
        figure.box(8 + 216 * i, 10, 210, height - 20, lane, fill, top=True)
    for i, (lane, headline, module) in enumerate(hops):
        x, y = 15 + 216 * lane, 48 + 92 * i
        figure.box(x, y, 196, 62, f"{i + 1}. {headline}\n{module}", PAPER)
        if i + 1 < len(hops):
            below = 15 + 216 * hops[i + 1][0]
            if below == x:
                figure.arrow((x + 98, y + 62), (x + 98, y + 90))
            else:
                figure.arrow((x + 98, y + 62), (x + 98, y + 77), (below + 98, y + 77), (below + 98, y + 90))
    figure.save(name)


def paths() -> None:
    """The three paths of the module map."""
    lanes = ("Driver", "Remote node", "Worker process")
    path(
        "path-action.svg",
        "An action on its way to a remote environment, and its observation on its way back",
        [
            (0, "actions are checked", "vector"),
            (0, "divided by node", "fleet.fleet"),
            (0, "sent", "cluster.stream"),
            (1, "received", "cluster.remote"),
            (1, "written to memory", "node.local_worker"),
            (2, "worker wakes up", "node.worker_main"),
            (2, "environment steps", "envs.slices"),
            (1, "rows are sent", "cluster.remote"),
            (0, "infos are merged", "fleet.fleet"),
            (0, "obs and infos", "vector"),
        ],
        lanes,
    )
    path(
        "path-chunk.svg",
        "A chunk on its way from a worker to a minibatch",
        [
            (2, "policy, envs step", "rollout.loop"),
            (2, "steps are recorded", "node.memory"),
            (1, "chunk of a machine", "cluster.node"),
            (0, "parts are joined", "data.chunk"),
            (0, "episodes counted", "collect.collector"),
            (0, "minibatch rows", "learners.ranks"),
            (0, "loss and gradient", "learners.ppo"),
        ],
        lanes,
    )
    path(
        "path-weights.svg",
        "Weights on their way from the optimizer to a worker",
        [
            (0, "the optimizer steps", "learners.optimizer"),
            (0, "one flat vector", "learners.actor_critic"),
            (0, "gets a version", "vector.chunks"),
            (0, "sent once", "cluster.remote"),
            (1, "copied to memory", "node.machine"),
            (2, "loaded for a chunk", "node.worker_main"),
        ],
        lanes,
    )


if __name__ == "__main__":
    overview()
    modes()
    pools()
    paths()
