"""Newer packages than tested are warned of, and not refused."""

import json
import logging
import re
from pathlib import Path

import pytest

import turbo_rcm_patch as trp
from tests.tiny_wan import tiny_wan_transformer
from turbo_rcm_patch import versions

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def newest_tested(monkeypatch):
    """A function that sets the newest tested releases, and lets the warning come again."""

    def set_to(**newest):
        monkeypatch.setattr(versions, "NEWEST_TESTED", newest)
        versions.warn_of_untested.cache_clear()

    yield set_to
    versions.warn_of_untested.cache_clear()


@pytest.mark.parametrize(
    ("installed", "newest", "is_newer"),
    [
        ("2.15.0", "2.15", False),
        ("2.15.3+cu130", "2.15", False),
        ("2.9.1", "2.15", False),
        ("2.16.0.dev20260801+cu130", "2.15", True),
        ("3.0.0", "2.15", True),
        ("5.99.0", "5", False),
        ("6.0.0", "5", True),
    ],
)
def test_what_is_newer(monkeypatch, newest_tested, installed, newest, is_newer):
    monkeypatch.setattr("torch.__version__", installed)
    newest_tested(torch=newest)
    assert versions.untested() == [f"torch {installed} (the tests run with {newest} at most)"] * is_newer


def test_patch_warns_once_and_goes_on(newest_tested, caplog):
    newest_tested(torch="1.13", triton="99")
    for _ in range(2):
        with caplog.at_level(logging.WARNING), trp.patch(tiny_wan_transformer()) as patched:
            assert patched.active
    (message,) = caplog.messages
    assert re.fullmatch(
        r"Not tested with torch \S+ \(the tests run with 1\.13 at most\)\. Check the results once, .*", message
    )


def test_nothing_is_said_of_the_packages_that_the_tests_run_with(newest_tested, caplog):
    newest_tested(**versions.NEWEST_TESTED)
    trp.patch(tiny_wan_transformer())
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("torch", "triton", "is_known"),
    [
        ("2.11.0+cu130", "3.6.0", True),
        ("2.14.1", "3.8.0", True),
        ("2.14.1", "3.6.0", False),
        ("2.1.0", "3.6.0", False),
        ("2.15.0", "3.9.0", False),
    ],
)
def test_pairs_that_ran_on_a_gpu_are_known(monkeypatch, torch, triton, is_known):
    monkeypatch.setattr("torch.__version__", torch)
    monkeypatch.setattr("triton.__version__", triton)
    note = versions.unknown_pair_note()
    assert (note is None) == is_known
    assert is_known or f"torch {torch} with Triton {triton} yet, only torch 2.11 with Triton 3.6 and torch 2.14" in note


def test_every_pair_of_the_results_is_known():
    pairs = set()
    for path in (ROOT / "results").glob("nvidia-*.json"):
        runs = json.loads(path.read_text())["runs"].values()
        environments = (run["environment"] for run in runs if "environment" in run)
        pairs |= {tuple(".".join(each[name].split(".")[:2]) for name in ("torch", "triton")) for each in environments}
    assert pairs
    assert pairs <= set(versions.RAN_ON_A_GPU)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert all(re.search(rf"torch {torch}\S* with Triton {triton}", readme) for torch, triton in versions.RAN_ON_A_GPU)


def test_the_readme_tells_the_last_gpu_tests():
    """Those of the GPU that has the most measurements."""
    results = [json.loads(path.read_text()) for path in (ROOT / "results").glob("nvidia-*.json")]
    last = max(results, key=lambda each: len(each["runs"]))["tests"][-1]
    passed, environment = last["passed"], last["environment"]
    ran = passed + sum(last.get(word, 0) for word in ("failed", "error", "errors"))
    share = "all" if passed == ran else f"{passed} of {ran}"
    release = environment["torch"].partition("+")[0]
    told = f"torch {release} with Triton {environment['triton']} (all timings; {share} tests for one GPU at commit "
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert told + environment["commit"][:7] + ")" in readme


def test_the_newest_tested_are_within_what_pip_installs():
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in project["dependencies"])
    for name, newest in versions.NEWEST_TESTED.items():
        lowest = re.fullmatch(r">=([\d.]+)", bounds[name]).group(1)  # no upper bound
        numbers = [int(number) for number in lowest.split(".")]
        assert numbers[: newest.count(".") + 1] <= [int(number) for number in newest.split(".")]


def test_the_readme_names_the_newest_tested():
    readme = (ROOT / "README.md").read_text()
    assert [newest for newest in versions.NEWEST_TESTED.values() if newest not in readme] == []
