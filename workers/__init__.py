"""One short main per process: `python -m workers.<kind> STORE`."""

# Others hold this package name on the package index: who imports `workers` checks this (worker.check_packages).
BELONGS_TO = "pyengine, the message log"
