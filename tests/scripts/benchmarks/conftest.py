import pytest

from scripts.benchmarks import memory_cap, stand_ins

TINY_TEXT = {"d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16, "num_layers": 2, "vocab_size": 100}


@pytest.fixture
def small_encoder(monkeypatch):
    """Wan's text encoder with two tiny layers, and few random values."""
    for name, value in TINY_TEXT.items():
        monkeypatch.setattr(stand_ins.UMT5_XXL, name, value)
    monkeypatch.setattr(memory_cap, "POOL", 1 << 12)
