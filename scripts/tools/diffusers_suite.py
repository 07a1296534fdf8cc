"""Run diffusers' own tests of models unpatched and patched, and show each test whose outcome differs.

    python scripts/tools/diffusers_suite.py ../diffusers tests/models/transformers/test_models_transformer_ltx2.py

Give a checkout of diffusers and files in it. In the patched run every transformer of a known family is patched as soon
as it is made. Exit code 1 if an outcome differs. This file is also the plugin of the tests' process.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES, IS_PATCHED = "TURBO_RCM_PATCH_OUTCOMES", "TURBO_RCM_PATCH_SUITE_IS_PATCHED"
RANK = ("passed", "skipped", "failed")  # the last one that a test has in its phases is its outcome

outcomes: dict[str, str] = {}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("diffusers", type=Path, help="a checkout of diffusers, of the version that is installed")
    parser.add_argument("tests", nargs="+", help="files of tests in it")
    options = parser.parse_args(argv)
    unpatched, patched = (run(options.diffusers.resolve(), options.tests, patched) for patched in (False, True))
    different = [name for name in sorted({*unpatched, *patched}) if unpatched.get(name) != patched.get(name)]
    for name in different:
        print(f"{name}: unpatched {unpatched.get(name, 'not run')}, patched {patched.get(name, 'not run')}")
    counts = ", ".join(f"{list(patched.values()).count(outcome)} {outcome}" for outcome in RANK)
    print(f"patched: {counts}; {len(different)} differ from unpatched")
    return int(bool(different) or not patched)


def run(diffusers: Path, tests: list[str], patched: bool) -> dict[str, str]:
    """Run the tests in a process of their own. Return their outcomes by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.json"
        paths = [str(diffusers), str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            OUTCOMES: str(path),
            IS_PATCHED: "1" if patched else "",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider", *tests]
        subprocess.run(command, cwd=diffusers, env=environment, check=False)
        return json.loads(path.read_text()) if path.exists() else {}


def pytest_configure() -> None:
    if os.environ.get(IS_PATCHED):
        patch_all_models()


def patch_all_models() -> None:
    """Let every transformer of a known family patch itself when it is made."""
    from turbo_rcm_patch import patch
    from turbo_rcm_patch.patching.families import FAMILIES

    for family in FAMILIES:
        cls = family.transformer_class
        cls.__init__ = _then_patch(cls.__init__, patch)


def _then_patch(init, patch):
    @functools.wraps(init)
    def patched_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        patch(self)

    return patched_init


def pytest_runtest_logreport(report) -> None:
    known = outcomes.get(report.nodeid, RANK[0])
    outcomes[report.nodeid] = max(known, report.outcome, key=RANK.index)


def pytest_sessionfinish() -> None:
    Path(os.environ[OUTCOMES]).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    sys.exit(main())
