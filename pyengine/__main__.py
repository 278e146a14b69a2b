"""`python -m pyengine` is the `pyengine` command."""

from pyengine.cli.main import main

if __name__ == "__main__":
    main()
