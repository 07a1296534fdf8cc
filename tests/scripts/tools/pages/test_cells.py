"""scripts/tools/pages/cells.py: versions stand once, with all commits that ran with them."""

from scripts.tools.pages.cells import versions, versions_and_commits

OLD, NEW = ({"torch": torch, "triton": "3.6", "diffusers": "0.42"} for torch in ("2.11", "2.14"))


def test_versions_stand_once_with_their_commits():
    runs = [{**OLD, "commit": "a"}, {**NEW, "commit": "a"}, {**OLD, "commit": "b" * 40}, {**OLD, "commit": "a"}]
    old, new = (f"torch {torch}, triton 3.6, diffusers 0.42, commit" for torch in ("2.11", "2.14"))
    expected = f"{old}s a, bbbbbbbbbbbb; {new} a"
    assert versions_and_commits(runs) == expected


def test_a_run_without_a_commit_has_its_versions_alone():
    assert versions({**OLD, "commit": None}) == versions(OLD) == "torch 2.11, triton 3.6, diffusers 0.42"
