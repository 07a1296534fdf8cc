"""Files around the package: they name the same version, and what they tell readers to run is there."""

import re
from pathlib import Path

import yaml

import turbo_rcm_patch as trp
from turbo_rcm_patch.cli.arguments import parse_arguments

ROOT = Path(__file__).resolve().parent.parent
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_all_files_name_one_version():
    assert f'\nversion = "{trp.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == trp.__version__
    versions = re.findall(r"^## \[(.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert trp.__version__ in versions


def test_the_changelog_names_every_public_function():
    text = (ROOT / "CHANGELOG.md").read_text()
    functions = [name for name in trp.__all__ if name.islower()]
    assert [name for name in functions if f"`{name}`" not in text and name != "load_embedded_pipeline"] == []


def test_files_that_contributors_are_sent_to_exist():
    named = re.findall(r"`((?:kernels|tests|scripts|turbo_rcm_patch|\.ci|\.github)/[\w./]*)`", CONTRIBUTING)
    named += re.findall(r"python (scripts/\S+\.py)", CONTRIBUTING)
    assert len(named) > 8
    roots = (ROOT, ROOT / "turbo_rcm_patch")
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


def test_issues_are_asked_for_the_report():
    assert parse_arguments(["info", "--report"]).report
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        labels = [part["attributes"]["label"] for part in yaml.safe_load(path.read_text())["body"]]
        assert "Output of `turbo-rcm info --report`" in labels


def steps_of(workflow):
    jobs = yaml.safe_load((ROOT / ".github/workflows" / workflow).read_text())["jobs"]
    return [step.get("run", step.get("uses", "")) for job in jobs.values() for step in job["steps"]]


def test_the_workflow_runs_what_runs_here():
    assert ".ci/run" in steps_of("tests.yml")


def test_a_tag_is_built_checked_and_published():
    steps = steps_of("publish.yml")
    order = ["absolute_links.py", "python -m build", "twine check", "gh-action-pypi-publish"]
    places = [next(i for i, step in enumerate(steps) if part in step) for part in order]
    assert places == sorted(places)
    scripts = re.findall(r"scripts/\S+\.py", "\n".join(steps))
    assert all((ROOT / script).exists() for script in scripts)
