"""The documentation's site: its pages, their links here and there, and what they say about the code.

`.ci/run` builds the site; this runs without mkdocs, except for one test.
"""

import ast
import os
import re
import shlex
import unicodedata
from functools import cache
from pathlib import Path

import pytest
import yaml

import turbo_rcm_patch as trp
from turbo_rcm_patch.cli.arguments import parse_arguments
from turbo_rcm_patch.config import FUSION_GROUPS, QUANTIZABLE
from turbo_rcm_patch.patching.families import FAMILIES
from turbo_rcm_patch.patching.families.family import Family
from turbo_rcm_patch.recipes import RECIPES

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "docs/mkdocs.yml"
PAGES = sorted(
    path.relative_to(ROOT).as_posix() for folder in (".", "docs", "results") for path in (ROOT / folder).glob("*.md")
)


def text_of(page):
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def named_in(nav):
    for entry in nav:
        for where in entry.values():
            yield from [where] if isinstance(where, str) else named_in(where)


def test_the_navigation_names_every_page():
    assert sorted(named_in(yaml.safe_load(CONFIG.read_text())["nav"])) == PAGES


def test_the_site_is_built_strictly():
    """With --quiet mkdocs counts no warnings."""
    (line,) = re.findall(r"^mkdocs build .*", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert line.startswith("mkdocs build --strict --config-file docs/mkdocs.yml ")
    assert "quiet" not in line


@cache
def anchors_of(page):
    """The headings' anchors that are the same on the code host and on the site."""
    headings = re.findall(r"^#+ (.*)", text_of(page), re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower().strip() for heading in headings]
    host = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}
    ascii_only = [unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode() for heading in plain]
    return host & {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in ascii_only}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        is_there = target in PAGES or ((ROOT / target).is_file() and not target.endswith(".md"))
        if not is_there or (anchor and anchor not in anchors_of(target)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_lists_begin_after_an_empty_line(page):
    """Without one the site shows a list as a paragraph."""
    lines, begins = text_of(page).splitlines(), re.compile(r"(- |\d+\. )")
    inside, wrong = False, []
    for before, line in zip(["", *lines], lines, strict=False):
        if begins.match(line) and before and not inside:
            wrong.append(line)
        inside = bool(begins.match(line)) or (inside and line.startswith(" ")) or (inside and not line)
    assert wrong == []


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs/api.md").read_text()
    described = [name.removeprefix("turbo_rcm_patch.") for name in re.findall(r"^::: (\S+)", page, re.MULTILINE)]
    assert len(described) == len(set(described))
    assert {*described, *re.findall(r"`trp\.([A-Z]+)`", page)} == set(trp.__all__)
    assert set(re.findall(r'"(\w+)"', page)) == {*FUSION_GROUPS, *QUANTIZABLE}


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/") or page == "README.md"])
def test_names_and_commands_of_pages_exist(page):
    text = (ROOT / page).read_text().replace("\\\n", "")
    assert {name for name in re.findall(r"\btrp\.(\w+)", text) if name not in trp.__all__} == set()
    for code in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        ast.parse(code)
    for line in re.findall(r"^(?: {4})?turbo-rcm (.*)", text, re.MULTILINE):
        parse_arguments(shlex.split(line, comments=True))


def test_the_recipes_are_those_of_the_package():
    rows = re.findall(r"^\| (`.*) \| .* \| ([\w ]+) \|$", (ROOT / "docs/checkpoints.md").read_text(), re.MULTILINE)
    told = {name: steps for names, steps in rows for name in re.findall(r"`(.*?)`", names)}
    assert told == {name: recipe.takes for name, recipe in RECIPES.items()}


def test_the_models_are_those_of_the_package():
    text = (ROOT / "docs/models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| (\w+) \| (\w+) \| (\w+) \|$", text, re.MULTILINE)
    yes = {True: "yes", False: "no"}
    assert rows == [
        (
            family.transformer_class.__name__,
            yes[all(blocks.sparse is not None for blocks in family.blocks)],
            yes[bool(family.pipelines)],
            yes[family.attributes is not Family.attributes],
        )
        for family in FAMILIES
    ]
    for family in FAMILIES:
        assert all(f"`{pipeline.pipeline_class.__name__}`" in text for pipeline in family.pipelines)


def test_quoted_messages_are_in_the_code():
    """A string literal of the code that is broken into lines, or has values in it, is joined, with … for the values."""
    strings = []
    for path in (ROOT / "turbo_rcm_patch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                strings.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(re.sub(r"%\w", "…", node.value))
    rows = text_of("docs/troubleshooting.md").split("## Warnings")[1].splitlines()
    quoted = [row.split("`")[1] for row in rows if row.startswith("| `")]
    assert len(quoted) > 10
    assert [message for message in quoted if not any(message in string for string in strings)] == []


def test_the_theme_is_not_left_out():
    """exclude_docs is about the theme's files too."""
    load_config = pytest.importorskip("mkdocs.config").load_config
    pytest.importorskip("mkdocstrings")
    from mkdocs.structure.files import File, InclusionLevel, set_exclusions

    config = load_config(str(CONFIG))
    files = [File(f"assets/{name}", None, config.site_dir, True) for name in ("stylesheets/main.css", "a/b/c.js")]
    files += [File(name, None, config.site_dir, True) for name in ("results/page.png", "tests/README.md")]
    set_exclusions(files, config)
    assert [file.inclusion is InclusionLevel.EXCLUDED for file in files] == [False, False, False, True]
