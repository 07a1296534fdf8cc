"""scripts/benchmarks/end_to_end.py on the tiny case."""

import json

import pytest
import torch

from scripts.benchmarks import end_to_end


def test_every_stage_of_every_variant_is_timed(tmp_path, capsys):
    json_path = tmp_path / "benchmark.json"
    options = ["--config", "tiny", "--layers", "1", "--steps", "2", "--repeats", "1", "--decode", "--no-compile"]
    assert end_to_end.main([*options, "--vae-dtype", "bfloat16", "--json", str(json_path)]) == 0
    result = json.loads(json_path.read_text())
    assert (result["settings"]["layers"], result["settings"]["vae_dtype"]) == (1, "bfloat16")
    assert [variant["name"] for variant in result["variants"]] == ["unpatched", "patched"]
    assert len(result["variants"][0]["timings"]["steps"]) == 2
    assert result["variants"][1]["timings"]["vae_decode"] > 0
    assert result["variants"][1]["timings"]["output"] > 0
    assert 0 <= result["variants"][1]["latents"]["relative_l2"] < (1e-5 if not torch.cuda.is_available() else 5e-2)
    printed = capsys.readouterr().out
    for text in ("patched", "text encoding", "step 2", "VAE decode", "output", "total", "decoder, bfloat16 on"):
        assert text in printed


def test_it_checks_its_presets_first(capsys):
    for presets, message in (
        (["exact", "quantised"], "invalid choice: 'quantised'"),
        (["sparse"], "--mass is of block"),
    ):
        with pytest.raises(SystemExit):
            end_to_end.main(["--mass", "0.5", "--preset", *presets])
        assert message in capsys.readouterr().err


def test_another_mass_and_a_vae_in_8_bits(tmp_path):
    json_path = tmp_path / "benchmark.json"
    options = ["--config", "tiny", "--layers", "1", "--steps", "1", "--repeats", "1", "--no-compile"]
    preset = ("--preset", "block_sparse", "--mass", "0.5")
    assert end_to_end.main([*options, *preset, "--vae", "8bit", "--json", str(json_path)]) == 0
    result = json.loads(json_path.read_text())
    assert (result["settings"]["mass"], result["settings"]["vae"]) == (0.5, "8bit")
    assert 'vae="8bit": ' in result["patch_summary"]
