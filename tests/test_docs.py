"""Every link of the pages has a target, named files and sections exist, and code blocks run."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

import pyengine
from crash.replicas import free_port
from fix_cli import SOURCES, environment
from pyengine.cli.main import main
from pyengine.native import control as native
from pyengine.storage.config import load_config
from reference import with_layout
from waiting import scaled_timeout_s

NOT_OF_THE_TREE = {".git", ".venv", "build", "target", "node_modules", ".pytest_cache"}


def pages() -> list[Path]:
    found = (path.relative_to(SOURCES) for path in SOURCES.rglob("*.md"))
    return sorted(path for path in found if not NOT_OF_THE_TREE & set(path.parts))


PAGES = pages()
IN_ORDER = pytest.mark.parametrize("page", PAGES, ids=str)


def text_of(page: Path | str) -> str:
    return (SOURCES / page).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@IN_ORDER
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(page))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        path = (SOURCES / page.parent / name) if name else SOURCES / page
        assert path.exists(), target
        if fragment:
            assert fragment in {anchor(heading) for heading in headings(path.read_text(encoding="utf-8"))}, target


def test_the_index_has_every_page_of_docs():
    """docs/README.md links each page of docs/, or the index of the page's folder."""
    linked = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text_of("docs/README.md"))}
    for page in PAGES:
        if page.parts[0] == "docs" and page != Path("docs/README.md"):
            below = page.relative_to("docs")
            wanted = str(below) if len(below.parts) == 1 else f"{below.parent}/README.md"
            assert wanted in linked, f"docs/README.md has no link to {wanted}"


def test_the_site_has_every_page_of_docs():
    """docs/conf.py names each page of docs/, for the navigation of the site; pages in folders it finds."""
    named = {"docs/README", *re.findall(r'"(docs/[\w-]+)"', text_of("docs/conf.py"))}
    assert named == {str(page.with_suffix("")) for page in PAGES if page.parts[:-1] == ("docs",)}


def test_the_newest_version_of_the_change_log_is_the_packages():
    """Its section is dated, or unreleased and the version ends with .dev0; `pyproject.toml` and `CITATION.cff` name the same one."""
    newest = re.findall(r"^## (.*)$", text_of("CHANGELOG.md"), re.M)[0]
    version, _, is_development = pyengine.__version__.partition(".dev")
    assert re.fullmatch(re.escape(version) + (" - unreleased" if is_development else r" - \d{4}-\d\d-\d\d"), newest)
    assert f'\nversion = "{pyengine.__version__}"\n' in text_of("pyproject.toml")
    assert f"\nversion: {pyengine.__version__}\n" in text_of("CITATION.cff")


@IN_ORDER
def test_files_of_the_tree_that_a_page_names_exist(page):
    for name in re.findall(r"`((?:pyengine|workers|csrc|tests|scripts|docs|bench|examples)/[\w./*-]*)`", text_of(page)):
        if "/X." not in name:
            assert list(SOURCES.glob(name.rstrip("/"))), name


def test_each_line_of_a_block_of_contributing_begins_with_a_program_of_the_tree():
    """No test runs these blocks, so none else sees lines that were joined."""
    for line in (line for block in blocks_of("CONTRIBUTING.md") for line in block.text.splitlines()):
        words = line.split()
        assert (SOURCES / words[words[0] == "python"]).is_file(), line


def source_texts() -> list[tuple[str, str]]:
    folders = ("pyengine", "workers", "pyspark_pyengine", "csrc", "tests", "scripts", "bench",
               "examples")
    kinds = {".py", ".c", ".h", ".sh", ".java", ".md"}
    found = [path for folder in folders for path in sorted((SOURCES / folder).rglob("*")) if path.suffix in kinds]
    found += [SOURCES / page for page in PAGES]
    this_file = Path(__file__).resolve()
    return [(str(path.relative_to(SOURCES)), path.read_text(encoding="utf-8")) for path in found
            if path != this_file and path.name != "_native.c" and not NOT_OF_THE_TREE & set(path.relative_to(SOURCES).parts)]


def numbers_of(page: str) -> set[str]:
    """The numbers that headings of a page begin with: `8.3 Filler` and `2. Records` give 8.3 and 2."""
    return {found[1] for heading in headings(text_of(page)) if (found := re.match(r"(\d+(?:\.\d+)?)\.? ", heading))}


def test_sections_and_promises_that_sources_name_exist():
    formats, promises = numbers_of("docs/formats.md"), numbers_of("docs/promises.md")
    seen = 0
    for name, text in source_texts():
        text = re.sub(r"\n\s*(?:\*|//|#)?\s*", " ", text)
        sections = re.findall(r"formats\.md\)? sections? ([\d.]*\d)(?:(?: to | and |, )([\d.]*\d))?", text)
        if name.startswith("pyengine/formats/"):  # its docstring: section numbers are those of the page
            sections += [(each, "") for each in re.findall(r"\(section ([\d.]*\d)", text)]
        for section in (number for pair in sections for number in pair if number):
            assert section in formats, f"{name} names section {section} of docs/formats.md"
            seen += 1
        for promise in re.findall(r"promises\.md\)?, (\d+)", text):
            assert promise in promises, f"{name} names promise {promise}"
            seen += 1
        for page in re.findall(r"\b(docs/[\w/-]+\.md)", text):
            assert (SOURCES / page).is_file(), f"{name} names {page}"
    assert seen > 20


# --- blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One ```bash or ```python block of a page."""

    page: str
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0].split("#")[0].strip()


def blocks_of(page: Path | str) -> list[Block]:
    found = re.findall(r"^```(bash|sh|python)\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)
    return [Block(str(page), "python" if language == "python" else "bash", text) for language, text in found]


# Page and first line of each block that no test here runs, with the reason.
LEFT_OUT = {
    ("docs/tables.md", "from pyiceberg.expressions import In"): "rows of an earlier version; tests/client/test_tables.py runs it",
    ("README.md", "pip install ."): "changes the environment that runs the tests",
    ("docs/gateway.md", "pyengine start my-store --set gateway_enable=true"):
        "takes RocketMQ's own ports; tests/gateway and tests/interop have free ones",
    ("docs/gateway.md", "pyengine start my-store --set gateway_enable=true --set gateway_tls_mode=permissive \\"):
        "as above; its settings are tried in tests/gateway/test_access.py",
    ("docs/hosts.md", "pyengine start my-store --set gateway_enable=true --set gateway_namesrv_cluster=true --set brokerName=broker-1 \\"):
        "needs other hosts; the drill of the page has three on one machine",
    ("CONTRIBUTING.md", "scripts/test"): "runs these very tests",
    ("CONTRIBUTING.md", "python setup.py -q build_ext --inplace --force"): "builds the module that runs the tests",
}
RUN_ELSEWHERE = {
    "docs/tables.md": "tests/test_docs.py",
    "docs/backup.md": "tests/test_docs.py",
    "docs/containers.md": "tests/test_docs.py",
    "docs/capacity.md": "tests/test_docs.py",
    "docs/upgrades.md": "tests/test_docs.py",
    "docs/arrow.md": "tests/storage/test_to_arrow.py",
    "docs/faults.md": "tests/test_docs.py",
    "docs/drills.md": "tests/scripts/test_drills.py",
    "docs/hosts.md": "tests/scripts/test_drills.py",
    "docs/delayed.md": "tests/test_docs_delivery.py",
    "docs/tasks.md": "tests/test_taskiq.py",
    "docs/topics.md": "tests/test_docs_delivery.py",
    "docs/transactions.md": "tests/test_docs_delivery.py",
    "docs/cleaning.md": "tests/test_docs.py",
    "docs/queues.md": "tests/test_docs_queues.py",
    "docs/processes.md": "tests/test_docs_processes.py",
    "docs/python.md": "tests/test_docs_python.py",
    "docs/recipes.md": "tests/test_docs_delivery.py",
    "docs/recovery.md": "tests/test_docs.py",
    "docs/replication.md": "tests/test_docs.py",
    "docs/spark.md": "tests/spark/test_source.py",
    "docs/operations.md": "tests/engine/test_supervisor.py",
    "docs/statistics.md": "tests/test_docs.py",
    "docs/systemd.md": "tests/systemd/test_units.py",
}
SPARK = "from pyengine.spark import session"  # first line of the block that needs Spark and a store `my-store`
SMALL = {
    "PYENGINE_MAPPED_FILE_SIZE_COMMIT_LOG_BYTES": "1MiB",
    "PYENGINE_MAPPED_FILE_SIZE_CONSUME_QUEUE_BYTES": "6000",
    "PYENGINE_MAX_HASH_SLOT_NUM": "1000",
    "PYENGINE_MAX_INDEX_NUM": "4000",
}


class Reader:
    """Runs the blocks of a page as they are, one after the other, in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        shim = folder / "bin" / "pyengine"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pyengine "$@"\n')
        shim.chmod(0o755)
        base = environment(**SMALL)
        # Without bytecode: a folder that changes while Python lists it may not show every module on every file system.
        self.environment = base | {"PATH": f"{shim.parent}:{base['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, block: Block) -> str:
        """Run the block, which must succeed; return its stdout. What a failed block left running is ended, not waited for."""
        program = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            with subprocess.Popen([*program, block.text], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                                  stdout=stdout, stderr=stderr, start_new_session=True) as process:
                try:
                    failed = process.wait(scaled_timeout_s(240))
                except subprocess.TimeoutExpired as error:
                    failed = error
                if failed:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
            stdout.seek(0)
            stderr.seek(0)
            shown = stdout.read()
            assert not failed, f"{block.page}: {block.first_line}: {failed}\n{shown}\n{stderr.read()}"
        return shown

    def run_until(self, block: Block, lines: int) -> str:
        """Run a Python block until it has printed `lines` lines, then end it with SIGTERM; return the lines."""
        with subprocess.Popen([sys.executable, "-c", block.text], cwd=self.folder, env=self.environment, stdout=subprocess.PIPE,
                              text=True) as process:
            try:
                shown = "".join(process.stdout.readline() for _ in range(lines))
                process.terminate()
                assert process.wait(scaled_timeout_s(60)) == 0
            finally:
                process.kill()
        return shown

    def stop_engines(self) -> None:
        for store in self.folder.iterdir():
            subprocess.run([sys.executable, "-m", "pyengine", "stop", str(store)], env=self.environment,
                           capture_output=True, timeout=120)


@pytest.fixture
def reader(tmp_path):
    reader = Reader(tmp_path)
    yield reader
    reader.stop_engines()


def runnable(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if (page, block.first_line) not in LEFT_OUT]


def test_every_block_is_run_or_left_out_for_a_reason():
    blocks = {(block.page, block.first_line) for page in PAGES for block in blocks_of(page)}
    assert LEFT_OUT.keys() <= blocks, "a row of LEFT_OUT names no block"
    for page, first_line in blocks - LEFT_OUT.keys():
        run_here = page in ("README.md", "docs/consumers.md", "docs/retries.md", "docs/tutorial.md")
        run_elsewhere = page in RUN_ELSEWHERE or page.startswith("docs/api/")  # tests/test_docs_api.py
        assert run_here or run_elsewhere, f"{page}: nothing runs {first_line!r}"
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (SOURCES / test).read_text(encoding="utf-8")


@pytest.mark.timeout(600)
def test_the_blocks_of_the_readme_run(reader):
    program, shell = [reader.run(block) for block in runnable("README.md") if block.first_line != SPARK]
    assert program in re.findall(r"^```text\n(.*?)^```", text_of("README.md"), re.DOTALL | re.MULTILINE), "the page shows this output"
    assert shell.count("one apple") == 1 and "running" in shell


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_blocks_of_the_tutorial_run(reader):
    pytest.importorskip("duckdb")
    *_, workers, shell, query = [reader.run(block) for block in blocks_of("docs/tutorial.md")]
    assert re.findall(r"^```text\n(.*?)^```", text_of("docs/tutorial.md"), re.DOTALL | re.MULTILINE) == [workers, query]
    assert "job 7" in shell


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_block_of_the_containers_page_runs(reader):
    (serve,) = runnable("docs/containers.md")
    reader.environment |= {"PYENGINE_GATEWAY_NAMESRV_PORT": "0", "PYENGINE_GATEWAY_BROKER_PORT": "0"}  # not another test's
    assert reader.run(serve).startswith("PUT_OK")
    assert not (reader.folder / "my-store" / "abort").exists()


def test_the_block_of_the_capacity_page_runs(reader):
    (block,) = runnable("docs/capacity.md")
    assert reader.run(block).count("file system") == 2


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_block_of_the_upgrades_page_runs(reader):
    (block,) = runnable("docs/upgrades.md")
    shown = reader.run(block)
    assert "living workers were taken over" in shown and "ok: it takes puts" in shown


def test_the_upgrades_page_has_the_layout_of_this_version():
    page = (SOURCES / "docs" / "upgrades.md").read_text()
    assert with_layout(page) == page, "python scripts/reference.py docs"
    assert f" | {native.LAYOUT_VERSION} |" in page and f"this version's is {native.LAYOUT_VERSION})" in page


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_blocks_of_the_consumers_page_run(reader):
    _, first, second, condition, shared, shell = [reader.run(block) for block in blocks_of("docs/consumers.md")]
    assert condition == "[b'7']\n" and len(re.findall(r"order \d", shared)) == 4
    assert sorted(re.findall(r"order \d", first)) == [f"order {number}" for number in range(1, 5)]
    assert "order 4" in second and "billing" in shell and "forgotten" in shell
    assert len(re.findall(r"\| order \d", shell)) == 4, "after the reset all messages were delivered again"


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_blocks_of_the_retries_page_run(reader):
    handler, tasks, by_hand, shell = [reader.run(block) for block in blocks_of("docs/retries.md")]
    assert handler.splitlines() == ["b'one' 0", "b'two' 0", "b'three' 0", "b'two' 1"]
    assert tasks.splitlines()[0] == "audit b'one'" and "audit b'three'" in tasks
    assert by_hand.splitlines() == ["SCHEDULE_TOPIC_XXXX", "jobs b'two' 1", "%DLQ%by-hand"]
    assert "1 put back for by-hand" in shell and "two" in shell


@pytest.mark.ci
@pytest.mark.java
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_spark_block_of_the_readme_runs(reader):
    _, shell, spark = runnable("README.md")
    assert spark.first_line == SPARK
    reader.run(shell)
    assert re.search(r"\|\s*orders\s*\|\s*1\s*\|", reader.run(spark))


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_blocks_of_the_statistics_page_run(reader):
    shell, program, why = runnable("docs/statistics.md")
    shown = reader.run(shell)
    assert "puts/s" in shown and "'600s'" in shown
    assert reader.run(program) == "1 0 1\n"
    shown = reader.run(why)
    assert "the engine was started" in shown and '"threshold_ms": 5.0' in shown


@pytest.mark.ci
def test_the_blocks_of_the_faults_page_run(reader):
    kill, steps = runnable("docs/faults.md")
    shown = reader.run(kill)
    assert "200,000 messages" in shown and "Recovered by the abnormal path" in shown
    shown = reader.run(steps)
    assert shown.count("dead, with") == 2 and "Recovered by the abnormal path" in shown


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_blocks_of_the_cleaning_page_run(reader):
    shell, program = runnable("docs/cleaning.md")
    shown = reader.run(shell)
    assert shown.count("deleted 0 segments") == 3 and "disk used" in shown
    assert reader.run(program) == "True b'one apple'\n"


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_blocks_of_the_tables_page_run(reader):
    for package in ("deltalake", "pyiceberg", "sqlalchemy"):
        pytest.importorskip(package)
    shell, program, with_json = runnable("docs/tables.md")
    shown = reader.run(shell)
    assert "100 messages of 1 topics" in shown and "1 messages of 1 topics" in shown and "tables in " in shown
    assert reader.run(program) == "101 b'order 101'\n101\n"
    assert "2 messages of 2 topics are in " in (shown := reader.run(with_json)) and "orders/bad" in shown


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_drill_of_the_backup_page_runs(reader):
    (drill,) = runnable("docs/backup.md")
    shown = reader.run(drill)
    assert "backup 2 of my-store" in shown and "checked bytes" in shown and "2001 messages" in shown and "order 2001" in shown


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_block_of_the_recovery_page_puts_back_what_is_in_quarantine(reader):
    """Zeros in place of the first segment's last message: what is in the second one is stranded."""
    root = reader.folder / "my-store"
    sizes = {name.removeprefix("PYENGINE_").lower(): size for name, size in SMALL.items()}
    with pyengine.Engine(root, **sizes) as engine, engine.connect() as producer:
        places = [producer.put("orders", b"%d" % number + b"x" * 200_000).physical_offset for number in range(8)]
    first, second = sorted((root / "commitlog").iterdir())[:2]
    lost = max(place for place in places if place < int(second.name))
    with open(first, "r+b") as log:
        log.seek(lost)
        log.write(bytes(int(second.name) - lost))
    reader.run(Block("", "bash", "pyengine recover my-store --accept-loss || [ $? = 4 ]\npyengine start my-store"))
    (block,) = runnable("docs/recovery.md")
    reader.run(block)
    with pyengine.consume(root, "orders", from_="first") as consumer:
        found = [int(message.body[:1]) for message in consumer.pull(100, timeout_s=0)]
    assert found == [number for number in range(8) if places[number] != lost]


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_blocks_of_the_replication_page_run(reader):
    pair, comparison = runnable("docs/replication.md")
    shown = reader.run(Block(pair.page, pair.language, pair.text.replace("10932", str(free_port()))))
    assert shown.count("running") == 2 and "PUT_OK" in shown and "one apple" in shown
    assert "The stores are equal from 0 to" in reader.run(comparison)


def examples(page: Path | str = "docs/commands.md") -> list[str]:
    """Command lines in the blocks of a page that no test runs: those of LEFT_OUT, of `console`, and without a language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)
    blocks = [text for language, text in fences if language in ("", "console")]
    blocks += [block.text for block in blocks_of(page) if block.language == "bash" and (block.page, block.first_line) in LEFT_OUT]
    lines = [line.strip() for text in blocks for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"(\$ )?([A-Z_]+=\S+ |podman exec \w+ |.*\| )?pyengine [a-z]", line)]


def test_the_first_run_of_the_commands_page_runs(reader):
    first = [line.replace("/tmp/store", "store") for line in examples() if "/tmp/store" in line]
    assert len(first) >= 4
    assert "hello, world" in reader.run(Block("docs/commands.md", "bash", "\n".join(first)))


@pytest.mark.parametrize("line", [line for page in PAGES for line in examples(page) if "/tmp/store" not in line])
def test_an_example_of_a_command_is_accepted_by_it(line, tmp_path, monkeypatch):
    """Words, options, values and settings: parsed as the command does, not executed."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line.replace("HOST:PORT", "127.0.0.1:10912"), comments=True)
    words = words[words.index("pyengine") + 1:]
    for sign in ("<", ">", "|", "&&"):
        words = words[: words.index(sign)] if sign in words else words
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group):
        name = words.pop(0)
        command = command.get_command(context, name)
        assert command is not None, name
    (tmp_path / "STORE").mkdir()
    for argument in command.params:
        if isinstance(argument.type, click.Path) and argument.type.exists:
            for word in words:
                if not word.startswith("-") and not Path(word).exists():
                    (tmp_path / word).touch()
    load_config(None, command.make_context("example", words).params["settings"], {})


TEXTS = [name for name in subprocess.run(["git", "ls-files", "*.md", "*.md.in", "*.py"], cwd=SOURCES, capture_output=True, text=True,
                                         check=True).stdout.split() if not name.startswith("tests/") and name != "CHANGELOG.md"]


def mentions(name: str) -> list[str]:
    """The words of each `pyengine ...` with more than a command's name in this page, or in the texts of this code, as written."""
    text = text_of(name)
    if name.endswith(".py"):  # what the compiler has joined
        texts = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    else:
        texts = [re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)]
    return sorted({" ".join(said.split()) for said in re.findall(r"`pyengine ([a-z][^`{]* [^`{]*)`", "\n".join(texts))})


def in_example_values(words: str) -> list[str]:
    """Return the words of a usage with its alternatives, brackets and dots replaced by the first of what they allow."""
    words = words.replace("[OPTIONS]", "").replace("\\|", "|").replace("[KEY=VALUE]", "")
    return [word.replace("[", "").replace("]", "").replace("...", "").split("|")[0] for word in shlex.split(words)]


@pytest.mark.parametrize("where", TEXTS)
def test_a_command_line_that_a_text_names_is_one_of_the_command(where):
    """Its words, options and choices; arguments that a text leaves out, and words in capitals for any value, are accepted."""
    for said in mentions(where):
        require_one_of_the_command(where, said)


def require_one_of_the_command(where: str, said: str) -> None:
    words, command = in_example_values(said), main
    context = click.Context(main)
    while isinstance(command, click.Group) and words:
        name = words.pop(0)
        if name == "COMMAND":
            return
        command = command.get_command(context, name)
        assert command is not None, f"{where}: pyengine {said}: there is no command {name}"
    takes_value = {name for param in command.params if isinstance(param, click.Option) and not param.is_flag for name in param.opts}
    if words and words[-1] in takes_value:  # the text speaks of the option
        words.append("VALUE")
    given, left, _ = command.make_parser(click.Context(command)).parse_args(words)
    assert not left, f"{where}: pyengine {said}: {left} is too much"
    for param in command.params:
        value = given.get(param.name)
        if isinstance(param.type, click.Choice) and isinstance(value, str) and value not in ("VALUE", "ACTION"):
            assert value in param.type.choices, f"{where}: pyengine {said}: {value} is not one of {param.type.choices}"


def test_each_design_note_says_what_holds_why_what_lost_and_what_would_change_it():
    rows = re.findall(r"^\| \[(\d+)\]\((\S+)\) \| (.*) \|$", text_of("docs/design/README.md"), re.MULTILINE)
    assert [name for _, name, _ in rows] == sorted(path.name for path in (SOURCES / "docs" / "design").glob("[0-9]*.md"))
    for number, name, title in rows:
        text = text_of(f"docs/design/{name}")
        assert name.startswith(f"{int(number):02}-") and text.splitlines()[0] == f"# {number}: {title}"
        assert re.findall(r"^\*\*([\w ]+)\.\*\*", text, re.MULTILINE) == ["Now", "Why", "Rejected", "Would change it"], name
