"""One short main per process."""
