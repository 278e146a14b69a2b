"""Two charts of `pyengine report`, drawn by the report's own code for an example of two days."""

from __future__ import annotations

import math
import re

from charts import legend
from pyengine.cli.output import number_text
from pyengine.cli.report import STYLE, Layer, bars, moment
from shapes import Picture

SIZE = (760, 478)
ALT = """Two charts from the page that pyengine report writes, for an example of two days: stacked bars of the messages in each
hour by topic, and the messages by the hour of the day. The page also has sizes, tables of topics and of the lags of consumer
groups."""
HOUR_MS = 3_600_000
BEGIN_MS = 20_454 * 24 * HOUR_MS
TOPICS = {"clicks": 41_000, "orders": 17_000, "bills": 6_000}  # messages in the busiest hour


def at_hour(hour: int, most: int) -> int:
    """More by day than by night, and more in the evening of the second day."""
    share = 0.55 - 0.45 * math.cos((hour % 24 - 3) / 12 * math.pi)
    return round(most * share * (1.25 if hour > 40 else 1) / 1.25)


def colours_of(is_dark: bool) -> dict[str, str]:
    """The variables of the report's style, of the light or the dark scheme."""
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    return dict(re.findall(r"--(\w+): (#\w+)", blocks[is_dark]))


def draw(p: Picture) -> None:
    colours = colours_of(p.is_dark)
    p.style(f"svg svg text{{font-size:13px;fill:{colours['soft']}}} .grid{{stroke:{colours['rule']}}} "
            " ".join(f".c{number}{{fill:{colours[f'c{number}']}}}" for number in range(3)))
    hours = range(48)
    layers = [Layer(topic, number, [at_hour(hour, most) for hour in hours]) for number, (topic, most) in enumerate(TOPICS.items())]
    p.text(20, 28, "Messages in each hour", 14, bold=True)
    legend(p, 28, 50, {topic: colours[f"c{number}"] for number, topic in enumerate(TOPICS)})
    p.part(20, 60, 720, 180, bars([moment(BEGIN_MS + hour * HOUR_MS, HOUR_MS) for hour in hours], layers, number_text, "Messages"))
    p.text(20, 272, "Messages by the hour of the day, UTC", 14, bold=True)
    sums = [sum(layer.values[hour] + layer.values[hour + 24] for layer in layers) for hour in range(24)]
    p.part(20, 284, 720, 180, bars([f"{hour:02d}" for hour in range(24)], [Layer("all", 0, sums)], number_text, "By hour"))
