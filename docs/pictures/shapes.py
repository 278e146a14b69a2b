"""Boxes, arrows and text as SVG, in a light and a dark scheme.

Text is laid out by the widths of Helvetica and drawn with `textLength`, so it takes the measured room in every reader's font. A text
that is wider than its box, outside the picture or over another text is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

SCHEMES = {
    "light": {"paper": "#ffffff", "ink": "#1f2328", "muted": "#57606a", "line": "#6e7781",
              "grey": "#f6f8fa", "blue": "#ddf4ff", "green": "#dafbe1", "yellow": "#fff8c5", "red": "#ffebe9", "purple": "#fbefff",
              "paper_edge": "#6e7781", "grey_edge": "#6e7781", "blue_edge": "#0969da", "green_edge": "#1a7f37", "yellow_edge": "#8a5d00",
              "red_edge": "#c21c2a", "purple_edge": "#8250df"},
    "dark": {"paper": "#0d1117", "ink": "#e6edf3", "muted": "#a5afba", "line": "#8b949e",
             "grey": "#1a2029", "blue": "#10233f", "green": "#0f2d1a", "yellow": "#332a0b", "red": "#3c1618", "purple": "#271a3d",
             "paper_edge": "#8b949e", "grey_edge": "#8b949e", "blue_edge": "#79b8ff", "green_edge": "#56d364", "yellow_edge": "#e3b341",
             "red_edge": "#ff8f87", "purple_edge": "#c8a2ff"},
}
FILLS = ("paper", "grey", "blue", "green", "yellow", "red", "purple")
SANS = "Helvetica, Arial, 'Liberation Sans', sans-serif"
MONO = "ui-monospace, Menlo, Consolas, 'Liberation Mono', monospace"
PAD = 12  # left and right of a text in its box, together
_GROUPS = {"'": 191, "ijl": 222, "|": 260, " !,./:;[]\\ftI": 278, "()-`r": 333, '"': 355, "*": 389, "ckszvxyJ": 500, "+<=>~": 584,
           "FTZ": 611, "ABEKPSVXY&": 667, "wCDHNRU": 722, "GOQ": 778, "mM": 833, "%": 889, "W": 944, "@": 1015}
WIDTHS = {letter: width for letters, width in _GROUPS.items() for letter in letters}  # of Helvetica, in 1/1000 em; all others have 556


def width_of(text: str, size: float = 13, mono: bool = False, bold: bool = False) -> float:
    if mono:
        return 0.602 * size * len(text)
    return sum(WIDTHS.get(letter, 556) for letter in text) * size / 1000 * (1.07 if bold else 1)


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float

    @property
    def left(self) -> tuple[float, float]:
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width, self.y + self.height / 2

    @property
    def top(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height

    def meets(self, other: Box) -> bool:
        return (self.x < other.x + other.width and other.x < self.x + self.width
                and self.y < other.y + other.height and other.y < self.y + self.height)


class Picture:
    """One picture in one scheme; coordinates are pixels from the upper left."""

    def __init__(self, width: int, height: int, alt: str, scheme: str) -> None:
        self.width, self.height, self._alt, self._colours = width, height, alt, SCHEMES[scheme]
        self._shapes: list[str] = []
        self._texts: list[tuple[Box, str]] = []
        self._markers: set[str] = set()
        self._styles: list[str] = []
        self.is_dark = scheme == "dark"

    def colour(self, name: str) -> str:
        """That of a name, or of its value as it is."""
        return name if name.startswith("#") else self._colours[name]

    def text(self, x: float, y: float, text: str, size: float = 13, *, anchor: str = "start", colour: str = "ink",
             bold: bool = False, mono: bool = False) -> Box:
        """One line whose baseline is at `y`."""
        width = width_of(text, size, mono, bold)
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        place = Box(left, y - 0.75 * size, width, size)
        if left < 0 or left + width > self.width or place.y < 0 or y > self.height:
            raise ValueError(f"{text!r} is outside the picture")
        for other, said in self._texts:
            if place.meets(other):
                raise ValueError(f"{text!r} is drawn over {said!r}")
        self._texts.append((place, text))
        if "  " in text:
            text = text.replace(" ", "\u00a0")  # a row of spaces counts as one
        style = (' font-weight="600"' if bold else "") + (f' font-family="{MONO}"' if mono else "")
        self._shapes.append(f'<text x="{left:.1f}" y="{y:g}" font-size="{size:g}" textLength="{width:.1f}" '
                            f'lengthAdjust="spacingAndGlyphs" fill="{self.colour(colour)}"{style}>{escape(text)}</text>')
        return place

    def box(self, x: float, y: float, width: float, height: float, *lines: str, fill: str = "grey", size: float = 13,
            dashed: bool = False, title: bool = True) -> Box:
        """A rectangle with its lines in the middle; the first is bold, one that begins with ` is code."""
        self.rect(x, y, width, height, fill, edge=f"{fill}_edge", radius=6, dashed=dashed)
        step = size + 4
        baseline = y + height / 2 - step * (len(lines) - 1) / 2 + 0.35 * size
        if step * len(lines) > height:
            raise ValueError(f"{lines[0]!r} and what follows is higher than its box")
        for number, line in enumerate(lines):
            mono, bold = line.startswith("`"), title and not number
            line = line.removeprefix("`")
            small = size if bold else size - 1
            if width_of(line, small, mono, bold) > width - PAD:
                raise ValueError(f"{line!r} is {width_of(line, small, mono, bold):.0f} wide, its box {width}")
            self.text(x + width / 2, baseline + number * step, line, small, anchor="middle", bold=bold, mono=mono)
        return Box(x, y, width, height)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, *, edge: str = "", radius: float = 0,
             dashed: bool = False) -> None:
        stroke = f' stroke="{self.colour(edge)}"' if edge else ""
        self._shapes.append(f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" fill="{self.colour(fill)}"{stroke}'
                            + (f' rx="{radius:g}"' if radius else "") + (' stroke-dasharray="5 3"' if dashed else "") + "/>")

    def dot(self, x: float, y: float, colour: str, radius: float = 3) -> None:
        self._shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{self.colour(colour)}" '
                            f'stroke="{self.colour("paper")}" stroke-width="0.7"/>')

    def line(self, *points: Sequence[float], colour: str = "line", dashed: bool = False, head: bool = False, width: float = 1.3) -> None:
        """Through all points; with an arrow's head at the last."""
        marker = ""
        if head:
            self._markers.add(colour)
            marker = f' marker-end="url(#{colour})"'
        path = " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
        self._shapes.append(f'<polyline points="{path}" fill="none" stroke="{self.colour(colour)}" stroke-width="{width:g}"'
                            + (' stroke-dasharray="5 3"' if dashed else "") + marker + "/>")

    def arrow(self, *points: Sequence[float], label: str = "", colour: str = "line", dashed: bool = False, above: float = 5) -> None:
        """With its label over the middle of the first part."""
        self.line(*points, colour=colour, dashed=dashed, head=True)
        if label:
            (x, y), (right, below) = points[:2]
            self.text((x + right) / 2, (y + below) / 2 - above, label, 12, anchor="middle", colour="muted")

    @contextmanager
    def appearing(self, at_s: float) -> Iterator[None]:
        """What is drawn inside appears after that time; at once for a reader who wants no motion."""
        self.style("@keyframes appear{from{visibility:hidden}}\n"
                   "@media (prefers-reduced-motion:no-preference){.late{animation:appear 1ms both}}")
        self._shapes.append(f'<g class="late" style="animation-delay:{at_s:.2f}s">')
        yield
        self._shapes.append("</g>")

    def style(self, rules: str) -> None:
        """Add rules of CSS, once."""
        if rules not in self._styles:
            self._styles.append(rules)

    def part(self, x: float, y: float, width: float, height: float, svg: str) -> None:
        """Place a whole <svg> that other code has drawn, stretched to the size."""
        self._shapes.append(svg.replace("<svg ", f'<svg x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" ', 1))

    def svg(self) -> str:
        markers = "".join(
            f'<marker id="{colour}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0,0.5 L8,4 L0,7.5 z" fill="{self.colour(colour)}"/></marker>' for colour in sorted(self._markers))
        body = "\n".join(self._shapes)
        style = f"<style>{' '.join(self._styles)}</style>\n" if self._styles else ""
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
                f'viewBox="0 0 {self.width} {self.height}" role="img" aria-label={quoteattr(self._alt)} font-family="{SANS}">\n'
                f"{style}<defs>{markers}</defs>\n"
                f'<rect width="{self.width}" height="{self.height}" rx="8" fill="{self.colour("paper")}"/>\n{body}\n</svg>\n')
