"""The benchmark of whole pipelines within a cap on memory."""

import json

import pytest
import torch

import turbo_rcm_patch as trp
from scripts.benchmarks import memory_cap, small_cards
from turbo_rcm_patch.memory.components import component_of

TINY_TEXT = {"d_model": 32, "d_ff": 64, "num_heads": 2, "d_kv": 16, "num_layers": 2, "vocab_size": 100}


@pytest.fixture(autouse=True)
def small_encoder(monkeypatch):
    for name, value in TINY_TEXT.items():
        monkeypatch.setattr(small_cards.UMT5_XXL, name, value)
    monkeypatch.setattr(memory_cap, "POOL", 1 << 12)


def test_the_embeddings_are_one_tensor_under_two_names():
    pipe = small_cards.random_pipeline("tiny", 1)
    table = pipe.text_encoder.get_input_embeddings().weight
    assert table is pipe.text_encoder.encoder.embed_tokens.weight
    component = component_of("text_encoder", pipe.text_encoder, trp.Exact())
    assert component.table == table.nbytes
    assert component.outside < table.nbytes


def test_a_video_of_two_experts():
    pipe = small_cards.random_pipeline("tiny", 2)
    trp.use_rcm(pipe)
    options = {**small_cards.call_options([], torch.device("cpu")), "num_inference_steps": 2}
    del options["callback_on_step_end"]
    frames = pipe("a prompt", height=32, width=48, num_frames=5, **options).frames
    assert frames.shape == (1, 5, 32, 48, 3)
    assert 0 < frames.std() < 1


def test_a_card_that_is_too_small_is_told_in_the_table():
    row = {"card": "6 GB", "streaming": ["transformer"], "tiles": True, "predicted": {"decoding": 5 * 10**9}}
    row |= {"seconds": None, "step_seconds": None, "allocated": None, "reserved": None}
    assert small_cards.cells(row) == ("6 GB", "transformer", "tiles", "5.00", "no", "no", "no")


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    path = tmp_path / "cards.json"
    sizes = ["--height", "64", "--width", "96", "--frames", "5", "--repeats", "1"]
    assert small_cards.main(["--config", "tiny", "--vram", "1GB", *sizes, "--json", str(path)]) == 0
    whole, card = json.loads(path.read_text())["cards"]
    assert whole["card"] is None
    assert whole["streaming"] == []
    assert card["allocated"] <= max(card["predicted"].values())
    assert card["reserved"] <= 10**9
