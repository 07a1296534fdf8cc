"""The public names have types, which mypy checks in a user's script."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import turbo_rcm_patch as trp

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests/typing_user.py"


def test_mypy_accepts_a_users_script(tmp_path):
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(SCRIPT)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_script_takes_every_public_name():
    assert sorted(set(re.findall(r"trp\.(\w+)", SCRIPT.read_text())) - {"patched"}) == trp.__all__


def test_type_checkers_see_the_names_that_are_imported_on_first_use():
    (seen,) = (node for node in ast.parse(Path(trp.__file__).read_text()).body if isinstance(node, ast.If))
    imported = {alias.asname: line.module for line in seen.body for alias in line.names if alias.name == alias.asname}
    assert imported == trp._HOME_OF


def test_the_package_says_that_it_has_types():
    assert (Path(trp.__file__).parent / "py.typed").exists()
