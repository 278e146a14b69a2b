# What the crash scripts share. Sourced, never run.
#
#   use_project             sets PYTHON, and PYTHONPATH so that `python -m crash.rounds` and the engine are found
#   crash_main KIND "$@"    the body of crash_<kind>.sh

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
source "$scripts/environment.sh"

needed_modules=click,msgspec,posix_ipc,psutil,rich,sysv_ipc,pyengine._native

# The Python that runs the project: $PYTHON, the active environment's, python3 on PATH, whichever has what it
# takes; else the checkout's own environment (made on first use).
use_project() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} python3; do
    if (cd / && PYTHONPATH=$checkout "$candidate" -c "import $needed_modules") >/dev/null 2>&1; then
      PYTHON=$candidate
      export PYTHON PYTHONPATH=$checkout:$scripts${PYTHONPATH:+:$PYTHONPATH}
      return 0
    fi
  done
  use_environment spark test
  export PYTHONPATH=$checkout:$scripts${PYTHONPATH:+:$PYTHONPATH}
}

crash_main() {
  use_project
  exec "$PYTHON" -P -m crash.rounds "$@"
}
