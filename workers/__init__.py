"""One short main per process: `python -m pyengine.workers.<kind> STORE`; `pyengine/workers` is a link to this folder."""
