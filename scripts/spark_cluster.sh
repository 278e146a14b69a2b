#!/usr/bin/env bash
# A Spark standalone cluster on this host, made of the pip package: a master and workers, loopback only.
# usage: scripts/spark_cluster.sh [--workers N] [--cores N] [--memory SIZE] [--folder DIR] [COMMAND [ARGUMENT...]]
#
# Without COMMAND it prints the master's address and runs until Ctrl-C. With one it sets PYENGINE_SPARK_MASTER,
# where `pyengine.spark.session()` and the commands that use Spark then run, and ends with the command, whose
# exit code it returns. Nothing remains either way; logs and the workers' files lie in DIR if one is named.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
source "$here/lib.sh"
source "$here/java_home.sh"
needed_modules+=,pyspark,pyarrow
use_project
use_java || give_up "Spark needs Java 17 or later"
exec "$PYTHON" -P -m spark_cluster "$@"
