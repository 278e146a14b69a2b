# One Python environment for the scripts of this checkout. Sourced, never run.
#
#   use_environment EXTRAS...    makes or reuses the environment, exports PYTHON, VIRTUAL_ENV and PATH
#
# Where: $PYENGINE_VENV, else .venv of the checkout. What: the project itself, editable, with the
# extras named, and the C module built. A second call with nothing changed costs two checksums: the
# packages are installed again only when pyproject.toml (or the set of extras) changed, the C module
# is built again only when csrc or setup.py changed. Killed half-way, the next call does it again,
# because each stamp is written last.

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

note() { printf '%s\n' "$*" >&2; }
give_up() { note "${0##*/}: $*"; exit 1; }

# What a Python lacks to make environments and to build the C module, as packages of Debian and Ubuntu; fails before 3.11.
lacks='import os, sys, sysconfig
sys.exit(1) if sys.version_info < (3, 11) else None
name = "python%d.%d" % sys.version_info[:2]
try:
    import venv, ensurepip
except ImportError:
    print("its module venv with ensurepip (%s-venv)" % name)
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    print("its headers, Python.h (%s-dev)" % name)'

# Sets `base` to the first Python of version 3.11 or later that lacks nothing, else `missing_python` to a sentence.
find_python() {
  local candidate lacking
  base='' missing_python=''
  for candidate in ${PYENGINE_PYTHON:+"$PYENGINE_PYTHON"} python3.11 python3.12 python3.13 python3.14 python3 python; do
    lacking=$("$candidate" -c "$lacks" 2>/dev/null) || continue
    if [ -z "$lacking" ]; then
      base=$("$candidate" -c 'import sys; print(sys.executable)')
      return
    fi
    missing_python=${missing_python:-"$candidate lacks ${lacking//$'\n'/ and }: install what is in brackets (on Debian and Ubuntu), \
or name another Python with PYENGINE_PYTHON=/path/to/python3"}
  done
  missing_python=${missing_python:-"no Python 3.11 or later with the venv module was found: install one (on Debian and Ubuntu: \
python3.11 python3.11-venv python3.11-dev), or name it with PYENGINE_PYTHON=/path/to/python3"}
}

# Ends, before anything is made, with a sentence for each thing that the machine lacks. $1: the Python of the environment, if there is one.
require_tools() {
  local missing=() lacking
  if [ -n "$1" ]; then
    lacking=$("$1" -c "$lacks")
    case $lacking in
      *headers*) missing+=("$1 lacks its headers${lacking##*its headers}: install what is in brackets (on Debian and Ubuntu)") ;;
    esac
  else
    find_python
    [ -n "$base" ] || missing+=("$missing_python")
  fi
  command -v "${CC:-cc}" >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 ||
    missing+=("no C compiler was found: install one (on Debian and Ubuntu: gcc libc6-dev), or name it with CC=/path/to/compiler")
  [ ${#missing[@]} -eq 0 ] && return
  printf "${0##*/}: %s\n" "${missing[@]}" >&2
  exit 1
}

packages_digest() { (cd "$checkout" && { cat pyproject.toml; ls -d */__init__.py; } | sha256sum | cut -c1-32); }
native_digest() { (cd "$checkout" && cat setup.py pyengine/engine_config.py csrc/*.py csrc/*.h csrc/*.c csrc/front/* | sha256sum | cut -c1-32); }

run_logged() { # run_logged WHAT command...: quiet on success, the whole log on failure
  local what=$1 log=$VIRTUAL_ENV/pyengine-setup.log
  shift
  note "$what ..."
  if ! "$@" >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    give_up "$what failed; the lines above say why, all of it is in $log"
  fi
}

are_among() { # are_among "a,b" "-a-b-c-"
  local extra
  for extra in ${1//,/ }; do
    case $2 in *"-$extra-"*) ;; *) return 1 ;; esac
  done
}

install_packages() { # $1 = extras joined by commas
  local stamp=$VIRTUAL_ENV/pyengine-packages-${1//,/-}-.stamp wanted found
  wanted="$checkout $(packages_digest)"
  for found in "$VIRTUAL_ENV"/pyengine-packages-*.stamp; do
    are_among "$1" "${found#*packages}" && [ "$(cat "$found" 2>/dev/null)" = "$wanted" ] && return 0
  done
  run_logged "installing pyengine[$1] and what it needs into $VIRTUAL_ENV" \
    env -C "$checkout" "$PYTHON" -m pip install --disable-pip-version-check --editable ".[$1]" 'setuptools>=77' wheel
  rm -f "$VIRTUAL_ENV/pyengine-native.stamp"
  printf '%s\n' "$wanted" >"$stamp"
}

build_native() {
  local stamp=$VIRTUAL_ENV/pyengine-native.stamp wanted
  wanted="$checkout ${PYENGINE_SANITIZE:-} $(native_digest)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && ls "$checkout"/pyengine/{_native*.so,{_native,_settings}.pyi,_front*.so} >/dev/null 2>&1; then
    return 0
  fi
  run_logged "building the C module" env -C "$checkout" "$PYTHON" setup.py -q build_ext --inplace --force
  printf '%s\n' "$wanted" >"$stamp"
}

# Compiled once here, not by each worker at each start where PYTHONDONTWRITEBYTECODE is set: that doubles the time of a start.
compile_python() {
  "$PYTHON" -m compileall -q "$checkout/pyengine" "$checkout"/pyspark_pyengine* >/dev/null 2>&1 || true # a checkout that is only read
}

use_environment() {
  local base='' missing_python extras has_python=''
  extras=$(IFS=,; echo "$*")
  VIRTUAL_ENV=${PYENGINE_VENV:-$checkout/.venv}
  case $VIRTUAL_ENV in /*) ;; *) VIRTUAL_ENV=$PWD/$VIRTUAL_ENV ;; esac
  PYTHON=$VIRTUAL_ENV/bin/python
  if "$PYTHON" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then has_python=$PYTHON; fi
  require_tools "$has_python"
  if [ -z "$has_python" ]; then
    note "making an environment in $VIRTUAL_ENV with $base ..."
    rm -f "$VIRTUAL_ENV"/pyengine-*.stamp
    "$base" -m venv --clear "$VIRTUAL_ENV" ||
      give_up "cannot make an environment in $VIRTUAL_ENV: name another place with PYENGINE_VENV"
  fi
  export VIRTUAL_ENV PYTHON PATH=$VIRTUAL_ENV/bin:$PATH
  if command -v flock >/dev/null 2>&1; then # two scripts at once: the second waits for the first
    exec 9>"$VIRTUAL_ENV/pyengine-setup.lock"
    flock 9
  fi
  install_packages "$extras"
  build_native
  compile_python
  exec 9>&-
}
