"""`--lora`, `--lora-2` and `--recipe`: few-step LoRAs and checkpoints on the command line."""

import json

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

import turbo_rcm_patch as trp
from tests import lora_files
from tests.cli.running import error_of
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.cli import commands, main
from turbo_rcm_patch.cli.arguments import parse_arguments
from turbo_rcm_patch.cli.errors import CommandError

SMALL = ["--height", "32", "--width", "48", "--frames", "5", "--device", "cpu"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Saved pipelines of Wan 2.2, from text and from an image, and a LoRA for each expert."""
    root = tmp_path_factory.mktemp("models")
    for variant in ("wan22", "wan22_i2v"):
        pipe = tiny_wan_pipeline(variant)
        pipe.save_pretrained(root / variant)
        for name in ("transformer", "transformer_2"):
            lora_files.lightning(getattr(pipe, name)).save(root / f"{variant}_lightning_{name}.safetensors")
    return root


def loras(models, variant):
    return [str(models / f"{variant}_lightning_{name}.safetensors") for name in ("transformer", "transformer_2")]


@pytest.fixture
def load(monkeypatch, tmp_path, capsys):
    """A function that runs `generate` up to where it would make the video, and returns what was printed."""

    def stop(*_, **__):
        raise CommandError("stopped")

    def run(*argv):
        monkeypatch.setattr(commands, "timed_generation", stop)
        output = str(tmp_path / "out.mp4")
        assert main(["generate", "a fox", "-o", output, *SMALL, "--no-patch", *map(str, argv)]) == 2
        printed = capsys.readouterr()
        assert printed.err.splitlines()[-1] == "turbo-rcm generate: stopped"
        return printed

    return run


@pytest.mark.parametrize("patched", [False, True])
def test_generate_with_two_loras(models, tmp_path, capsys, patched):
    high, low = loras(models, "wan22")
    argv = ["generate", "a fox", "-o", str(tmp_path / "out.mp4"), "--model", str(models / "wan22"), *SMALL]
    argv += ["--lora", f"{high}:0.5", "--lora-2", low, "--seed", "3"] + ([] if patched else ["--no-patch"])
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "lightning (named wan22_lightning_transformer.safetensors): 4 steps (euler)" in printed
    assert (
        "transformer_2: wan22_lightning_transformer_2.safetensors, 20 linears of rank 64, 0 differences, scale 0.5"
        in printed
    )
    assert "step 4" in printed
    assert ("+ LoRA" in printed) == patched

    pipe = DiffusionPipeline.from_pretrained(models / "wan22")
    trp.use_distilled(pipe, (high, low), scale=0.5)
    size = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 4, "guidance_scale": 1.0}
    expected = pipe("a fox", generator=torch.Generator().manual_seed(3), **size).frames[0]
    frames = iio.imread(tmp_path / "out.mp4") / 255
    assert np.abs(frames - expected).mean() < 0.06  # what the mp4's compression leaves


def test_generate_from_an_image_with_a_recipe(models, tmp_path, capsys):
    image = tmp_path / "first.png"
    iio.imwrite(image, np.full((32, 48, 3), 90, dtype=np.uint8))
    argv = ["generate", "a fox", "-o", str(tmp_path / "out.mp4"), "--model", str(models / "wan22_i2v"), *SMALL]
    assert main([*argv, "--image", str(image), "--recipe", "fastwan", "--no-patch"]) == 0
    printed = capsys.readouterr().out
    assert "fastwan (as asked for): 3 steps (lcm) at timesteps 1000, 757, 522" in printed
    assert "step 3" in printed
    assert "step 4" not in printed
    high, low = loras(models, "wan22_i2v")
    assert main([*argv, "--image", str(image), "--lora", high, "--lora-2", low, "--no-patch"]) == 0
    assert "the experts change at 900" in capsys.readouterr().out


def test_compare(models, tmp_path, capsys):
    high, low = loras(models, "wan22")
    output = tmp_path / "out.json"
    argv = ["compare", "--model", str(models / "wan22"), *SMALL, "--repeats", "1", "--no-compile"]
    assert main([*argv, "--lora", high, "--lora-2", low, "--recipe", "lightx2v", "--json", str(output)]) == 0
    assert "lightx2v (as asked for)" in capsys.readouterr().out
    result = json.loads(output.read_text())
    settings = result["settings"]
    assert (settings["lora"], settings["lora_2"], settings["recipe"]) == ([high, 1.0], low, "lightx2v")
    assert settings["num_inference_steps"] == 4
    assert [len(variant["timings"]["steps"]) for variant in result["variants"]] == [4, 4]


def test_a_model_that_is_known_to_be_another_is_not_sampled_as_rcm(tmp_path, load):
    folder = tmp_path / "FastWan2.1-T2V-1.3B-Diffusers"
    tiny_wan_pipeline().save_pretrained(folder)
    assert "fastwan (named FastWan2.1-T2V-1.3B-Diffusers): 3 steps" in load("--model", folder).out
    pipe = tiny_wan_pipeline()
    trp.use_distilled(pipe, recipe="lightning")
    pipe.save_pretrained(tmp_path / "saved")
    assert "lightning (the pipeline's own): 4 steps" in load("--model", tmp_path / "saved").out


def test_a_saved_rcm_pipeline_keeps_its_options_unless_one_is_given(tmp_path, load):
    pipe = tiny_wan_pipeline()
    trp.use_rcm(pipe, sigma_max=120.0)
    pipe.save_pretrained(tmp_path / "saved")
    found = load("--model", tmp_path / "saved")
    assert "rcm (the pipeline's own): 4 steps (sde) at timesteps 992," in found.out
    assert "do not say how it was distilled" not in found.err
    assert "the pipeline's own" not in load("--model", tmp_path / "saved", "--sigma-max", 200).out


def test_a_model_that_nothing_is_known_of_is_sampled_as_rcm_with_a_warning(tmp_path, load):
    folder = tmp_path / "lightning" / "Wan2.1-T2V-14B-Diffusers"
    tiny_wan_pipeline().save_pretrained(folder)
    warning = f"the name and files of --model {folder} do not say how it was distilled; it is sampled as rCM"
    for options, warns in (([], True), (["--recipe", "rcm"], False), (["--sigma-max", "80"], False)):
        assert (warning in load("--model", folder, *options).err) == warns


@pytest.mark.parametrize(
    ("variant", "name", "told"),
    [
        ("wan22_i2v", "TurboWan2.2-I2V-A14B-720P-Diffusers", "turbowan-i2v (named {}): 4 steps (euler)"),
        ("wan22_i2v", "rCM-Wan2.2-I2V-Diffusers", "rcm-i2v (named {}): 4 steps (euler)"),
        ("wan22", "TurboWan2.1-T2V-1.3B-Diffusers", "turbowan (named {}): 4 steps (sde)"),
    ],
)
def test_a_named_checkpoint_is_sampled_as_use_distilled_does(tmp_path, load, variant, name, told):
    tiny_wan_pipeline(variant).save_pretrained(tmp_path / name)
    image = []
    if variant == "wan22_i2v":
        iio.imwrite(tmp_path / "first.png", np.full((32, 48, 3), 90, dtype=np.uint8))
        image = ["--image", tmp_path / "first.png"]
    printed = load("--model", tmp_path / name, *image).out
    assert told.format(name) in printed
    assert ("the experts change at 900" in printed) == (variant == "wan22_i2v")


def test_scales_are_told_from_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd:1").touch()

    def parsed(text):
        return parse_arguments(["compare", "--lora", text]).lora

    assert parsed("a.safetensors") == ("a.safetensors", 1.0)
    assert parsed("a.safetensors:0.8") == ("a.safetensors", 0.8)
    assert parsed("org/name/file:-1") == ("org/name/file", -1.0)
    assert parsed("c:file") == ("c:file", 1.0)
    assert parsed("odd:1") == ("odd:1", 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora-2", __file__], "--lora-2 is the second of two files"),
        (["--lora", __file__], "--lora and --recipe go with --model"),
        (["--recipe", "rcm"], "--lora and --recipe go with --model"),
        (["--model", "MODEL", "--lora", "missing.safetensors"], "--lora missing.safetensors: no such file or folder"),
        (["--model", "MODEL", "--lora", __file__, "--lora-2", "no"], "--lora-2 no: no such file or folder"),
        (["--model", "MODEL", "--lora", f"{__file__}:inf"], "give a finite strength"),
        (["--model", "MODEL", "--recipe", "fastwan", "--steps", "4"], "--steps 4: fastwan takes 3 steps"),
        (["--model", "MODEL", "--recipe", "causvid-lora", "--steps", "10"], "causvid-lora takes 1 to 9 steps"),
        (["--model", "MODEL", "--recipe", "lightning", "--sigma-max", "80"], "--sigma-max is for rCM without"),
    ],
)
def test_wrong_options_fail_before_anything_is_loaded(models, capsys, monkeypatch, options, message):
    monkeypatch.setattr(commands, "run", lambda arguments: pytest.fail("the command ran"))
    options = [str(models / "wan22") if option == "MODEL" else option for option in options]
    assert message in error_of(capsys, "compare", *options)


def test_what_the_files_hold_is_an_error_of_one_line(models, capsys):
    high, _ = loras(models, "wan22")
    argv = ["compare", "--model", models / "wan22", *SMALL]
    assert "give source=(high, low)" in error_of(capsys, *argv, "--lora", high)
    assert "takes 4 steps. Pass num_inference_steps=4" in error_of(
        capsys, *argv, "--lora", high, "--lora-2", high, "--steps", "3"
    )


def test_an_unknown_recipe_lists_all(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--recipe", "euler"])
    error = capsys.readouterr().err
    assert all(name in error for name in trp.RECIPES)
