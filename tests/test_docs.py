"""Documentation that is checked: the file table, the reading order, the line budgets, commands."""

import ast
import io
import re
import tokenize
from pathlib import Path

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
    assert sum(lines.values()) - lines["demo.py"] <= 1940
    assert count(ROOT / "bench.py")[0] <= 402


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
                 "config.py", "layers.py", "sampler.py", "model_runner.py", "engine.py"]:
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
