# What the crash scripts share. Sourced, never run.
#
#   use_project             sets PYTHON, and PYTHONPATH so that `python -m crash.kills` and the engine are found
#   use_failpoint_build     the same with a build of its own, for as long as the script runs, that has the failpoints in C
#   list_victims            sets the array victims: "KIND MODE..." for each kind of process that crash.sh kills
#   rounds_main MODULE "$@" the body of a script that runs a module of scripts/crash
#   run_part COMMAND...     one of several runs of a script: its exit code. Ctrl-C and SIGTERM end it and the script,
#                           and so does a run that was interrupted or does not understand its arguments

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
source "$scripts/environment.sh"

needed_modules=click,posix_ipc,psutil,rich,sysv_ipc,pyengine._native

# The Python that runs the project: $PYTHON, the active environment's, python3 on PATH, whichever has what it
# takes; else the checkout's own environment (made on first use).
use_project() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} python3; do
    if (cd / && PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH} "$candidate" -c "import $needed_modules") >/dev/null 2>&1; then
      PYTHON=$candidate
      export PYTHON PYTHONPATH=$checkout:$scripts${PYTHONPATH:+:$PYTHONPATH}
      return 0
    fi
  done
  use_environment spark test
  export PYTHONPATH=$checkout:$scripts${PYTHONPATH:+:$PYTHONPATH}
}

# Ctrl-C does not wait for the removal of the build, which takes seconds on a busy disk: it ends by itself, after the script.
use_failpoint_build() {
  use_project
  failpoint_build=$(mktemp -d -t pyengine-failpoints-XXXXXX)
  trap 'setsid rm -rf "$failpoint_build" </dev/null >/dev/null 2>&1 &' EXIT
  cp -a "$checkout"/{pyengine,workers,scripts,setup.py,pyproject.toml} "$failpoint_build" # -a: what is compiled stays newer
  ln -s "$checkout"/{csrc,tests} "$failpoint_build"
  rm -f "$failpoint_build"/pyengine/_native*.so
  (cd "$failpoint_build" && PYENGINE_BUILD_FAILPOINTS=1 "$PYTHON" setup.py -q build_ext --inplace) >"$failpoint_build/build.log" 2>&1 ||
    { tail -n 40 "$failpoint_build/build.log" >&2; give_up "the build with failpoints failed"; }
  export PYTHONPATH=$failpoint_build:$failpoint_build/scripts
}

list_victims() {
  local lines
  lines=$("$PYTHON" -P -c 'from crash.rounds import VICTIMS
for kind, modes in VICTIMS.items(): print(kind, *modes)')
  mapfile -t victims <<< "$lines"
}

rounds_main() {
  use_project
  local module=$1
  shift
  export PYENGINE_SCRIPT=${0##*/} # for --help and errors
  exec "$PYTHON" -P -m "crash.$module" "$@"
}

run_part() {
  local before=${!:-} code=0 # the trap is set first: a signal that comes as soon as the run has begun ends it too
  trap 'if [ "${!:-}" != "$before" ]; then kill -TERM "$!" 2>/dev/null || true; wait "$!" || true; fi; exit 130' INT TERM
  "$@" &
  wait "$!" || code=$?
  trap - INT TERM
  case $code in 2 | 130) exit "$code" ;; esac
  return "$code"
}
