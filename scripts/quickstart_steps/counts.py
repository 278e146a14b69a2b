"""Three counts for each topic, which the producers make while they put, and Spark afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

WORD = b"def "  # lines that hold it are counted too: that takes every byte of every body


@dataclass
class Count:
    """The counts of one topic."""

    messages: int = 0
    body_bytes: int = 0
    with_word: int = 0

    def add(self, bodies: Iterable[bytes]) -> None:
        for body in bodies:
            self.messages += 1
            self.body_bytes += len(body)
            self.with_word += WORD in body

    def __iadd__(self, other: Count) -> Count:
        self.messages += other.messages
        self.body_bytes += other.body_bytes
        self.with_word += other.with_word
        return self


Counts = dict[str, Count]


def to_plain(counts: Counts) -> dict[str, dict[str, int]]:
    return {topic: asdict(count) for topic, count in counts.items()}


def from_plain(plain: dict[str, dict[str, int]]) -> Counts:
    return {topic: Count(**count) for topic, count in plain.items()}


def add_up(all_counts: Iterable[Counts]) -> Counts:
    """Topic by topic."""
    total: Counts = {}
    for counts in all_counts:
        for topic, count in counts.items():
            total.setdefault(topic, Count()).__iadd__(count)
    return total


def count_with_spark(store: str) -> Counts:
    """The same from the store's files."""
    from pyengine.spark import session

    spark = session("quickstart")
    spark.read.format("pyengine").option("columns", "topic,value").load(store).createOrReplaceTempView("log")
    rows = spark.sql(
        "SELECT topic, count(*) AS messages, sum(length(value)) AS body_bytes, "
        f"count_if(contains(value, X'{WORD.hex()}')) AS with_word FROM log GROUP BY topic"
    ).collect()
    spark.stop()
    return {row["topic"]: Count(row["messages"], row["body_bytes"], row["with_word"]) for row in rows}
