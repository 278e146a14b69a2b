"""Two charts of `pyengine report`, drawn by the report's own code from what it counted in a run (record.py)."""

from __future__ import annotations

import json
import re
from pathlib import Path

from charts import legend
from pyengine.cli.output import number_text
from pyengine.cli.report import HOUR_MS, STYLE, Layer, bars, moment
from shapes import Picture

SIZE = (760, 478)
ALT = """Two charts from the page that pyengine report writes: the messages of each hour of two days by topic, and those by the
hour of the day."""
COUNTED = json.loads((Path(__file__).parent / "report.json").read_text(encoding="utf-8"))  # topic, begin, messages of each hour


def colours_of(is_dark: bool) -> dict[str, str]:
    """The variables of the report's style, of the light or the dark scheme."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    return dict(re.findall(r"--(\w+): (#\w+)", blocks[is_dark]))


def draw(p: Picture) -> None:
    colours = colours_of(p.is_dark)
    p.style(f"svg svg text{{font-size:13px;fill:{colours['soft']}}} .grid{{stroke:{colours['rule']}}} "
            " ".join(f".c{number}{{fill:{colours[f'c{number}']}}}" for number in range(3)))
    layers = [Layer(topic, number, messages) for number, (topic, _, messages) in enumerate(COUNTED)]
    begin_ms, hours = COUNTED[0][1], len(COUNTED[0][2])
    p.text(20, 28, "Messages in each hour", 14, bold=True)
    legend(p, 28, 50, {layer.name: colours[f"c{layer.colour}"] for layer in layers})
    p.part(20, 60, 720, 180, bars([moment(begin_ms + hour * HOUR_MS, HOUR_MS) for hour in range(hours)], layers, number_text, "Messages"))
    p.text(20, 272, "Messages by the hour of the day, UTC", 14, bold=True)
    sums = [sum(sum(layer.values[hour::24]) for layer in layers) for hour in range(24)]
    p.part(20, 284, 720, 180, bars([f"{hour:02d}" for hour in range(24)], [Layer("all", 0, sums)], number_text, "By hour"))
