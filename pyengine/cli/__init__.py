"""The command line: `pyengine COMMAND STORE ...`, one file per command.

main.py finds the command and turns errors into sentences and exit codes;
command_table.py lists the commands; options.py, output.py, progress.py and
messages.py are what they share.
"""
