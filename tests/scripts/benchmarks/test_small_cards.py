"""The benchmark of whole pipelines within a cap on memory."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

import turbo_rcm_patch as trp
from scripts.benchmarks import small_cards
from turbo_rcm_patch.memory.components import component_of

TIERS = ("exact", "quantized", "sparse", "sparse, text encoder in 8 bits")
RECORDED = {"watching": nullcontext, "mark": lambda _: None, "ends": [1.0, 2.0], "peaks": {}}

pytestmark = pytest.mark.usefixtures("small_encoder")


def test_the_embeddings_are_one_tensor_under_two_names():
    pipe = small_cards.random_pipeline("tiny")
    table = pipe.text_encoder.get_input_embeddings().weight
    assert table is pipe.text_encoder.encoder.embed_tokens.weight
    component = component_of("text_encoder", pipe.text_encoder, trp.Exact())
    assert component.table == table.nbytes
    assert component.outside < table.nbytes


@pytest.mark.parametrize("config", ["tiny-experts", "tiny-image"])
def test_a_video(config, monkeypatch):
    for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(small_cards.torch.cuda, name, lambda: 0)
    monkeypatch.setitem(small_cards.CASES, config, with_small_encoders(small_cards.CASES[config]))
    pipe = small_cards.random_pipeline(config)
    trp.use_rcm(pipe)
    recorder = small_cards.Recorder(2)
    size = {"height": 32, "width": 48, "num_frames": 5}
    with recorder.watching(pipe):
        frames = pipe(**small_cards.inputs_of(pipe, size), **small_cards.call_options(recorder)).frames
    assert frames.shape == (1, 5, 32, 48, 3)
    assert 0 < frames.std() < 1
    assert len(recorder.ends) == 2
    of_images = {"image encoding", "VAE encoding"} if config == "tiny-image" else set()
    assert recorder.peaks.keys() == {"text encoding", "denoising"} | of_images


@pytest.mark.parametrize(("seconds", "videos"), [(small_cards.LONG - 1, 3), (small_cards.LONG + 1, 1)])
def test_a_long_video_is_timed_once(seconds, videos, monkeypatch):
    clock = iter(range(0, 100 * seconds, seconds))
    monkeypatch.setattr(small_cards, "Recorder", lambda steps: SimpleNamespace(**RECORDED))
    monkeypatch.setattr(small_cards, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(small_cards.torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 0})
    monkeypatch.setattr(small_cards.torch.cuda, "max_memory_reserved", lambda: 0)
    monkeypatch.setattr(small_cards, "empty_cache", lambda: None)
    monkeypatch.setattr(small_cards, "inputs_of", lambda *_: {})
    monkeypatch.setattr(small_cards, "call_options", lambda _: {})
    figures = small_cards.measure(lambda: SimpleNamespace(frames=torch.zeros(1)), {}, 3)
    assert (figures["seconds"], figures["videos"]) == (seconds, videos)


def with_small_encoders(case):
    """Image to video has an image encoder; its size here is that of the tiny transformer."""
    if "image_dim" not in case.transformer:
        return case
    wide = case.transformer["image_dim"]
    image = CLIPVisionConfig(
        hidden_size=wide,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=224,
        patch_size=112,
    )
    return replace(case, encoders={**small_cards.TEXT, "image_encoder": (CLIPVisionModel, image)})


@pytest.mark.parametrize(
    ("given", "presets"),
    [([], ["quantized"]), (["--rivals", "leaves"], []), (["--rivals", "leaves", "--presets", "exact"], ["exact"])],
)
def test_diffusers_own_offloading_runs_alone(given, presets, monkeypatch):
    monkeypatch.setattr(small_cards.torch.cuda, "is_available", lambda: True)
    assert small_cards.parse_options(given).presets == presets


def test_diffusers_alone_has_no_text_encoder_in_8_bits(capsys):
    with pytest.raises(SystemExit):
        small_cards.parse_options(["--rivals", "leaves", "--text-encoder", "8bit"])
    assert "give --presets" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """The cap has room for what other tests of this process left on the card."""
    path = tmp_path / "cards.json"
    sizes = ["--height", "64", "--width", "96", "--frames", "5", "--repeats", "1"]
    rivals = ["--rivals", *small_cards.OFFLOADING]
    tiers = ["--presets", "exact", "quantized", "sparse", "--text-encoder", "8bit"]
    assert small_cards.main(["--config", "tiny", "--vram", "6GB", *sizes, *tiers, *rivals, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["cards"]
    assert [(row["variant"], row["card"]) for row in rows] == [
        *((f"diffusers, offloading by {rival}", "6GB") for rival in small_cards.OFFLOADING),
        *((tier, card) for tier in TIERS for card in (None, "6GB")),
    ]
    for row in rows:
        assert row["seconds"] > 0
        if "peaks" in row:
            assert row["allocated"].keys() == row["peaks"].keys()
        if row["card"]:
            assert row["reserved"] <= 6 * 10**9
