"""The command line: `pyengine COMMAND STORE ...`, one file for a command or a family of commands.

main.py lists the commands, finds the one that is called, and turns errors into sentences and exit
codes; output.py is what the commands share.
"""
