"""A store as a table, running or not: python examples/spark_read.py STORE   (pip install 'pyengine-store[spark]', Java 17 or later)"""

import sys

import pyengine.spark


def main(store: str) -> None:
    spark = pyengine.spark.session()
    log = spark.read.format("pyengine").option("columns", "topic,partition,offset,size,value").load(store)
    log.createOrReplaceTempView("log")
    spark.sql("""
        SELECT topic, partition AS queue, count(*) AS messages, sum(size) AS bytes
        FROM log GROUP BY topic, partition ORDER BY topic, partition
    """).show(truncate=False)
    spark.sql("""
        SELECT word, count(*) AS times
        FROM (SELECT explode(split(cast(value AS STRING), '[^A-Za-z]+')) AS word FROM log)
        WHERE length(word) > 3 GROUP BY word ORDER BY times DESC, word LIMIT 10
    """).show(truncate=False)
    spark.stop()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
