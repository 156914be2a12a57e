"""The house keeps its own rules: light imports, true names, living paths."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import steppe
from steppe.core.ledger import PEAKS

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "changelog").glob("*.md"))]
HEAVY = ("torch", "transformers", "numpy", "matplotlib", "pyarrow", "tokenizers")


def _loaded_after(code: str) -> set[str]:
    told = f"print(json.dumps(sorted(m for m in {HEAVY!r} if m in sys.modules)), file=sys.stderr)"
    probe = f"import sys, json\n{code}\n{told}"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_importing_steppe_loads_nothing_heavy() -> None:
    assert _loaded_after("import steppe, steppe.cli") == set()


def test_help_of_every_command_needs_no_torch() -> None:
    code = (
        "import steppe.cli, contextlib\n"
        "for command in ([], ['plan'], ['explain'], ['calibrate'], ['train'], ['profile'], ['verify'], ['compare']):\n"
        "    with contextlib.suppress(SystemExit): steppe.cli.main([*command, '--help'])"
    )
    assert not _loaded_after(code) & {"torch", "transformers"}


@pytest.mark.parametrize("name", [*steppe.__all__])
def test_every_public_name_loads_and_says_what_it_is(name: str) -> None:
    value = getattr(steppe, name)
    assert getattr(value, "__doc__", None), f"steppe.{name} has no docstring"


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = steppe.no_such_thing


def test_paths_that_the_docs_cite_exist() -> None:
    missing = []
    for page in DOCS:
        for cited in re.findall(
            r"`((?:steppe|tests|benchmarks|docs|examples|tools|changelog)/[\w./-]+\.\w+)`", page.read_text()
        ):
            if not (ROOT / cited).exists() and not cited.startswith("demo/"):
                missing.append(f"{page.relative_to(ROOT)}: {cited}")
    assert not missing, missing


def test_files_and_functions_stay_readable() -> None:
    long = []
    for path in sorted((ROOT / "steppe").rglob("*.py")):
        text = path.read_text()
        if len(text.splitlines()) > 400:
            long.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno > 60:
                long.append(f"{path.relative_to(ROOT)}:{node.name}: {node.end_lineno - node.lineno} lines")
    assert not long, long


def test_the_environment_is_read_in_the_command_line_only() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "steppe").rglob("*.py"))
        if re.search(r"os\.environ|os\.getenv|getenv\(", path.read_text()) and path.name != "cli.py"
    ]
    assert not readers, readers


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == steppe.__version__


def test_an_accelerator_counts_only_when_it_is_there() -> None:
    """A CUDA build of torch on a machine without a GPU names "cuda" unless it is asked to look."""
    careless = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "steppe").rglob("*.py"))
        if "current_accelerator()" in path.read_text()
    ]
    assert not careless, careless


def test_composer_verifier_and_planner_name_no_flattener() -> None:
    """What is above the four loops over them: no policy, budget or attach file is reached by a flattener's name."""
    above = ("compose", "verify", "sides", "truth", "compare", "planner/predict", "planner/search", "planner/plan")
    named = []
    for name in above:
        for node in ast.walk(ast.parse((ROOT / "steppe" / f"{name}.py").read_text())):
            reached = node.slice if isinstance(node, ast.Subscript) else None
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("half", "policy_class", "policy_from"):
                reached = node.args[0]
            if isinstance(reached, ast.Constant) and reached.value in PEAKS:
                named.append(f"{name}:{node.lineno}")
    assert not named, named
