# Finds a Java of version 17 or later, or gets one as a Python package. Sourced, never run.
#
#   use_java    exports JAVA_HOME; needs PYTHON (environment.sh). Returns 1, having said why, if there
#               is none and none can be had.
#
# How it is found, and what becomes of the package, stands in pyengine/spark/java.py.

java_finder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)/pyengine/spark/java.py

use_java() {
  local found
  found=$("$PYTHON" "$java_finder" --get) || return 1
  export JAVA_HOME=$found
}
