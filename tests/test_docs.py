"""Documentation that is checked: the file table, the reading order, the line budgets, commands."""

import ast
import io
import re
import runpy
import shlex
import sys
import tokenize
from pathlib import Path

import test_break_it

from nanopage.config import EngineConfig

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanopage"
README = (ROOT / "README.md").read_text()
TEXTBOOK = ["sequence.py", "block_manager.py", "scheduler.py", "layers.py", "model_runner.py",
            "engine.py"]
COMPANIONS = ["attention.py", "sampler.py"]


def table():
    """[(file, lines of code)] as README's tables list them."""
    rows = re.findall(r"^\| `nanopage/(\w+\.py)` \|.*\| (\d+) \|$", README, flags=re.MULTILINE)
    return [(name, int(lines)) for name, lines in rows]


def docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            if ast.get_docstring(node) is not None:
                yield set(range(node.body[0].lineno, node.body[0].end_lineno + 1))


def count(path):
    """(lines of code, lines of comments and docstrings); blank lines are neither."""
    source = path.read_text()
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code, words = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            target = words if token.type == tokenize.COMMENT else code
            target.update(range(token.start[0], token.end[0] + 1))
    prose = set().union(*docstrings(ast.parse(source)))
    blank = {i for i, line in enumerate(source.splitlines(), 1) if not line.strip()}
    return len(code - prose), len((words - code) | (prose - blank))


def imported(name):
    """Which modules of the package a file imports, at its top or anywhere, for types or not."""
    nodes = ast.walk(ast.parse((PACKAGE / name).read_text()))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return {m.removeprefix("nanopage.") + ".py" for m in modules if m and m.startswith("nanopage.")}


def test_the_tables_name_every_file_with_its_lines():
    files = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert sorted(name for name, _ in table()) == sorted(files)
    assert table() == [(name, count(PACKAGE / name)[0]) for name, _ in table()]


def test_line_budgets():
    """What a first reader reads must stay a textbook: a feature that adds lines takes some out."""
    lines = {path.name: count(path)[0] for path in PACKAGE.glob("*.py")}
    textbook = sum(lines[name] for name in TEXTBOOK)
    assert textbook <= 1130
    assert textbook + sum(lines[name] for name in COMPANIONS) <= 1310
    assert lines["trace.py"] <= 60  # as demo.py, no part of the engine
    assert sum(lines.values()) - lines["demo.py"] - lines["trace.py"] <= 1963
    assert count(ROOT / "bench.py")[0] <= 600


def test_reasons_are_kept():
    """A budget is not kept by leaving out why: comments and docstrings are 25 to 50 % of code."""
    code, words = (sum(column) for column in zip(*(count(p) for p in PACKAGE.glob("*.py"))))
    assert 0.25 <= words / code <= 0.5, words / code


def test_no_function_is_long():
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, (path.name, node.name)


def test_import_order_is_reading_order():
    """And so there is no circle, not even for types; leaves are read, if at all, where they lie."""
    read = []
    for name in ["arguments.py", "text.py", "sequence.py", "block_manager.py", "metrics.py",
                 "proposals.py", "scheduler.py", "attention.py", "cpu.py", "parallel.py",
                 "config.py", "layers.py", "sampler.py", "model_runner.py", "engine.py",
                 "trace.py"]:
        assert imported(name) <= set(read), name
        read.append(name)
    assert not imported("demo.py")
    listed = [name for name, _ in table()]
    assert [name for name in read if name in TEXTBOOK + COMPANIONS] == [
        name for name in listed if name in TEXTBOOK + COMPANIONS]


def test_every_file_opens_with_its_question_and_the_next_file():
    listed = [name for name, _ in table()]
    for name in listed:
        doc = ast.get_docstring(ast.parse((PACKAGE / name).read_text()))
        if name != "demo.py":
            assert doc.splitlines()[0].endswith("?"), name
            assert "Invariants:" in doc or "Invariants (" in doc, name
    main = [name for name in listed if name in TEXTBOOK + COMPANIONS]
    for name, following in zip(main, main[1:], strict=False):
        doc = ast.get_docstring(ast.parse((PACKAGE / name).read_text()))
        assert f"Next: {following}" in doc, name


def test_commands_and_settings():
    commands = re.findall(r"^pip install torch.*$", README, flags=re.MULTILINE)
    assert len(commands) == 2 and all("torch==2.13.0" in command for command in commands)
    for name in EngineConfig.__dataclass_fields__:
        assert re.search(rf"\b{name}\b", README), name
    top = {path.name for path in ROOT.iterdir() if not path.name.startswith((".", "_"))}
    assert {"nanopage", "tests", "bench.py", "example.py", "README.md"} <= top
    assert top <= {"nanopage", "tests", "bench.py", "example.py", "README.md", "LICENSE",
                   "pyproject.toml", "docs", "nanopage.egg-info", "build"}


# ---- the course ------------------------------------------------------------------------------


def names_in(path):
    """Functions, classes and their members, as README names them: Class.member."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        for member in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(member, ast.FunctionDef):
                names.add(f"{node.name}.{member.name}")
            if isinstance(member, ast.AnnAssign):
                names.add(f"{node.name}.{member.target.id}")
    return names


def test_every_name_in_the_readme_exists():
    references = set(re.findall(r"`(\w+\.py)::([\w.]+)`", README))
    assert len(references) > 80
    for file, name in references:
        folder = ROOT / "tests" if file.startswith("test_") else PACKAGE
        path = folder / file if (folder / file).is_file() else ROOT / file
        assert name in names_in(path), f"{file}::{name}"
    for path in re.findall(r"\btests/\w+\.py\b", README):
        assert (ROOT / path).is_file(), path


def test_the_trace_in_the_readme_is_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example.py", "--trace"])
    runpy.run_path(str(ROOT / "example.py"), run_name="__main__")
    pieces = re.findall(r"^```trace\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert len(pieces) == 5 and "".join(pieces) == capsys.readouterr().out


def test_each_chapter_has_its_code_trace_measure_and_test():
    course = README.partition("\n## The course\n")[2].partition("\n## ")[0]
    chapters = re.split(r"^### \d\. ", course, flags=re.MULTILINE)[1:]
    assert len(chapters) == 7
    for chapter in chapters:
        for part in ("Code", "Trace", "Measure", "Test"):
            assert re.search(rf"^- {part}\b", chapter, flags=re.MULTILINE), (chapter, part)
        assert "`python bench.py" in chapter and re.search(r"- Test: `test_\w+\.py::", chapter)


def test_bench_commands():
    parser = runpy.run_path(str(ROOT / "bench.py"))["make_parser"]()
    commands = re.findall(r"`python bench\.py\s*([^`]*)`", README)
    assert len(commands) > 15
    for command in commands:
        parser.parse_args(shlex.split(command))  # exits where an option is unknown


def test_break_it_is_the_table_of_mutations():
    assert f"\n{test_break_it.table()}\n" in README
    assert len(test_break_it.MUTATIONS) >= 12


def test_glossary_and_exercises():
    glossary = README.partition("\n## Glossary\n")[2].partition("\n## ")[0]
    words = re.findall(r"^\| (.+?) \| .+ \| `\w+\.py::[\w.]+` \|$", glossary, flags=re.MULTILINE)
    for word in ("sequence", "request", "prompt", "completion", "KV cache", "block (page)",
                 "block size", "block table", "slot", "slot mapping", "prefix caching",
                 "copy-on-write", "preemption", "chunked prefill", "token budget",
                 "speculative decoding", "draft", "acceptance", "parallel sampling", "beam width",
                 "TTFT", "ITL"):
        assert word in words, word
    exercises = README.partition("\n## Exercises\n")[2].partition("\n## ")[0]
    parts = re.split(r"^\d\. ", exercises, flags=re.MULTILINE)[1:]
    assert len(parts) == 5
    assert all(re.search(r"tests/|test_\w+\.py::|`python bench", part) for part in parts)
