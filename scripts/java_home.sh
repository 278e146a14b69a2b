# Finds a Java of version 17 or later, or gets one as a Python package. Sourced, never run.
#
#   use_java    exports JAVA_HOME; needs PYTHON (environment.sh). Returns 1, having said why, if there
#               is none and none can be had.
#
# pyengine/spark/java.py finds it, and gets the package.

java_finder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)/pyengine/spark/java.py

use_java() {
  local found
  found=$("$PYTHON" "$java_finder" --get) || return 1
  export JAVA_HOME=$found
}
