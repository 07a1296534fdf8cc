"""The benchmark of the text encoder, on a tiny one."""

import json

import pytest
import torch

from scripts.benchmarks import text_encoder

TINY = {"d_model": 128, "d_ff": 256, "num_heads": 2, "d_kv": 64, "num_layers": 2, "vocab_size": 100}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in TINY.items():
        monkeypatch.setattr(text_encoder.UMT5_XXL, name, value)
    monkeypatch.setattr(text_encoder, "PADDED", 48)


@pytest.mark.parametrize("tails", [[], ["--tails", "5"]], ids=["normal", "heavy tails"])
def test_every_variant_is_measured(tmp_path, tails, capsys):
    file = tmp_path / "figures.json"
    arguments = ["--tokens", "5", "40", "--repeats", "1", "--device", "cpu", "--json", str(file), *tails]
    assert text_encoder.main(arguments) == 0
    found = json.loads(file.read_text())
    rows = {(row["variant"], row["tokens"]): row for row in found["rows"]}
    assert set(rows) == {(name, count) for name in text_encoder.VARIANTS for count in (5, 40)}
    assert rows["transformers", 5]["of_bf16"] == 1
    for name in ("patched", "patched, streaming", "transformers, streaming"):
        assert 0.7 < rows[name, 40]["of_bf16"] < 1.3
    assert rows["patched, 8 bits", 40]["error"] > 1.1 * rows["patched", 40]["error"]
    assert rows["patched, 8 bits", 40]["weights"] < 0.65 * rows["patched", 40]["weights"]
    errors = [row["error"] for row in found["groups"] if row["tokens"] == 40]
    assert errors == sorted(errors, reverse=True)
    assert "of bf16's" in capsys.readouterr().out


def test_the_tails_are_heavy_and_the_deviation_stays():
    normal, heavy = (text_encoder.random_encoder(torch.device("cpu"), tails) for tails in (None, 5))
    for one, other in zip(*map(text_encoder.linears_of, (normal, heavy)), strict=True):
        assert float(other.weight.std().detach()) == pytest.approx(float(one.weight.std().detach()), rel=0.1)
        assert other.weight.abs().amax() > 1.3 * one.weight.abs().amax()
