"""Documentation that is checked: the file table, the reading order, the commands."""

import ast
import re
from pathlib import Path

from nanopage.config import EngineConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NOT_IN_THE_TEXTBOOK = {"__init__.py", "demo.py"}


def table():
    return re.findall(r"^\| `nanopage/(\w+\.py)` \|", README, flags=re.MULTILINE)


def test_the_table_names_every_file():
    files = {path.name for path in (ROOT / "nanopage").glob("*.py")} - NOT_IN_THE_TEXTBOOK
    assert sorted(table()) == sorted(files)


def test_import_order_is_reading_order():
    order = table()
    for name in order:
        tree = ast.parse((ROOT / "nanopage" / name).read_text())
        imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        for module in (m for m in imported if m and m.startswith("nanopage.")):
            before = module.removeprefix("nanopage.") + ".py"
            assert order.index(before) < order.index(name), f"{name} imports {before}"


def test_every_file_opens_with_its_question_and_the_next_file():
    order = table()
    for name, following in zip(order, order[1:], strict=False):
        doc = ast.get_docstring(ast.parse((ROOT / "nanopage" / name).read_text()))
        assert doc.splitlines()[0].endswith("?"), name
        assert "Invariants:" in doc or "Invariants, " in doc, name
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
