"""The `pyengine` command: runs a subcommand, and turns every error into one line and an exit code.

stdout has only the answer; logs, progress and errors go to stderr. An EngineError is one line with its own exit code
(PYENGINE_DEBUG=1 adds the traceback); with --json stdout then has `{"error": ...}`. Ctrl-C exits with 130 after the
command's clean-up. A reader that closes the pipe early, as `head` does, is not a failure. A command's module is imported only
when the command is called, so that `pyengine status` does not wait for the imports of `pyengine export`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
from importlib import import_module
from typing import Any, NoReturn

import click

import pyengine
from pyengine.cli import output
from pyengine.errors import EngineError, ExitCode, did_you_mean, os_error_sentence
from pyengine.formats.small_file import open_standard_streams

EPILOG = """\b
Exit codes: 0 ok, 1 failed, 2 usage, 3 corruption found, 4 repaired,
5 busy or locked, 6 degraded, 130 interrupted.

\b
A first run:
  pyengine start /tmp/store
  pyengine put /tmp/store --topic greetings "hello, world"
  pyengine get /tmp/store --topic greetings --queue-id 0 --offset 0
  pyengine status /tmp/store
  pyengine stop /tmp/store
"""


_SECTIONS = {  # section -> module and name of each command
    "Run a store": "engine.start serve.serve engine.wait engine.stop promote.promote engine.clean config.config plan.plan",
    "Put and read": "messages.put ingest.ingest messages.get messages.tail messages.cancel topics.topics topics.groups topics.dlq",
    "Look up": "messages.query messages.message messages.offset-at",
    "Watch": "status.status status.top why.why metrics.metrics spark_jobs.stats report.report",
    "Back up and copy": "backup.backup backup.restore spark_jobs.export backup.tables",
    "Check and repair": "repair.check repair.diff repair.recover repair.rebuild repair.salvage repair.quarantine",
    "For developers": "prove.prove bench.bench dump.inspect dump.dump",
}
SECTIONS = {section: [word.partition(".")[2] for word in words.split()] for section, words in _SECTIONS.items()}
COMMANDS = {name: module for words in _SECTIONS.values() for module, name in (word.split(".") for word in words.split())}


class Guarded(click.Command):
    """Makes sentences and exit codes of all errors of a command or a group."""

    def main(self, args: Any = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]  # click's returns where standalone_mode is off
        """Run one command and exit with its code; it does not return."""
        open_standard_streams()
        arguments = list(sys.argv[1:] if args is None else args)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        extra["standalone_mode"] = False
        code = int(self._guarded(arguments, prog_name or "pyengine", extra))
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # it was said, or there is no place to say it
                output.discard(stream)
        sys.exit(code)

    def _guarded(self, arguments: list[str], prog_name: str, extra: dict[str, Any]) -> int:
        as_json = "--json" in arguments
        try:
            code = super().main(arguments, prog_name, **extra)
            with output.to_its_end():
                return int(code or ExitCode.OK)
        except (BrokenPipeError, SystemExit):  # click's for one, in the middle of what it prints: the reader has what it wanted
            output.discard(sys.stdout)
            return ExitCode.OK
        except click.ClickException as error:
            with contextlib.suppress(OSError):
                error.show()
            _write_error(error, error.format_message(), ExitCode(error.exit_code), as_json)
            return error.exit_code
        except click.Abort:
            with contextlib.suppress(OSError):
                print("interrupted", file=sys.stderr)
            return ExitCode.INTERRUPTED
        except EngineError as error:
            _report(error, str(error), error.exit_code, as_json)
            return error.exit_code
        except OSError as error:
            _report(error, _why_failed(error), ExitCode.FAILED, as_json)
            return ExitCode.FAILED
        except MemoryError as error:
            _report(error, "not enough memory", ExitCode.FAILED, as_json)
            return ExitCode.FAILED


def _why_failed(error: OSError) -> str:
    """Return the sentence for what the system refused: of a full disk that no file is named for, it is stdout's."""
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return output.why_unwritten(error)
    return os_error_sentence(error)


class CommandLine(Guarded, click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self.command_of(cmd_name) if cmd_name in COMMANDS else None

    @staticmethod
    def command_of(name: str) -> click.Command:
        """Import and return a command."""
        command = getattr(import_module(f"pyengine.cli.{COMMANDS[name]}"), name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            known = did_you_mean(args[0], COMMANDS) or ": `pyengine --help` lists all commands"
            raise click.UsageError(f"no command {args[0]!r}{known}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, names in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, self.command_of(name).get_short_help_str(60)) for name in names])


def _report(error: BaseException, sentence: str, code: ExitCode, as_json: bool) -> None:
    if os.environ.get("PYENGINE_DEBUG"):
        import traceback

        traceback.print_exception(error)
    else:
        with contextlib.suppress(OSError):
            print(f"error: {output.printable(sentence)}", file=sys.stderr)
    _write_error(error, sentence, code, as_json)


def _write_error(error: BaseException, sentence: str, code: ExitCode, as_json: bool) -> None:
    if as_json:
        with contextlib.suppress(EngineError), output.to_its_end():  # the sentence is on stderr too
            output.write_json({"error": sentence, "kind": type(error).__name__, "exit_code": int(code)})


@click.group(cls=CommandLine, epilog=EPILOG,
             context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(pyengine.__version__, prog_name="pyengine")
@click.option("-v", "--verbose", count=True, help="Log more on stderr; twice for everything.")
def main(verbose: int) -> None:
    """A durable message log for one host, in the file format of the RocketMQ 4.9 store.

    STORE is the store's root directory, by default that in PYENGINE_STORE. Every command
    takes --set key=value, a setting for this run (`pyengine config explain` lists them;
    repeated for more), and --json for one document on stdout (top and tail: one each
    time) instead of tables. A TIME is ISO 8601 (UTC without a zone), or @ and ms since
    1970. A page that a text names (docs/cleaning.md) is in the package's folder docs.
    """
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not (verbose or sys.stderr.isatty()):  # elsewhere the error after the wait is the only line
        logging.getLogger("pyengine.client.wait").setLevel(logging.ERROR)
