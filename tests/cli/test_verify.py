"""`turbo-rcm verify`."""

import json

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from tests.bench.damage import damage_block
from tests.bench.test_keep_out import key_channel
from tests.cli.running import TINY, error_of
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.bench import verify as verify_module
from turbo_rcm_patch.cli import main


def test_verify_passes(tmp_path, capsys):
    assert main(["verify", *TINY, "--json", str(tmp_path / "verify.json")]) == 0
    assert "all 6 blocks and the VAE are within the allowed error" in capsys.readouterr().out
    assert json.loads((tmp_path / "verify.json").read_text())["ok"] is True


def test_verify_exits_with_1_and_names_the_wrong_block(capsys, monkeypatch):
    damage_block(monkeypatch, verify_module, "transformer.blocks.2", lambda output: output + 1e-4 * output.roll(1, -1))
    assert main(["verify", *TINY]) == 1
    printed = capsys.readouterr().out
    assert "transformer.blocks.2, step 1: difference" in printed
    assert "blocks.1, step" not in printed


def test_the_file_has_what_the_run_was_given(saved_models, tmp_path):
    model, image = saved_models / "i2v", tmp_path / "first.png"
    iio.imwrite(image, np.full((16, 16, 3), 90, dtype=np.uint8))
    given = {"model": str(model), "transformer": str(model / "transformer"), "image": str(image)}
    given |= {"sigma_max": 100.0, "seed": 3}
    options = [str(part) for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert main(["verify", *options, *TINY, "--steps", "1", "--json", str(tmp_path / "verify.json")]) == 0
    settings = json.loads((tmp_path / "verify.json").read_text())["settings"]
    assert settings | given == settings


def test_verify_builds_a_config(tmp_path, capsys):
    options = ["--config", "tiny", "--layers", "1", "--steps", "2", "--device", "cpu", "--dtype", "bfloat16"]
    assert main(["verify", *options, "--json", str(tmp_path / "verify.json")]) == 0
    assert "the block and the VAE are within the allowed error" in capsys.readouterr().out
    settings = json.loads((tmp_path / "verify.json").read_text())["settings"]
    assert settings | {"config": "tiny", "layers": 1, "model": None, "dtype": "bfloat16", "height": 32} == settings


@pytest.mark.usefixtures("cpu_as_a_gpu", "everything_streams")
def test_verify_with_vram_finds_the_same(saved_models, tmp_path, capsys):
    """The tier is the exact one. The search below runs in the quantized tier."""
    found = []
    for vram in ([], ["--vram", "10GB"]):
        options = ["--model", str(saved_models / "t2v"), "--json", str(tmp_path / "verify.json")]
        assert main(["verify", *options, *TINY[:-2], "--steps", "1", *vram]) == 0
        found.append(json.loads((tmp_path / "verify.json").read_text()))
    printed = capsys.readouterr().out
    assert "its blocks stream" in printed
    assert "checking a block" in printed
    plain, fitted = found
    for what in ("ok", "blocks", "parts", "decoding"):
        assert plain[what] == fitted[what]


@pytest.mark.usefixtures("cpu_as_a_gpu")
def test_verify_says_what_does_not_fit(capsys):
    assert "--vram 620 MB: 48x32, 5 frames take at least" in error_of(capsys, "verify", *TINY[:-2], "--vram", "620 MB")


def save_with_an_outlier(folder, layers):
    """Save a pipeline with one channel of the first block's keys a hundred times as large."""
    pipe = tiny_wan_pipeline(layers=layers)
    with torch.no_grad():
        key_channel(pipe.transformer)
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture
def model_with_an_outlier(tmp_path):
    """The folder of a model of one block."""
    return save_with_an_outlier(tmp_path / "model", 1)


def test_what_must_leave_8_bits_is_found_written_and_taken(model_with_an_outlier, tmp_path, capsys):
    file = tmp_path / "keep.json"
    options = ["--model", str(model_with_an_outlier), "--preset", "quantized", *TINY]
    assert main(["verify", *options, "--keep-out", str(file), "--json", str(tmp_path / "verify.json")]) == 0
    printed = capsys.readouterr().out
    assert "blocks.0.attn1.processor" in printed
    assert "transformer, step 2: " in printed
    assert "without a GPU times say nothing" in printed
    assert f"wrote {file}; use it by --preset quantized --keep {file}" in printed
    written = json.loads(file.read_text())
    assert [entry["name"] for entry in written["keep"]] == ["blocks.0.attn1.processor"]
    assert written["settings"]["height"] == 32
    assert json.loads((tmp_path / "verify.json").read_text())["ok"] is True
    assert list(tmp_path.glob(".keep*")) == []

    one_step = [*options, "--steps", "1", "--json", str(tmp_path / "verify.json")]
    assert main(["verify", *one_step, "--keep", str(file)]) == 0
    assert json.loads((tmp_path / "verify.json").read_text())["settings"]["keep"] == [str(file)]
    (tmp_path / "converted").mkdir()
    convert = ["convert", str(model_with_an_outlier), str(tmp_path / "converted"), "--keep", str(file)]
    assert main([*convert, "--device", "cpu"]) == 0


@pytest.mark.usefixtures("cpu_as_a_gpu", "everything_streams")
def test_the_search_with_vram_finds_the_same(tmp_path, capsys):
    model = save_with_an_outlier(tmp_path / "model", 2)  # one block would not stream
    options, found = ["--model", str(model), "--preset", "quantized", *TINY[:-2], "--steps", "1"], []
    for vram in ([], ["--vram", "10GB"]):
        file = tmp_path / f"keep{len(vram)}.json"
        assert main(["verify", *options, "--keep-out", str(file), *vram]) == 0
        found.append(json.loads(file.read_text()))
    printed = capsys.readouterr().out
    assert "its blocks stream" in printed
    assert "searching a block" in printed
    assert found[0]["keep"] == found[1]["keep"]
    assert found[0]["steps"] == found[1]["steps"]


def test_a_list_that_does_not_help_is_not_written(model_with_an_outlier, tmp_path, capsys, monkeypatch):
    file = tmp_path / "keep.json"
    file.write_text("mine")
    damage_block(monkeypatch, verify_module, "transformer.blocks.0", lambda output: 2 * output)
    options = ["--model", str(model_with_an_outlier), "--preset", "quantized", *TINY, "--steps", "1"]
    assert main(["verify", *options, "--keep-out", str(file)]) == 1
    assert f"{file} is not written" in capsys.readouterr().out
    assert file.read_text() == "mine"


def test_no_list_is_written_if_an_expert_did_not_run(tmp_path, capsys):
    tiny_wan_pipeline("wan22").save_pretrained(tmp_path / "model")
    options = ["--model", str(tmp_path / "model"), "--preset", "quantized", *TINY, "--steps", "1"]
    assert main(["verify", *options, "--keep-out", str(tmp_path / "keep.json")]) == 1
    printed = capsys.readouterr().out
    assert "transformer_2.blocks.0: no step reached it; use more steps" in printed
    assert "keep.json is not written: with this list too, a check above fails" in printed
    assert not (tmp_path / "keep.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", "keep.json", "--preset", "exact"], "--keep is an option of --preset quantized and sparse"),
        (["--keep", "none.json"], "--keep: keep='none.json': no such file"),
        (["--keep", "none.json", "--keep", "blocks.0"], "--keep takes one file alone, or names; given are none.json"),
        (["--keep", "blocks.99"], "keep='blocks.99' fits no module of the WanTransformer3DModel"),
        (["--keep-out", "keep.json", "--preset", "block_sparse"], "--keep-out looks for what must leave 8 bits in"),
        (["--keep-out", "keep.txt"], "--keep-out keep.txt: give a name ending in .json"),
    ],
)
def test_wrong_lists(capsys, options, message):
    preset = [] if "--preset" in options else ["--preset", "quantized"]
    assert message in error_of(capsys, "verify", *TINY, *preset, *options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_verify_passes_on_a_gpu(capsys, dtype):
    assert main(["verify", "--device", "cuda", "--dtype", dtype]) == 0, capsys.readouterr().out
