"""Wrong models, sizes and LoRAs are refused in one line, as far as folders and files tell before they are loaded."""

import json
from importlib.util import find_spec

import pytest
from PIL import Image

from tests.cli.running import CAPTION, TINY, error_of, index_in
from turbo_rcm_patch.checkpoints.lazy import SUFFIXES
from turbo_rcm_patch.cli import commands, main, model_checks


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("empty", [], "has no model_index.json"),
        ("flux", [], "is a FluxPipeline; supported are WanPipeline and WanImageToVideoPipeline"),
        ("broken", [], "cannot read"),
        ("listed", [], "holds no JSON object"),
        ("i2v", [], "give one with --image"),
        ("t2v", ["--image", __file__], "is a text-to-video model; leave --image out"),
    ],
)
def test_wrong_models_fail_before_anything_is_loaded(capsys, nothing_runs, saved_models, model, options, message):
    assert message in error_of(capsys, "verify", "--model", saved_models / model, *options, *TINY)


def folder_of(path, **transformer):
    """Write the folder of a model whose VAE compresses 16 times in space and 8 times in time. Return its path."""
    vae = {"scale_factor_spatial": 16, "scale_factor_temporal": 8}
    for name, config in {"vae": vae, "transformer": transformer}.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
    return index_in(path)


def test_sizes_follow_the_folder_of_the_model(tmp_path, capsys, nothing_runs):
    model = ["verify", "--model", folder_of(tmp_path, patch_size=[1, 2, 4])]
    assert "--height 48 is not divisible by 32" in error_of(capsys, *model, "--height", "48")
    assert "--width 96 is not divisible by 64" in error_of(capsys, *model, "--width", "96")
    assert "--frames 13 is not 8k+1" in error_of(capsys, *model, "--frames", "13")


def test_the_largest_size_follows_the_folder_of_the_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(commands, "run", lambda arguments: 0)
    model = ["verify", "--model", folder_of(tmp_path, patch_size=[2, 2, 1], rope_max_seq_len=9)]
    for option, largest, next_one in (("--height", 288, 320), ("--width", 144, 160), ("--frames", 137, 145)):
        assert main(list(map(str, [*model, option, largest]))) == 0
        message = error_of(capsys, *model, option, next_one)
        assert f"{option} {next_one} is too large" in message
        assert "9 positions along each axis" in message
        assert f"give at most {largest}." in message


def test_a_malformed_patch_size_is_named(tmp_path, capsys):
    model = folder_of(tmp_path, patch_size=[2, 2])
    assert "patch_size [2, 2]" in error_of(capsys, "verify", "--model", model)


def test_a_model_that_takes_an_image_is_refused_at_the_start(capsys, saved_models):
    pytest.importorskip("gradio")
    assert "demo takes text-to-video models" in error_of(capsys, "demo", "--model", saved_models / "i2v")


def test_an_image_needs_pyav(tmp_path, capsys, monkeypatch):
    """Without this check diffusers would ask for it only when the model is loaded and on the GPU."""
    Image.new("RGB", (96, 64)).save(tmp_path / "image.png")
    options = ["--model", index_in(tmp_path, "LTX2ImageToVideoPipeline"), "--image", tmp_path / "image.png"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "av" else find_spec(name))
    line = error_of(capsys, "verify", *options)
    assert line.endswith("compresses the image first, which needs PyAV; install it with: pip install av")


def test_a_model_with_sound_runs_on_one_gpu(tmp_path, capsys):
    model = index_in(tmp_path, "LTX2Pipeline")
    error = error_of(capsys, "generate", CAPTION, "-o", tmp_path / "out.mp4", "--model", model, "--gpus", 2)
    assert error.endswith("LTX2Pipeline; --gpus takes Wan models.")


@pytest.mark.parametrize("name", ["org/name", "org/name/folder", "org/name/file.safetensors", "org/name/a/file.pt"])
def test_a_lora_on_the_hub_passes_the_checks(tmp_path, monkeypatch, name):
    monkeypatch.setattr(commands, "run", lambda arguments: 0)
    assert main(["compare", "--model", str(index_in(tmp_path)), "--lora", name]) == 0


def test_a_missing_lora_in_a_folder_that_exists_is_no_hub_id(tmp_path, monkeypatch, capsys, nothing_runs):
    monkeypatch.chdir(tmp_path)
    model = index_in(tmp_path)
    (tmp_path / "wan/loras/few").mkdir(parents=True)
    for file in ("wan/loras/few/a.safetensors", tmp_path / "a.safetensors"):
        line = error_of(capsys, "compare", "--model", model, "--lora", file)
        assert f"--lora {file}: no such file or folder" in line
    (tmp_path / "wan/loras/a.safetensors").write_text("no tensors")
    line = error_of(capsys, "compare", "--model", model, "--lora", "wan/loras/a.safetensors")
    assert "--lora: cannot read wan/loras/a.safetensors" in line


def test_a_folder_of_a_repositorys_name_hides_no_file_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    test_a_lora_on_the_hub_passes_the_checks(tmp_path, monkeypatch, "org/name/file.safetensors")


def test_the_suffixes_of_weights_are_those_that_can_be_opened():
    assert set(model_checks.WEIGHTS) == set(SUFFIXES)
