"""The reported error of attention in 8 bits is within the tier's limits."""

from dataclasses import asdict, replace

import pytest
import torch

from scripts.benchmarks import attention_error
from scripts.benchmarks import measure_attention_error as script
from scripts.benchmarks.attention_error import CAPTURED, NORMAL, STRUCTURED, AttentionError, error_of, measure
from scripts.tools.pages.checks import attention_errors_table
from tests.oracle import torch_device
from turbo_rcm_patch import embedded

GOOD = AttentionError(STRUCTURED, 2, 0.9999, 0.01, 0.02, 0.05, 0.4)


def test_all_kinds_are_within_the_limits(device, monkeypatch):
    """The errors are our kernel's on a GPU, and the reference's on the CPU."""
    monkeypatch.setattr(attention_error, "STEPS", 1)
    found = list(measure(torch_device(device), tokens=512, heads=2, head_dim=128))
    blocks = len(embedded.load_embedded_pipeline(torch.float32).transformer.blocks)
    assert [(error.values, error.count) for error in found] == [(NORMAL, 1), (STRUCTURED, 1), (CAPTURED, blocks)]
    assert [error.missed() for error in found] == [[], [], []]
    assert all(1e-3 < error.relative_l2 < error.rival_l2 for error in found)


def test_the_worst_counts():
    one, other = ([torch.randn(1, 70, 2, 64) for _ in range(3)] for _ in range(2))
    other[1] = other[1] * 8  # sharper, so larger errors of the scores
    both = error_of(NORMAL, [one, other])
    alone = [error_of(NORMAL, [qkv]) for qkv in (one, other)]
    assert both.cosine == min(error.cosine for error in alone)
    assert both.relative_l1 == max(error.relative_l1 for error in alone)
    assert both.beside_rival == max(error.beside_rival for error in alone)
    assert alone[1].relative_l2 > alone[0].relative_l2


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_not_a_number_is_not_passed_over(order):
    wrong = [torch.full((1, 70, 2, 64), torch.nan) for _ in range(3)]
    both = [[torch.randn(1, 70, 2, 64) for _ in range(3)], wrong][::order]
    assert error_of(STRUCTURED, both).missed() == ["cosine", "relative_l1", "beside_rival"]


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"cosine": 0.9994}, ["cosine"]),
        ({"relative_l1": 0.031}, ["relative_l1"]),
        ({"relative_l2": 0.05, "beside_rival": 0.51}, ["beside_rival"]),
        ({"values": NORMAL, "cosine": 0.9, "beside_rival": 0.7}, []),
        ({"values": NORMAL, "relative_l2": 0.042}, ["relative_l2"]),
        ({"cosine": float("nan"), "relative_l1": float("nan")}, ["cosine", "relative_l1"]),
    ],
)
def test_what_is_beyond_the_limits_is_named(change, missed):
    assert replace(GOOD, **change).missed() == missed


def test_the_script_fails_where_a_limit_is_missed(monkeypatch, tmp_path, capsys):
    for error, code in ((GOOD, 0), (replace(GOOD, cosine=0.99), 1)):
        monkeypatch.setattr(script, "measure", lambda device, error=error, **size: iter([error]))
        assert script.main(["--json", str(tmp_path / "errors.json")]) == code
    assert "structured: cosine 0.99 is beyond the limit" in capsys.readouterr().out


def test_the_page_marks_what_is_missed():
    rows = [asdict(GOOD) | {"missed": []}, asdict(replace(GOOD, relative_l1=0.04)) | {"missed": ["relative_l1"]}]
    rows.append(asdict(replace(GOOD, values=NORMAL)) | {"missed": []})
    table = attention_errors_table({"attention_errors": rows, "settings": script.SIZE})
    allowed = "cosine ≥ 0.9995, L1 ≤ 0.03, share ≤ 0.5"
    assert f"| structured | 2 | 0.99990 | 1.0e-02 | 2.0e-02 | 5.0e-02 | 0.40 | {allowed} |" in table
    assert f"| structured | 2 | 0.99990 | 4.0e-02 ✗ | 2.0e-02 | 5.0e-02 | 0.40 | {allowed} |" in table
    assert "| N(0, 1) | 2 | 0.99990 | 1.0e-02 | 2.0e-02 | 5.0e-02 | 0.40 | L2 ≤ 4.1e-02 |" in table


def test_the_rivals_roundings_are_those_of_e4m3():
    """If e4m3 holds all values exactly, only the softmax's weights are rounded."""
    q, k = torch.zeros(1, 3, 1, 4), torch.zeros(1, 5, 1, 4)
    v = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]).view(1, 5, 1, 1).expand(-1, -1, -1, 4)
    assert torch.equal(attention_error.flash_attention_in_fp8(q, k, v), torch.full((1, 3, 1, 4), 6.2))
