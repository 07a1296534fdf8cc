"""The LoRA rows: random adapters, what they are timed beside, and the script that the GPU session starts."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.oracle import relative_error
from turbo_rcm_patch.bench.cases import CASES, build_pipeline, random_inputs
from turbo_rcm_patch.bench.lora import RESCALED, WITHOUT, add_random_lora, lora_variants
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching import patch, use_rcm

ROOT = Path(__file__).resolve().parents[2]
CALL = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 1.0}


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def latents_of(pipe):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return pipe(**CALL, **random_inputs(pipe), generator=generator, output_type="latent").frames


def test_variants_are_what_they_are_called():
    pipe = build_pipeline(CASES["tiny"], torch.float32, torch.device("cpu"), layers=1)
    use_rcm(pipe)
    without = latents_of(pipe)
    add_random_lora(pipe.transformer, [4, 7])
    with_lora = latents_of(pipe)
    assert relative_error(with_lora, without) > 0.01
    config = PatchConfig()
    switches = lora_variants(pipe, config)
    with switches[WITHOUT]():
        assert relative_error(latents_of(pipe), without) <= 1e-5
    with switches[RESCALED]():
        assert relative_error(latents_of(pipe), with_lora) > 1e-3
    with patch(pipe, config):
        assert relative_error(latents_of(pipe), with_lora) <= 1e-5
    assert torch.equal(latents_of(pipe), with_lora)


def test_script(tmp_path, capsys):
    path = tmp_path / "lora.json"
    options = [
        "--config",
        "tiny",
        "--layers",
        "1",
        "--steps",
        "2",
        "--repeats",
        "1",
        "--no-compile",
        "--lora",
        "4",
        "4",
    ]
    assert load("benchmark_end_to_end").main([*options, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["settings"]["lora_ranks"] == [4, 4]
    assert [v["name"] for v in result["variants"]] == ["unpatched", "patched", WITHOUT, RESCALED]
    assert all(len(v["timings"]["steps"]) == 2 for v in result["variants"])
    assert "+ LoRA" in result["patch_summary"]
    with pytest.raises(SystemExit):
        load("benchmark_end_to_end").main([*options, "--ulysses", "2"])
    assert "leave --ulysses out" in capsys.readouterr().err


def test_the_session_measures_every_row():
    rows = [command for name, command in load("gpu_session").MEASUREMENTS.items() if "lora" in name]
    parse = load("benchmark_end_to_end").parse_options
    options = [parse(list(command[1:])) for command in rows]
    assert [(o.lora, o.preset, o.frames) for o in options] == [
        ([64], "exact", None),
        ([64, 64], "exact", None),
        ([128], "exact", None),
        ([64], "exact", 17),
        ([64], "quantized", None),
    ]
    assert all((o.config, o.layers, o.height, o.width) == ("wan2.1-14b", 4, 480, 832) for o in options)
