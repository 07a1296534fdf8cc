"""The GPU memory that is estimated from a model's configs is that of its parameters and buffers."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel

import turbo_rcm_patch as trp
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.bench.fits import SIZES, fits, fits_table
from turbo_rcm_patch.patching.families import CASES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = [ROOT / f"results/nvidia-{gpu}.json" for gpu in ("h200", "h100-80gb-hbm3")]


def held(model):
    tensors = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if not n.startswith("rope")}
    return sum(tensor.nbytes for tensor in tensors.values())


def test_weights_are_those_of_the_model(tmp_path):
    model = tiny_wan_transformer(dtype=torch.bfloat16)
    model.save_config(tmp_path)
    exact, quantized, sparse = fits(tmp_path)
    assert (exact.tier, exact.weights) == ("exact", held(model))
    trp.patch(model, trp.Quantized(restorable=False))
    assert (quantized.tier, quantized.weights) == ("quantized", held(model))
    for block in model.blocks:
        block.attn1.proj_l = torch.nn.Linear(*2 * (model.config.attention_head_dim,), dtype=torch.bfloat16)
    assert (sparse.tier, sparse.weights) == ("sparse", held(model))


def test_a_model_with_another_attention_has_no_sparse_tier(tmp_path):
    tiny_family_transformer("animate").save_config(tmp_path)
    assert [fit.tier for fit in fits(tmp_path)] == ["exact", "quantized"]


def test_a_pipeline_has_a_line_for_each_transformer_and_tier(tmp_path):
    tiny_wan_pipeline("wan22").save_pretrained(tmp_path)
    found = fits(tmp_path)
    assert [fit.component for fit in found] == ["transformer"] * 3 + ["transformer_2"] * 3
    lines = fits_table(found).splitlines()
    assert len(lines) == 1 + len(found)
    assert re.search(r"step at 832x480, 81 frames +peak +step", lines[0])
    assert "+ about" in lines[1]


@pytest.mark.parametrize(("name", "gib"), [("wan2.1-1.3b", 0.83), ("wan2.1-14b", 1.87)])
def test_real_models_take_at_most_55_percent_in_8_bits(name, gib, tmp_path):
    with init_empty_weights():
        WanTransformer3DModel(**CASES[name].transformer).save_config(tmp_path)
    exact, quantized, sparse = fits(tmp_path)
    assert quantized.weights < sparse.weights <= 0.55 * exact.weights
    assert all(quantized.steps[size] < exact.steps[size] for size in SIZES)
    assert all(quantized.steps[size] <= sparse.steps[size] for size in SIZES)
    assert math.isclose(exact.steps[SIZES[0]] / 2**30, gib, abs_tol=0.01)


def _measured(name):
    """Return a run's transformer config and video size, and the peak bytes that it measured."""
    runs = (json.loads(path.read_text())["runs"] for path in RESULTS)
    run = next(run[name] for run in runs if name in run)
    settings = run["settings"]
    case = CASES[settings["config"]].transformer | ({"num_layers": settings["layers"]} if "layers" in settings else {})
    size = (settings["height"], settings["width"], settings.get("frames") or settings["num_frames"])
    patched = {variant["name"]: variant["timings"] for variant in run.get("variants", ())}.get("patched")
    return case, size, run["peak_bytes"] if patched is None else patched["peak_memory"]


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        ("wan2.1-14b-in-24-gb", "quantized"),
        ("wan2.1-1.3b", "exact"),
        ("wan2.1-14b-4-layers", "exact"),
        ("wan2.1-i2v-14b-4-layers", "exact"),
    ],
)
def test_the_peak_is_what_a_gpu_measured(name, tier, tmp_path):
    case, size, measured = _measured(name)
    with init_empty_weights():
        WanTransformer3DModel(**case).save_config(tmp_path)
    (fit,) = (fit for fit in fits(tmp_path) if fit.tier == tier)
    assert math.isclose(fit.peaks[size], measured, rel_tol=0.05)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="holds no transformer"):
        fits(tmp_path)
