#!/usr/bin/env bash
# Builds the wheel with each Python from 3.11 on, installs it into an environment of another one, and runs an engine there.
# usage: scripts/python_versions.sh [PYTHON...]     default: each of python3.11 to python3.14 on PATH and in ~/.pyenv/versions
#
# The wheel is tagged cp311-abi3: the one that any of them builds must run on all. What it needs comes from the package
# registry. Exit 0: every Python built it and ran another one's.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
source "$here/environment.sh"

pythons=("$@")
if [ ${#pythons[@]} -eq 0 ]; then
  for version in 3.11 3.12 3.13 3.14; do
    for candidate in "python$version" ~/.pyenv/versions/"$version".*/bin/"python$version"; do
      if "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1; then pythons+=("$candidate") && break; fi
    done
  done
fi
[ ${#pythons[@]} -gt 0 ] || give_up "no Python of 3.11 to 3.14 with the venv module was found: name one"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log
quietly() { "$@" >"$log" 2>&1 || { tail -n 40 "$log" >&2; give_up "$* failed"; }; }

mkdir "$work/source"
tar -C "$checkout" --exclude='*.so' --exclude=__pycache__ -cf - \
  csrc pyengine pyspark_pyengine pyspark_pyengine_queue.py workers setup.py pyproject.toml MANIFEST.in README.md LICENSE |
  tar -C "$work/source" -xf -

wheels=()
for index in "${!pythons[@]}"; do
  quietly "${pythons[$index]}" -m venv "$work/env-$index"
  quietly "$work/env-$index/bin/python" -m pip wheel --disable-pip-version-check --no-deps -w "$work/wheel-$index" "$work/source"
  rm -rf "$work/source/build"
  wheels+=("$work/wheel-$index"/*.whl)
  case ${wheels[$index]} in *-cp311-abi3-*.whl) ;; *) give_up "${pythons[$index]} built ${wheels[$index]##*/}, no cp311-abi3" ;; esac
done
for index in "${!pythons[@]}"; do
  builder=$(((index + 1) % ${#pythons[@]}))
  python=$work/env-$index/bin/python store=$work/store-$index
  quietly "$python" -m pip install --disable-pip-version-check "${wheels[$builder]}"
  cd "$work" # not the checkout: the interpreter would find its packages first
  quietly "$python" -m pyengine start "$store" --set mapped_file_size_commit_log_bytes=1MiB
  quietly "$python" -m pyengine put "$store" --topic orders "one apple"
  quietly "$python" -m pyengine stop "$store"
  quietly "$python" -m pyengine get "$store" --topic orders --queue-id 0 --offset 0
  grep -q "one apple" "$log" || give_up "${pythons[$index]} did not read the message back"
  quietly "$python" -m pyengine check "$store"
  printf '%s ran the wheel that %s built\n' "$("$python" -V)" "$("$work/env-$builder/bin/python" -V)"
done
