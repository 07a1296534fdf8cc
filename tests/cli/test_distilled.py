"""`--lora`, `--lora-2` and `--recipe`: few-step LoRAs and checkpoints on the command line."""

import json

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file

import turbo_rcm_patch as trp
from tests import lora_files
from tests.cli.running import error_of
from tests.official_names import official_state_dict, with_scales
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.cli import main
from turbo_rcm_patch.cli.arguments import parse_arguments

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
def load(stop_at, tmp_path, capsys):
    """A function that runs `generate` up to where it would make the video, and returns what was printed."""

    def run(*argv):
        stop_at("timed_generation")
        output = str(tmp_path / "out.mp4")
        assert main(["generate", "a fox", "-o", output, *SMALL, "--no-patch", *map(str, argv)]) == 2
        printed = capsys.readouterr()
        assert printed.err.splitlines()[-1] == "turbo-rcm generate: stopped"
        return printed

    return run


def test_generate_with_two_loras(models, tmp_path, capsys):
    high, low = loras(models, "wan22")
    argv = ["generate", "a fox", "-o", str(tmp_path / "out.mp4"), "--model", str(models / "wan22"), *SMALL]
    argv += ["--lora", f"{high}:0.5", "--lora-2", f"{low}:1.5", "--seed", "3", "-v"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "lightning (named wan22_lightning_transformer.safetensors): 4 steps (euler)" in printed
    assert (
        "transformer_2: wan22_lightning_transformer_2.safetensors, 20 linears of rank 64, 0 differences, scale 1.5"
        in printed
    )
    assert "4 steps, " in printed
    assert "+ LoRA" in printed

    pipe = DiffusionPipeline.from_pretrained(models / "wan22")
    trp.use_distilled(pipe, (high, low), scale=(0.5, 1.5))
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
    assert "3 steps, " in printed
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
    assert (settings["lora"], settings["lora_2"], settings["recipe"]) == ([high, 1.0], [low, 1.0], "lightx2v")
    assert settings["num_inference_steps"] == 4
    assert [len(variant["timings"]["steps"]) for variant in result["variants"]] == [4, 4]


def test_a_lora_for_the_low_noise_expert_alone(models, load):
    _, low = loras(models, "wan22")
    printed = load("--model", models / "wan22", "--lora-2", f"{low}:0.8").out
    assert "transformer: no LoRA, so its steps are not distilled" in printed
    assert "transformer_2: wan22_lightning_transformer_2.safetensors" in printed
    assert "scale 0.8" in printed


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


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Folders of original Wan checkpoints of one and of two experts, whose own schedulers are UniPC."""
    root = tmp_path_factory.mktemp("lightning")  # the folders above say nothing about a model
    for variant, name in (("t2v", "Wan2.1-T2V-14B-Diffusers"), ("wan22", "Wan2.2-T2V-A14B-Diffusers")):
        tiny_wan_pipeline(variant).save_pretrained(root / name)
    return root / "Wan2.1-T2V-14B-Diffusers", root / "Wan2.2-T2V-A14B-Diffusers"


@pytest.fixture
def sampled(stop_at, tmp_path):
    """A function that runs a command up to where it would sample, and returns its scheduler's name and its call."""

    def run(command, *argv):
        work = stop_at("timed_generation", "compare", "verify", "evaluate")
        output = ["-o", str(tmp_path / "out.mp4"), "--no-patch"] if command == "generate" else []
        prompt = [] if command == "evaluate" else ["a fox"]
        assert main([command, *prompt, *output, *SMALL, *map(str, argv)]) == 2
        (pipe, *call), options = work.call_args
        return type(pipe.scheduler).__name__, call[0] if call else options

    return run


@pytest.mark.parametrize("command", ["generate", "compare", "verify", "evaluate"])
def test_a_model_that_nothing_is_known_of_keeps_its_scheduler_steps_and_guidance(original, sampled, capsys, command):
    scheduler, call = sampled(command, "--model", original[0])
    assert (scheduler, call["guidance_scale"]) == ("UniPCMultistepScheduler", 5.0)
    assert call.get("num_inference_steps") == (None if command == "evaluate" else 50)
    printed = capsys.readouterr()
    assert "sampled by its own UniPCMultistepScheduler" in printed.out
    assert ("give --sigma-max" if command in ("verify", "evaluate") else "give --recipe: rcm,") in printed.out
    assert "warning" not in printed.err


def test_guidance_and_steps_are_the_users(original, sampled):
    given = ["--steps", 30, "--guidance", 4, "--guidance-2", 3, "--negative-prompt", "blurred"]
    scheduler, call = sampled("generate", "--model", original[1], *given)
    assert scheduler == "UniPCMultistepScheduler"
    wanted = {"num_inference_steps": 30, "guidance_scale": 4.0, "guidance_scale_2": 3.0, "negative_prompt": "blurred"}
    assert wanted.items() <= call.items()


def test_a_few_step_sampler_is_installed_only_if_it_is_asked_for(original, sampled):
    for options, expected in (
        (["--recipe", "rcm"], ("RCMScheduler", 4, 1.0)),
        (["--sigma-max", "80"], ("RCMScheduler", 4, 1.0)),
        (["--recipe", "fastwan", "--guidance", "3"], ("FewStepScheduler", 3, 3.0)),
        (["--recipe", "lightning", "--steps", "8"], ("FewStepScheduler", 8, 1.0)),
        (["--recipe", "none"], ("UniPCMultistepScheduler", 50, 5.0)),
    ):
        scheduler, call = sampled("compare", "--model", original[0], *options)
        assert (scheduler, call["num_inference_steps"], call["guidance_scale"]) == expected


def test_recipe_none_keeps_the_scheduler_of_a_model_that_is_named_as_another(tmp_path, sampled):
    tiny_wan_pipeline().save_pretrained(tmp_path / "FastWan-T2V")
    assert sampled("compare", "--model", tmp_path / "FastWan-T2V")[0] == "FewStepScheduler"
    assert sampled("compare", "--model", tmp_path / "FastWan-T2V", "--recipe", "none")[0] == "UniPCMultistepScheduler"


def test_a_named_checkpoint_is_sampled_as_use_distilled_does(tmp_path, load):
    name = "TurboWan2.2-I2V-A14B-720P-Diffusers"
    tiny_wan_pipeline("wan22_i2v").save_pretrained(tmp_path / name)
    iio.imwrite(tmp_path / "first.png", np.full((32, 48, 3), 90, dtype=np.uint8))
    printed = load("--model", tmp_path / name, "--image", tmp_path / "first.png").out
    assert f"turbowan-i2v (named {name}): 4 steps (euler)" in printed
    assert "the experts change at 900" in printed


def test_scales_are_told_from_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd:1").touch()

    def parsed(text):
        options = parse_arguments(["compare", "--lora", text, "--lora-2", text])
        assert options.lora_2 == options.lora
        return options.lora

    assert parsed("a.safetensors") == ("a.safetensors", 1.0)
    assert parsed("a.safetensors:0.8") == ("a.safetensors", 0.8)
    assert parsed("org/name/file:-1") == ("org/name/file", -1.0)
    assert parsed("c:file") == ("c:file", 1.0)
    assert parsed("odd:1") == ("odd:1", 1.0)


def test_what_the_files_hold_is_an_error_of_one_line(models, capsys):
    high, _ = loras(models, "wan22")
    argv = ["compare", "--model", models / "wan22", *SMALL]
    assert "two transformers: give --lora HIGH --lora-2 LOW, or a folder" in error_of(capsys, *argv, "--lora", high)
    assert "--steps 3: lightning takes 4 or more steps" in error_of(
        capsys, *argv, "--lora", high, "--lora-2", high, "--steps", "3"
    )


def test_advice_is_about_options(models, tmp_path, capsys):
    """use_distilled and patch give theirs in Python."""
    argv = ["compare", "--model", models / "wan22", *SMALL]
    pipe = tiny_wan_pipeline("wan22")
    style = lora_files.style(pipe.transformer).save(tmp_path / "style.safetensors")
    line = error_of(capsys, *argv, "--lora", style, "--lora-2", style)
    assert "cannot be recognised; give how it was distilled as --recipe, one of rcm" in line
    whole = tmp_path / "whole.safetensors"
    save_file(official_state_dict(pipe.transformer), whole)
    line = error_of(capsys, *argv, "--lora", whole, "--lora-2", whole)
    assert "If it is a whole model, give it as --transformer. Accepted are LoRA files" in line
    assert "--recipe says how one was distilled: rcm" in line
    line = error_of(capsys, *argv, "--lora", models / "wan22")
    assert "is a whole diffusers pipeline, not a LoRA; give it as --model. Accepted" in line
    line = error_of(capsys, *argv, "--recipe", "turbot2av")
    assert "--recipe turbot2av is not for a WanPipeline, which" in line
    assert "your own" not in line
    told = "is a LoRA, not a whole model; give it as --lora, beside the whole model."
    assert told in error_of(capsys, *argv, "--transformer", style)
    assert told in error_of(capsys, "convert", style, tmp_path / "out", "--device", "cpu")
    scaled = tmp_path / "fp8.safetensors"
    save_file(with_scales(official_state_dict(pipe.transformer)), scaled)
    sparse = ["--transformer", scaled, "--transformer-2", scaled, "--preset", "sparse"]
    line = error_of(capsys, "generate", "a fox", "-o", tmp_path / "out.mp4", *argv[1:], *sparse)
    assert "without sparse-linear attention (no proj_l); give another --preset, such as quantized." in line


def test_guidance_that_would_be_ignored_is_an_error_of_one_line(original, capsys):
    one, two = (
        [command, "--model", model, *SMALL] for command, model in zip(("compare", "verify"), original, strict=True)
    )
    assert "has no second transformer; leave --guidance-2 out" in error_of(capsys, *one, "--guidance-2", "3")
    wanted = "--negative-prompt has an effect only with --guidance above 1"
    assert wanted in error_of(capsys, *one, "--negative-prompt", "blurred", "--guidance", "1")
    assert wanted in error_of(capsys, *one, "--negative-prompt", "blurred", "--recipe", "rcm")
    wanted = "--guidance-2 has an effect only with --guidance above 1"
    assert wanted in error_of(capsys, *two, "--guidance-2", "3", "--guidance", "1")


def test_an_unknown_recipe_lists_all(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--recipe", "euler"])
    error = capsys.readouterr().err
    assert all(name in error for name in trp.RECIPES)
