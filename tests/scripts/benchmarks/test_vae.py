"""The benchmark of a VAE alone, on a tiny one."""

import json

import pytest
import torch

from scripts.benchmarks import memory_cap
from scripts.benchmarks import vae as module
from scripts.benchmarks.vae import IN_TILES, LITTLE_MEMORY, PATCHED, STRIPS, TINY, UNPATCHED, main
from scripts.tools.pages.vae import NUMPY, PIL
from tests.patching.tiny_vae.published import WIDTHS
from turbo_rcm_patch.patching.families.vae import forward
from turbo_rcm_patch.patching.tiny_vae import network

SIZE = ["--config", "tiny", "--height", "16", "--width", "32", "--frames", "5", "--repeats", "1"]


@pytest.fixture(autouse=True)
def small(request, monkeypatch):
    if "gpu" not in request.keywords:
        monkeypatch.setattr(network, "WIDTHS", WIDTHS)
        monkeypatch.setattr(memory_cap, "POOL", 1 << 16)


def run_on(device, file, *more):
    assert main([*SIZE, "--device", device, "--json", str(file), *more]) == 0
    return {(row["work"], row["variant"]): row for row in json.loads(file.read_text())["vae"]}


def test_every_variant_decodes_and_encodes(tmp_path, monkeypatch, capsys):
    taken = []
    at_once = forward.frames_at_once
    monkeypatch.setattr(forward, "frames_at_once", lambda *args, **kw: taken.append(at_once(*args, **kw)) or taken[-1])
    rows = run_on("cpu", tmp_path / "vae.json")
    names = UNPATCHED, PATCHED, LITTLE_MEMORY, IN_TILES
    tiny = rows.pop(("decode", TINY))
    assert tiny["error"] is tiny["predicted"] is None
    assert all(rows.pop(("decode", name))["seconds"] > 0 for name in STRIPS)
    output = {(work, name) for work in (NUMPY, PIL) for name in (UNPATCHED, PATCHED)}
    assert all(rows.pop(each)["seconds"] > 0 for each in output)
    assert set(rows) == {(work, name) for work in ("decode", "encode") for name in names}
    for work in ("decode", "encode"):
        for name in names[1:]:
            assert 0 < rows[work, name]["error"] < 1e-5
            assert rows[work, name]["predicted"] > 0
    assert rows["decode", LITTLE_MEMORY]["predicted"] < rows["decode", PATCHED]["predicted"]
    assert [1] * len(taken[0]) in taken  # little memory
    printed = capsys.readouterr().out
    assert "over unpatched" in printed
    assert printed.index(f"| {NUMPY} ") < printed.index(f"| {PIL} ")


def test_wrong_options_are_refused_before_a_vae_is_built(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, message in (
        (["--repeats", "0"], "--repeats 0: give 1 or more."),
        ([], "--device cuda: PyTorch finds no CUDA GPU; give --device cpu."),
    ):
        with pytest.raises(SystemExit):
            module.parse_options([*SIZE, *options])
        assert message in capsys.readouterr().err


def test_a_variant_is_undone():
    case = module.CASES["tiny"]
    vae = module.with_random_weights(lambda: case.vae_class(**case.vae))
    before = dict(vars(vae))
    for variant in (PATCHED, LITTLE_MEMORY, IN_TILES, module.IN_8_BITS, TINY):
        with module.as_variant(vae, variant):
            assert vars(vae) != before
        assert vars(vae) == before


@pytest.mark.gpu
def test_a_gpu_adds_torch_compile_and_memory(tmp_path):
    rows = run_on("cuda", tmp_path / "vae.json")
    for work in ("decode", "encode"):
        assert rows[work, module.COMPILED]["seconds"] > 0
        assert all(rows[work, name]["bytes"] > 0 for name in module.variants_of(torch.empty(0, device="cuda"), work))
