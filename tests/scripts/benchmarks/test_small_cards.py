"""The benchmark of whole pipelines within a cap on memory."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import LTX2Pipeline
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from transformers import CLIPVisionConfig, CLIPVisionModel, Gemma3Config, Gemma3ForConditionalGeneration

import turbo_rcm_patch as trp
from scripts.benchmarks import small_cards
from turbo_rcm_patch.memory import plan as plan_module
from turbo_rcm_patch.memory.choose import Placement
from turbo_rcm_patch.memory.components import component_of

TIERS = ("exact", "quantized", "sparse", "sparse, text encoder in 8 bits")
RECORDED = {"watching": nullcontext, "ends": [1.0, 2.0], "peaks": {}}
CONNECTOR = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_learnable_registers": 8}
GEMMA = Gemma3Config(
    text_config={
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 100,
        "pad_token_id": 0,
    },
    vision_config={
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    },
)
WITH_SOUND = {"height": 64, "width": 96, "num_frames": 5}
STAGES_WITH_SOUND = [
    *("text encoding", "connectors", "denoising", "decoding"),
    *("decoding the sound", "making the waveform"),
]

pytestmark = pytest.mark.usefixtures("small_encoder")


@pytest.fixture
def ltx2(monkeypatch):
    """LTX-2's tiny case with a tiny text encoder, and connectors of its size."""
    case = small_cards.CASES["tiny-ltx2"]
    layers = GEMMA.text_config.num_hidden_layers + 1
    connectors = {"caption_channels": GEMMA.text_config.hidden_size, "text_proj_in_factor": layers}
    connectors |= {f"{stream}_connector_{name}": n for stream in ("video", "audio") for name, n in CONNECTOR.items()}
    others = {**case.others, "connectors": (LTX2TextConnectors, {**connectors, "rope_type": "split"})}
    encoders = {"text_encoder": (Gemma3ForConditionalGeneration, GEMMA)}
    monkeypatch.setitem(small_cards.CASES, "tiny-ltx2", replace(case, encoders=encoders, others=others))


@pytest.fixture
def without_gpu(monkeypatch):
    """Let the benchmark count no memory, and cap none."""
    for name in ("synchronize", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(small_cards.torch.cuda, name, lambda: 0)
    monkeypatch.setattr(small_cards.torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 0})
    monkeypatch.setattr(small_cards, "empty_cache", lambda: None)
    monkeypatch.setattr(small_cards, "cap", lambda *_: nullcontext())


def pipeline_with_sound():
    pipe = small_cards.random_pipeline("tiny-ltx2")
    small_cards.install_sampler(pipe)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_embeddings_are_one_tensor_under_two_names():
    pipe = small_cards.random_pipeline("tiny")
    table = pipe.text_encoder.get_input_embeddings().weight
    assert table is pipe.text_encoder.encoder.embed_tokens.weight
    component = component_of("text_encoder", pipe.text_encoder, trp.Exact())
    assert component.table == table.nbytes
    assert component.outside < table.nbytes


@pytest.mark.parametrize("config", ["tiny-experts", "tiny-image"])
def test_a_video(config, monkeypatch, without_gpu):
    monkeypatch.setitem(small_cards.CASES, config, with_small_encoders(small_cards.CASES[config]))
    pipe = small_cards.random_pipeline(config)
    small_cards.install_sampler(pipe)
    recorder = small_cards.Recorder(2)
    size = {"height": 32, "width": 48, "num_frames": 5}
    with recorder.watching(pipe):
        hooks = pipe.transformer._forward_pre_hooks  # with one it takes no CUDA graph
        assert len(hooks) == (1 if config == "tiny-image" else 0)
        frames = pipe(**small_cards.inputs_of(pipe, size), **small_cards.call_options(pipe, recorder)).frames
    assert frames.shape == (1, 5, 32, 48, 3)
    assert 0 < frames.std() < 1
    assert len(recorder.ends) == 2
    of_images = {"image encoding", "VAE encoding"} if config == "tiny-image" else set()
    assert recorder.peaks.keys() == {"text encoding", "denoising", "decoding"} | of_images


def test_a_pipeline_with_sound_has_all_its_models_in_bf16(ltx2):
    pipe = small_cards.random_pipeline("tiny-ltx2")
    assert type(pipe) is LTX2Pipeline
    models = small_cards.models_of(pipe)
    assert len(models) == 6
    assert {parameter.dtype for model in models for parameter in model.parameters()} == {torch.bfloat16}
    assert pipe.text_encoder.lm_head.weight is pipe.text_encoder.get_input_embeddings().weight
    assert small_cards.tokens_of(pipe) == 1024


@pytest.mark.parametrize("tier", ["exact", "quantized", "sparse"])
def test_a_video_with_sound_has_the_stages_of_its_plan(tier, monkeypatch, ltx2, without_gpu):
    """Also where models stream. The prompt is encoded once, because the sampler has no guidance."""
    pipe = pipeline_with_sound()
    assert not small_cards.needs_projections(pipe)
    trp.patch(pipe, tier)
    row = small_cards.row_of(pipe, "8GB", WITH_SOUND, 1, torch.device("cpu"))
    assert row["seconds"] > 0
    assert row["videos"] == 1
    assert list(row["allocated"]) == list(row["peaks"]) == STAGES_WITH_SOUND
    assert row["streaming"] == []

    def all_stream(components, *_):
        return Placement(frozenset(component.name for component in components if component.blocks), tiles=True)

    monkeypatch.setattr(plan_module, "choose", all_stream)
    encoded = []
    pipe.text_encoder.register_forward_pre_hook(lambda *_: encoded.append(1))
    row = small_cards.row_of(pipe, "8GB", WITH_SOUND, 1, torch.device("cpu"))
    assert {"text_encoder", "transformer"} <= set(row["streaming"])
    assert list(row["allocated"]) == STAGES_WITH_SOUND
    assert len(encoded) == 2  # a video each, of 1 step and of 4


@pytest.mark.parametrize("name", ["vae", "audio_vae", "vocoder"])
def test_frames_and_sound_that_are_not_finite_are_an_error(name, ltx2, without_gpu):
    pipe = pipeline_with_sound()
    for parameter in getattr(pipe, name).parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(AssertionError):
        small_cards.measure(pipe, WITH_SOUND, 1)


def test_the_prompt_of_a_pipeline_with_sound(ltx2):
    """Its tokens are the pipeline's, so that no random embedding is looked up beyond the encoder's table."""
    pipe = pipeline_with_sound()
    embeddings, mask, *_ = pipe.encode_prompt("a prompt", max_sequence_length=small_cards.tokens_of(pipe))
    assert embeddings.shape == (1, 1024, 3 * 32)
    assert mask.all()
    inputs = small_cards.inputs_of(pipe, WITH_SOUND)
    assert (inputs["frame_rate"], inputs["guidance_scale"], inputs["use_cross_timestep"]) == (24.0, 1.0, False)


@pytest.mark.parametrize(("seconds", "videos"), [(small_cards.LONG - 1, 3), (small_cards.LONG + 1, 1)])
def test_a_long_video_is_timed_once(seconds, videos, monkeypatch):
    clock = iter(range(0, 100 * seconds, seconds))
    monkeypatch.setattr(small_cards, "Recorder", lambda steps: SimpleNamespace(**RECORDED))
    monkeypatch.setattr(small_cards, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(small_cards.torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 0})
    monkeypatch.setattr(small_cards.torch.cuda, "max_memory_reserved", lambda: 0)
    monkeypatch.setattr(small_cards, "empty_cache", lambda: None)
    monkeypatch.setattr(small_cards, "inputs_of", lambda *_: {})
    monkeypatch.setattr(small_cards, "call_options", lambda *_: {})
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


@pytest.mark.parametrize("option", [["--rivals", "leaves"], ["--presets", "exact", "--text-encoder", "8bit"]])
def test_options_of_wan_alone(option, monkeypatch, capsys):
    monkeypatch.setattr(small_cards.torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        small_cards.parse_options(["--config", "ltx2-19b", *option])
    assert f"{option[-2]} is for Wan's models; --config is ltx2-19b." in capsys.readouterr().err
    assert small_cards.parse_options(["--config", "ltx2-19b", "--vram", "24GB"]).presets == ["quantized"]


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


@pytest.mark.gpu
def test_a_pipeline_with_sound_on_a_gpu(tmp_path, ltx2):
    path = tmp_path / "cards.json"
    sizes = ["--height", "64", "--width", "96", "--frames", "5", "--repeats", "1"]
    tiers = ["--presets", "exact", "quantized", "sparse"]
    assert small_cards.main(["--config", "tiny-ltx2", "--vram", "6GB", *sizes, *tiers, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert figures["settings"]["sound"]
    for row in figures["cards"]:
        assert row["seconds"] > 0
        assert list(row["allocated"]) == list(row["peaks"]) == STAGES_WITH_SOUND
