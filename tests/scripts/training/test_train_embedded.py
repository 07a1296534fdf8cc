"""The whole training at a toy size: it runs, stops, goes on, and ends in a pipeline that loads."""

import json

import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel

from scripts.training import train_embedded
from scripts.training.embedded import models, student, teacher, text, vae
from scripts.training.embedded.models import TEXT_DIM
from turbo_rcm_patch.bench import evaluate
from turbo_rcm_patch.shapes import judge, render


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(render, "HEIGHT", 32)
    monkeypatch.setattr(render, "WIDTH", 32)
    monkeypatch.setattr(render, "FRAMES", 5)
    monkeypatch.setattr(render, "RADIUS", {"small": 3.0, "large": 5.0})
    monkeypatch.setattr(render, "SPEED", {"slowly": 0.5, "quickly": 1.0})
    monkeypatch.setattr(text, "MAX_TEXT_TOKENS", 32)
    monkeypatch.setattr(vae, "CROP", 16)
    monkeypatch.setattr(vae, "BATCH", 2)
    monkeypatch.setattr(teacher, "BATCH", 2)
    monkeypatch.setattr(student, "BATCH", 2)
    monkeypatch.setattr(student, "TANGENT_WARMUP", 2)
    monkeypatch.setattr(train_embedded, "STEPS", {"vae": 4, "teacher": 3, "student": 7})
    monkeypatch.setattr(train_embedded, "VIDEOS", {"vae": 8, "pool": 8})
    monkeypatch.setattr(train_embedded, "TEACHER_STEPS", 2)
    monkeypatch.setattr(train_embedded, "TEACHER_PROMPTS", 2)
    size = {"height": 32, "width": 32, "num_frames": 5}
    monkeypatch.setattr(train_embedded, "EMBEDDED_CALL", {**evaluate.EMBEDDED_CALL, **size})
    monkeypatch.setattr(vae, "build_vae", lambda: AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1))
    monkeypatch.setattr(
        teacher,
        "build_transformer",
        lambda: WanTransformer3DModel(
            num_attention_heads=1, attention_head_dim=32, num_layers=1, ffn_dim=32, text_dim=TEXT_DIM
        ),
    )
    judge._reference_moments.cache_clear()
    yield
    judge._reference_moments.cache_clear()  # they were rendered in this small world


def test_training_stops_goes_on_and_ends_in_a_pipeline(toy, tmp_path, capfd):
    command = ["--output", str(tmp_path), "--seed", "3"]
    assert train_embedded.main([*command, "--minutes", "0"]) == 75
    assert "run the same command again" in capfd.readouterr().out
    assert train_embedded.main([*command, "--until", "vae"]) == 0
    assert not (tmp_path / "teacher").exists()
    assert train_embedded.main(command) == 0

    pipe = WanPipeline.from_pretrained(tmp_path / "pipeline", dtype=torch.float16)
    taught = WanPipeline.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
    assert not torch.equal(pipe.transformer.proj_out.bias.float(), taught.transformer.proj_out.bias)
    torch.testing.assert_close(
        pipe.text_encoder.shared.weight.float(), taught.text_encoder.shared.weight, rtol=1e-3, atol=1e-3
    )
    assert pipe.vae.config.latents_std == taught.vae.config.latents_std != models.build_vae().config.latents_std
    files = [path.read_text() for path in (tmp_path / "pipeline").rglob("*.json")]
    assert not any(str(tmp_path) in text for text in files)

    summary = json.loads((tmp_path / "training.json").read_text())
    assert summary["seed"] == 3
    assert {name: summary["stages"][name]["step"] for name in summary["steps"]} == train_embedded.STEPS
    assert set(summary["stages"]["student"]) >= {"consistency", "matching", "fake_score"}
    assert summary["stages"]["teacher accuracy"]["accuracy"]["overall"]["asked"] > 0
    assert summary["seconds"] > 0

    lines = (tmp_path / "log.jsonl").read_text()
    assert train_embedded.main(command) == 0
    assert (tmp_path / "log.jsonl").read_text() == lines  # nothing was left to do
