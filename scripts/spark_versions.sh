#!/usr/bin/env bash
# Runs the tests of the data source with other versions of Spark, each in an environment of its own.
# usage: scripts/spark_versions.sh [VERSION...] [-- pytest arguments]     default: 4.0 4.1 4.2
#
# The environments lie in the checkout's own (.venv, or $PYENGINE_VENV) as spark-VERSION, a gigabyte each, and are made
# once. Exit 0: all versions passed. docs/spark.md says what each version cannot do.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
source "$here/environment.sh"
source "$here/java_home.sh"

versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in [0-9]*.[0-9]*) versions+=("$1") ;; *) give_up "usage: scripts/spark_versions.sh [VERSION...] [-- pytest arguments]" ;; esac
  shift
done
[ $# -eq 0 ] || shift
[ ${#versions[@]} -gt 0 ] || versions=(4.0 4.1 4.2)
base=${PYENGINE_VENV:-$checkout/.venv}
failed=()
for version in "${versions[@]}"; do
  (
    export PYENGINE_VENV=$base/spark-$version
    use_environment spark test
    use_java
    "$PYTHON" -c "import sys, pyspark; sys.exit(not (pyspark.__version__ + '.').startswith('$version.'))" 2>/dev/null ||
      run_logged "installing Spark $version" "$PYTHON" -m pip install --disable-pip-version-check "pyspark==$version.*"
    cd "$checkout"
    exec "$PYTHON" -m pytest --ci tests/spark "$@"
  ) || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || give_up "failed with Spark ${failed[*]}"
