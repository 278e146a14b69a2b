#!/usr/bin/env bash
# Runs the tests of the data source with other versions of Spark, each in an environment of its own.
# usage: scripts/spark_versions.sh [--page] [--once] [VERSION...] [-- pytest arguments]     default: 4.0 4.1 4.2
#
# --page writes into docs/spark.md what was run with which version, as pytest counts it. The environments lie in the
# checkout's own (.venv, or $PYENGINE_VENV) as spark-VERSION, a gigabyte each, and are made once; --once removes each
# when its tests are done. Exit 0: all versions passed. docs/spark.md says what each version cannot do.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
source "$here/environment.sh"
source "$here/java_home.sh"

page= once= versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --page) page=yes ;;
    --once) once=yes ;;
    [0-9]*.[0-9]*) versions+=("$1") ;;
    *) give_up "usage: scripts/spark_versions.sh [--page] [--once] [VERSION...] [-- pytest arguments]" ;;
  esac
  shift
done
[ $# -eq 0 ] || shift
[ ${#versions[@]} -gt 0 ] || versions=(4.0 4.1 4.2)
base=${PYENGINE_VENV:-$checkout/.venv}
results=$(mktemp) wanted=$(mktemp)
trap 'rm -f "$results" "$wanted"' EXIT

note_on_page() { # note_on_page pytest arguments...: what $results says, in the row of this version
  PYTHONPATH=$checkout/bench "$PYTHON" - "$checkout/docs/spark.md" "$results" "$*" <<'PYTHON'
import sys
from pathlib import Path
from xml.etree import ElementTree

import pyspark
from measure import markers, write_into

NAME, MAKER = "versions", "scripts/spark_versions.sh"
page, arguments = Path(sys.argv[1]), sys.argv[3]
suite = ElementTree.parse(sys.argv[2]).getroot().find("testsuite")
tests, failed, left_out = (int(suite.get(name)) for name in ("tests", "failures", "skipped"))
failed += int(suite.get("errors"))
begin, end = markers(NAME, MAKER)
rows = {line.split(": ")[0]: line for line in page.read_text().partition(begin)[2].partition(end)[0].splitlines()}
row = f"* {pyspark.__version__}, `pytest {arguments}`: {tests - failed - left_out} passed, {failed} failed, {left_out} left out"
rows[row.split(": ")[0]] = row  # by version and arguments
write_into(page, NAME, MAKER, "\n".join(rows[which] for which in sorted(rows)) + "\n")
PYTHON
}

failed=()
for version in "${versions[@]}"; do
  (
    export PYENGINE_VENV=$base/spark-$version
    printf 'pyspark==%s.*\n' "$version" >"$wanted"
    PIP_CONSTRAINT=$wanted use_environment spark test
    use_java
    "$PYTHON" -c "import sys, pyspark; sys.exit(not (pyspark.__version__ + '.').startswith('$version.'))" ||
      give_up "$PYENGINE_VENV has another Spark: remove it"
    cd "$checkout"
    status=0
    "$PYTHON" -m pytest --junitxml "$results" --ci tests/spark "$@" || status=$?
    [ -z "$page" ] || note_on_page --ci tests/spark "$@"
    exit "$status"
  ) || failed+=("$version")
  [ -z "$once" ] || rm -rf "$base/spark-$version"
done
[ ${#failed[@]} -eq 0 ] || give_up "failed with Spark ${failed[*]}"
