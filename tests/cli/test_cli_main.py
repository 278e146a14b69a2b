"""What holds for every command: help, exit codes, sentences for errors, one JSON document, quiet pipes."""

from __future__ import annotations

import re
import subprocess

import click
import pytest

from fix_cli import SOURCES, command_line, environment, run, spawn
from fix_golden import usual
from logs import LogBuilder
from pyengine import errors
from pyengine.cli import output
from pyengine.cli.main import COMMANDS, CommandLine, main
from reference import PAGES
from waiting import scaled_timeout_s


def leaf_commands():
    """Every command that does something: its words and itself."""
    context = click.Context(main)
    for word in COMMANDS:
        command = main.get_command(context, word)
        if isinstance(command, click.Group):
            yield from (pytest.param([word, name], child, id=f"{word} {name}") for name, child in command.commands.items())
        else:
            yield pytest.param([word], command, id=word)


@pytest.mark.parametrize(("words", "command"), list(leaf_commands()))
def test_every_command_teaches_with_an_example_and_documents_its_options(words, command):
    ran = run(*words, "--help")
    assert ran.code == 0
    assert re.search(r"Examples?:\n +\S*.*pyengine " + " ".join(words), ran.stdout)
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.help, param.name


def test_each_line_of_the_list_of_commands_is_whole():
    assert not [line for line in run("--help").stdout.splitlines()[1:] if line.endswith("...")]


@pytest.mark.parametrize(("words", "command"), list(leaf_commands()))
def test_every_command_speaks_json_and_takes_settings(words, command):
    names = {name for param in command.params for name in param.opts}
    assert {"--json", "--set"} <= names


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_are_up_to_date(name):
    """If this fails: python scripts/reference.py docs"""
    assert (SOURCES / "docs" / name).read_text(encoding="utf-8") == PAGES[name]()


def test_an_unknown_command_offers_the_nearest_and_is_a_usage_error():
    ran = run("confg")
    assert ran.code == 2 and ran.stdout == "" and "did you mean config?" in ran.stderr


@pytest.mark.parametrize("arguments", [
    ["config", "explain", "--no-such-option"], ["config", "nothing"], ["config", "explain", "a", "b"],
])
def test_wrong_arguments_are_usage_errors(arguments):
    ran = run(*arguments)
    assert ran.code == 2 and ran.stdout == "" and ran.stderr


@pytest.fixture
def failing(monkeypatch):
    """A command `fail` that raises what the test wants."""
    def command_that(raises):
        @click.command("fail")
        @click.option("--json", "as_json", is_flag=True)
        def fail(as_json):
            raise raises

        monkeypatch.setattr(CommandLine, "get_command", lambda self, ctx, name: fail)
        monkeypatch.setattr("pyengine.cli.main.COMMANDS", {"fail": ""})
    return command_that


ENGINE_ERRORS = [kind for kind in vars(errors).values()
                 if isinstance(kind, type) and issubclass(kind, errors.EngineError)]


@pytest.mark.parametrize("kind", ENGINE_ERRORS, ids=lambda kind: kind.__name__)
def test_an_engine_error_is_one_line_and_its_exit_code(failing, kind):
    failing(kind("the log\x1b[2J is gone"))
    ran = run("fail")
    assert ran.code == int(kind.exit_code)
    assert ran.stdout == "" and ran.stderr == "error: the log\\x1b[2J is gone\n"


def test_with_json_an_error_is_a_document_too(failing):
    failing(errors.StoreBusyError("another process owns it"))
    ran = run("fail", "--json")
    assert ran.code == 5
    assert ran.document == {"error": "another process owns it", "kind": "StoreBusyError", "exit_code": 5}


def test_debug_shows_the_traceback(failing, monkeypatch):
    monkeypatch.setenv("PYENGINE_DEBUG", "1")
    failing(errors.StoreBusyError("another process owns it"))
    ran = run("fail")
    assert ran.code == 5 and "Traceback" in ran.stderr and "another process owns it" in ran.stderr


def test_an_operating_system_error_names_the_path(failing):
    failing(PermissionError(13, "Permission denied", "/some/where"))
    ran = run("fail")
    assert (ran.code, ran.stderr) == (1, "error: /some/where: Permission denied\n")


def test_want_of_memory_is_a_sentence(failing):
    failing(MemoryError())
    ran = run("fail")
    assert (ran.code, ran.stderr) == (1, "error: not enough memory\n")


def test_an_interrupt_ends_with_130(failing):
    failing(KeyboardInterrupt())
    ran = run("fail")
    assert ran.code == 130 and "interrupted" in ran.stderr and "Traceback" not in ran.stderr


def test_a_broken_promise_of_ours_is_not_hidden(failing):
    failing(errors.InvariantError("two writers"))
    with pytest.raises(errors.InvariantError):
        run("fail")


@pytest.mark.parametrize("words", [["config", "explain"], ["--help"], ["--version"], ["status", "--help"]], ids=" ".join)
def test_a_closed_pipe_is_quiet(words):
    process = subprocess.Popen(command_line(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=environment())
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=scaled_timeout_s(60)) == 0, "nothing failed"


@pytest.mark.parametrize("words, code", [(["config", "explain", "--json"], 1), (["config", "explain"], 1), (["--help"], 1),
                                         (["status", "nowhere", "--json"], 2)])
def test_a_full_disk_below_stdout_is_said_and_fails(words, code):
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(command_line(*words), stdout=full, stderr=subprocess.PIPE, env=environment(), text=True)
    assert ran.returncode == code and len(ran.stderr.splitlines()) == 1, ran.stderr
    assert ran.stderr.startswith("error: ") and ("the answer cannot be written to stdout: No space left" in ran.stderr) == (code == 1)


def test_a_current_directory_that_was_removed_is_named_as_the_cause(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    ran = subprocess.run(["sh", "-c", 'rmdir "$0"; exec "$@"', gone, *command_line("topics", "store")], cwd=gone, env=environment(),
                         capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (1, "error: the current directory was removed: change into one that exists\n")


@pytest.mark.parametrize("words, code", [(["config", "explain"], 0), (["status", "nowhere"], 2), (["nosuch"], 2)])
def test_a_stderr_that_takes_nothing_leaves_the_exit_code(words, code):
    with open("/dev/full", "wb") as full:
        ran = subprocess.run(command_line(*words), stdout=subprocess.DEVNULL, stderr=full, env=environment())
    assert ran.returncode == code


@pytest.mark.parametrize("command, is_damaged, code", usual([("status", False, 0), ("check", False, 0), ("check", True, 3)],
                                                            [("check", True, 3)], pytest.mark.ci))
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["table", "json"])
def test_a_reader_that_goes_leaves_the_command_its_exit_code(tmp_path, rng, command, is_damaged, code, more):
    log = LogBuilder(65536)
    log.append_varied(rng, 20)
    if is_damaged:
        longest = max(log.messages, key=lambda one: len(one.body))
        log.segments[0][log.segments[0].index(longest.body)] ^= 1
    log.write(tmp_path / "store")
    words = command_line(command, tmp_path / "store", "--set", "mapped_file_size_commit_log_bytes=64KiB", *more)
    whole = subprocess.run(words, env=environment(), capture_output=True)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        process.stdout.close()
        assert process.stderr.read() == whole.stderr
    assert process.returncode == whole.returncode == code


def test_python_m_pyengine_is_the_command():
    ran = spawn("--version")
    assert ran.code == 0 and ran.stdout.startswith("pyengine, version ")


def test_text_of_a_store_cannot_steer_the_terminal():
    assert output.printable("a\x1b[31m\n\u202e") == "a\\x1b[31m\\n\\u202e"
    assert output.body_text(b"\xff\x00ok\x07") == "\\xff\\x00ok\\x07"


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB")])
def test_a_size_is_shown_in_a_fitting_unit(size_bytes, text):
    assert output.size_text(size_bytes) == text


@pytest.mark.parametrize(("timestamp_ms", "text"), [
    (0, "-"), (-1, "-"), (None, "-"), (1600000000123, "2020-09-13T12:26:40.123Z"), (2**62, str(2**62)),
])
def test_a_time_is_shown_in_utc(timestamp_ms, text):
    assert output.time_text(timestamp_ms) == text
