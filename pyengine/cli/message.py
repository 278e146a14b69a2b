"""`pyengine message`: one message, by its id or its place in the log."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pyengine.cli import messages, output
from pyengine.cli.options import reading, store_command
from pyengine.errors import ExitCode, FormatError, UsageError
from pyengine.formats.record import decode_message_id


@click.command()
@store_command
@click.argument("msg_id")
def message(store: Path, settings: dict[str, str], as_json: bool, msg_id: str) -> int:
    """Show one message in full.

    MSG_ID is the id that a put answered with (32 or 56 hexadecimal characters), or the
    message's position in the commit log as a plain number. Exit code 1 if no message
    stands there.

    \b
    Examples:
      pyengine message STORE 7F00000100002A9F0000000000000000
      pyengine message STORE 0
    """
    position = _position(msg_id)
    with reading(store, settings) as reader:
        found = reader.message(msg_id) if position is None else reader.message_at(position)
    if found is None:
        print(f"no message {output.printable(msg_id)} in {store}", file=sys.stderr)
        if as_json:
            output.write_json(None)
        return ExitCode.FAILED
    if as_json:
        output.write_json(messages.message_document(found))
    else:
        messages.write_message(found)
    return ExitCode.OK


def _position(text: str) -> int | None:
    """A position in the log, None for a message id; UsageError for what is neither."""
    if len(text) < 20 and text.isascii() and text.isdecimal():
        return int(text)
    try:
        decode_message_id(text)
    except FormatError as error:
        raise UsageError(f"{error}; or give a position in the log, a plain number") from error
    return None
