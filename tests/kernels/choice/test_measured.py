"""The shipped measurements equal the results files, and they choose the kernels."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.tools import ship_measurements
from turbo_rcm_patch.kernels import measured_on, why_torch
from turbo_rcm_patch.kernels.choice import measured
from turbo_rcm_patch.kernels.choice.measured import FOLDER, OPS, Tuned, Verdict, read_slower_shapes, read_verdicts
from turbo_rcm_patch.kernels.linear.spec import LinearSpec, _why_torch_here

ROOT = Path(__file__).resolve().parents[3]

CUDA = torch.device("cuda")
SHIPPED = sorted(FOLDER.glob("*.json"))


@pytest.fixture
def gpu(monkeypatch):
    """Sets the compute capability of the GPU."""
    monkeypatch.setattr(torch.version, "hip", None)
    return lambda *capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_ships_is_what_the_results_say(path):
    results = json.loads((ROOT / "results" / path.name).read_text(encoding="utf-8"))
    expected = ship_measurements.as_text(ship_measurements.reduce_ops_run(results["runs"]["ops"]))
    assert path.read_text(encoding="utf-8") == expected


def test_every_gpu_with_results_ships_all_ops():
    with_ops = [p for p in (ROOT / "results").glob("*.json") if "ops" in json.loads(p.read_text()).get("runs", {})]
    assert with_ops
    assert {path.name for path in with_ops} == {path.name for path in SHIPPED}
    for path in SHIPPED:
        assert {row["op"] for row in json.loads(path.read_text())["rows"]} == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_on_sm90_ours_are_taken_in_16_bits(gpu, op):
    gpu(9, 0)
    assert why_torch(op, CUDA, torch.bfloat16) is None
    assert why_torch(op, CUDA, torch.float16) is None
    assert why_torch(op, CUDA, torch.float32) == "not measured in float32"
    assert measured_on(op, CUDA) == "NVIDIA H100 80GB HBM3, NVIDIA H200"


@pytest.mark.parametrize("op", OPS)
def test_elsewhere_nobody_measured(gpu, monkeypatch, op):
    gpu(12, 0)
    assert why_torch(op, CUDA, torch.bfloat16) == "not measured on sm_120"
    assert measured_on(op, CUDA) is None
    gpu(9, 0)  # as an MI200 says of itself
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert why_torch(op, CUDA, torch.bfloat16) == "not measured on AMD GPUs"
    assert measured_on(op, CUDA) is None


def test_the_cpu_has_no_choice():
    assert why_torch("attention", torch.device("cpu"), torch.float32) is None
    assert measured_on("attention", torch.device("cpu")) is None


def results_file(path, gpu, *rows):
    rows = [{"op": op, "dtype": "bfloat16", "ours": ours, "rival": rival} for op, ours, rival in rows]
    path.write_text(json.dumps({"gpu": gpu, "capability": [8, 9], "rows": rows}))


def test_a_file_of_another_card_changes_the_choice(gpu, monkeypatch, tmp_path):
    rows = [("linear_skip", 3.0, 4.0), ("linear_skip", 1.5, 1.0), ("linear_gelu", 2.0, 1.0), ("linear_qkv", None, 1.0)]
    results_file(tmp_path / "one.json", "NVIDIA L40", *rows)
    verdicts = read_verdicts(tmp_path.glob("*.json"))
    assert verdicts["linear_skip", (8, 9)] == Verdict(("NVIDIA L40",), 4.5, 5.0)
    monkeypatch.setattr(measured, "shipped", lambda: verdicts)
    gpu(8, 9)
    reasons = {op: why_torch(op, CUDA, torch.bfloat16) for op in OPS}
    assert reasons == {
        "attention": "not measured on sm_89",
        "linear_skip": None,
        "linear_gelu": "PyTorch's was faster on NVIDIA L40",
        "linear_qkv": "failed its check on NVIDIA L40",
        "conv_skip": "not measured on sm_89",
    }


def test_a_shape_that_is_slower_on_a_gpu_of_this_name_is_pytorchs_there(gpu, monkeypatch):
    """The QKV projections of Wan 1.3B at 81 frames of 832×480, which an H200 multiplies faster than PyTorch."""
    gpu(9, 0)
    monkeypatch.setattr(measured, "all_tuned", dict)
    sizes = {"rows": 32760, "N": 1536, "K": 1536}

    def reason(name, **changes):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        spec = LinearSpec(device=CUDA, dtype=torch.bfloat16, op="linear_qkv", weights=3, linears="auto", **sizes)
        return _why_torch_here(replace(spec, **changes))

    h100 = "NVIDIA H100 80GB HBM3"
    assert reason(h100) == f"PyTorch's was faster at this size on {h100}"
    assert reason("NVIDIA H200") is reason("NVIDIA H100 PCIe") is None
    for other in ({"rows": 7800}, {"op": "linear_skip"}, {"low": torch.bfloat16, "rank": 64}, {"dtype": torch.float32}):
        assert reason(h100, **other) is None
    tuned = Tuned({"linear_qkv": Verdict(("by tune",), 1.0, 2.0)}, {}, {}, {})
    monkeypatch.setattr(measured, "all_tuned", lambda: {h100: tuned})
    assert reason(h100) is None


def test_noise_makes_no_shape_slower(tmp_path):
    results_file(tmp_path / "one.json", "NVIDIA L40", ("linear_skip", 1.01, 1.0), ("linear_gelu", None, 1.0))
    assert read_slower_shapes(tmp_path.glob("*.json")) == {}


def test_cards_of_one_capability_are_judged_together(tmp_path):
    results_file(tmp_path / "a.json", "NVIDIA L40", ("attention", 3.0, 4.0))
    results_file(tmp_path / "b.json", "NVIDIA GeForce RTX 4090", ("attention", 4.0, 2.5))
    verdict = read_verdicts(tmp_path.glob("*.json"))["attention", (8, 9)]
    assert verdict == Verdict(("NVIDIA L40", "NVIDIA GeForce RTX 4090"), 7.0, 6.5)


def test_the_rival_computes_all_and_is_the_fastest():
    def timing(milliseconds, error=0.1, is_ours=False):
        return {"is_ours": is_ours, "error": error, "milliseconds": milliseconds}

    timings = {"slow": timing(3.0), "fast": timing(2.0), "partial": timing(1.0, None), "ours": timing(1.5, 0.1, True)}
    result = {"case": "linear_skip 7×5×3", "timings": timings, "best": "ours"}
    environment = {"gpu": "X", "capability": "sm_120", **dict.fromkeys(ship_measurements.VERSIONS, "1")}
    other = {"case": "layer_norm_modulate 7×5", "timings": {}, "best": None}
    reduced = ship_measurements.reduce_ops_run({"environment": environment, "results": [result, other]})
    assert reduced["capability"] == [12, 0]
    assert reduced["rows"] == [
        {"op": "linear_skip", "dtype": "bfloat16", "shape": [7, 5, 3], "ours": 1.5, "rival": 2.0, "rival_name": "fast"}
    ]
    timings["ours"]["milliseconds"] = None
    refused = {"environment": environment, "results": [{**result, "best": None}]}
    assert ship_measurements.reduce_ops_run(refused)["rows"][0]["ours"] is None
