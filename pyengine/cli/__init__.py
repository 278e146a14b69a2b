"""The command line: `pyengine COMMAND STORE ...`, one file for a command or a family of commands.

main.py lists the commands, runs the one that is named, and turns errors into messages and exit codes. output.py has what
the commands share.
"""
