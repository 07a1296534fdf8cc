"""Wrong options of a generation are refused in one line, before a model is loaded."""

import pytest
from PIL import Image

from tests.cli.running import CAPTION, TINY, error_of, index_in


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps 0: the sampler takes 1 to 4 steps"),
        (["--steps", "5"], "--steps 5"),
        (["--frames", "16"], "--frames 16 is not 4k+1; try 17"),
        (["--frames", "0"], "--frames 0 is not 4k+1; try 1"),
        (["--height", "100"], "--height 100 is not divisible by 16; try 96"),
        (["--width", "0"], "--width 0 is not divisible by 16; try 16"),
        (["--width", "-16"], "--width -16 is not divisible by 16; try 16"),
        (["--height", "4112"], "--height 4112 is too large: the model's RoPE table has 256 positions along each axis"),
        (["--width", "5000"], "--width 5000 is too large"),
        (["--frames", "1025"], "give at most 1021"),
        (["--preset", "fastest"], "preset 'fastest' is unknown; accepted are exact"),
        (["--seed", "-1"], "--seed -1"),
        (["--image", "missing.png"], "--image missing.png: no such file"),
        (["--image", __file__], "the embedded model makes videos from text"),
        (["--device", "tpu"], "--device tpu is unknown"),
        (["--model", "./no/such"], "--model ./no/such: no such folder"),
    ],
)
def test_wrong_options_of_a_generation(tmp_path, capsys, nothing_runs, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert message in error_of(capsys, "generate", CAPTION, "-o", "out.mp4", *options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora-2", __file__], "--lora and --recipe go with --model"),
        (["--lora", __file__], "--lora and --recipe go with --model"),
        (["--recipe", "rcm"], "--lora and --recipe go with --model"),
        (["--model", "MODEL", "--lora", "missing.safetensors"], "--lora missing.safetensors: no such file or folder"),
        (["--model", "MODEL", "--lora", "org/name", "--lora-2", "no"], "--lora-2 no: no such file or folder"),
        (["--model", "MODEL", "--lora", "loras/a.safetensors"], "--lora loras/a.safetensors: no such file or folder"),
        (["--model", "MODEL", "--lora", __file__], "checks.py is not a file of weights; accepted are files"),
        (["--model", "ONE", "--lora-2", "org/name"], "has no second transformer; leave --lora-2 out"),
        (["--model", "ONE", "--lora", "org/name", "--lora-2", "org/name"], "no second transformer; leave --lora-2 out"),
        (["--model", "ONE", "--guidance-2", "3"], "has no second transformer; leave --guidance-2 out"),
        (["--model", "MODEL", "--guidance", "1", "--negative-prompt", "x"], "only with --guidance above 1, and it is"),
        (["--model", "MODEL", "--guidance", "1", "--guidance-2", "3"], "--guidance-2 has an effect only with"),
        (["--model", "MODEL", "--lora", f"{__file__}:inf"], "give a finite strength"),
        (["--model", "MODEL", "--lora-2", f"{__file__}:nan"], f"--lora-2 {__file__}:nan: give a finite strength"),
        (["--model", "MODEL", "--lora-2", __file__, "--sigma-max", "80"], "--sigma-max is for rCM without"),
        (
            ["--model", "MODEL", "--lora-2", __file__, "--recipe", "none"],
            "--recipe none keeps the pipeline's scheduler",
        ),
        (["--model", "MODEL", "--recipe", "fastwan", "--steps", "4"], "--steps 4: fastwan takes 3 steps"),
        (["--model", "MODEL", "--recipe", "lightx2v", "--steps", "3"], "--steps 3: lightx2v takes 4 or more steps"),
        (["--model", "MODEL", "--recipe", "causvid-lora", "--steps", "10"], "causvid-lora takes 1 to 9 steps"),
        (["--model", "MODEL", "--recipe", "lightning", "--sigma-max", "80"], "--sigma-max is for rCM without"),
        (["--model", "MODEL", "--recipe", "none", "--lora", __file__], "--recipe none keeps the pipeline's scheduler"),
        (["--model", "MODEL", "--steps", "0"], "--steps 0: give 1 or more"),
        (["--model", "MODEL", "--sigma-max", "80", "--steps", "5"], "--steps 5: the sampler takes 1 to 4 steps"),
        (["--model", "MODEL", "--guidance", "nan"], "--guidance nan: give a number, 0 or more"),
        (["--model", "MODEL", "--guidance-2", "-1"], "--guidance-2 -1.0: give a number, 0 or more"),
        (["--model", "MODEL", "--recipe", "rcm-i2v"], "--recipe rcm-i2v is not for a WanPipeline, which --model"),
        (["--model", "MODEL", "--recipe", "lightx2v-flf2v"], "accepted are rcm, turbowan, fastwan, lightx2v, lightn"),
        (["--model", "MODEL", "--recipe", "turbot2av"], "--recipe turbot2av is not for a WanPipeline"),
        (["--guidance", "5"], "--guidance goes with --model"),
        (["--guidance-2", "5"], "--guidance-2 goes with --model"),
        (["--negative-prompt", "blurred"], "--negative-prompt goes with --model"),
    ],
)
def test_wrong_options_of_a_few_step_model(tmp_path, capsys, nothing_runs, options, message):
    folders = {"MODEL": index_in(tmp_path / "two", experts=2), "ONE": index_in(tmp_path / "one")}
    options = [folders.get(option, option) for option in options]
    assert message in error_of(capsys, "compare", *options)


def test_a_first_noise_level_below_the_second_one(capsys, nothing_runs):
    """The error names the option and the steps, and comes before a model is loaded."""
    assert "--sigma-max 2.0: with 2 steps it must be" in error_of(capsys, "verify", *TINY, "--sigma-max", "2")
    assert "--sigma-max -3.0: with 4 steps it must be" in error_of(capsys, "verify", "--sigma-max", "-3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--topk", "0.2"], "is an option of --preset sparse, not of exact; leave it out, or choose another preset"),
        (["--preset", "sparse", "--topk", "0"], "--topk: topk=0.0; give a share of the key blocks"),
        (["--mass", "0.5"], "--mass is an option of --preset block_sparse, not of exact; leave it out"),
        (["--preset", "sparse", "--mass", "0.5"], "--mass is an option of --preset block_sparse, not of sparse"),
        (["--preset", "quantized", "--min-tokens", "0"], "is an option of --preset block_sparse, not of quantized"),
        (["--preset", "block_sparse", "--topk", "0.2"], "--topk is an option of --preset sparse, not of block_sparse"),
        (["--preset", "block_sparse", "--mass", "1.5"], "--mass: mass=1.5; give a share of the estimated attention"),
        (["--preset", "block_sparse", "--min-tokens", "-1"], "min_tokens=-1; give a whole number of tokens, at least"),
    ],
)
def test_wrong_shares(capsys, options, message):
    assert message in error_of(capsys, "verify", *options)


def test_a_file_that_is_no_image(capsys, nothing_runs, saved_models, tmp_path, monkeypatch):
    line = error_of(capsys, "verify", "--model", saved_models / "i2v", "--image", __file__, *TINY)
    assert f"--image {__file__}: cannot identify image file" in line
    assert "give a PNG or JPEG file" in line
    Image.effect_noise((64, 64), 50).save(half := tmp_path / "half.png")
    half.write_bytes(half.read_bytes()[:1500])
    line = error_of(capsys, "verify", "--model", saved_models / "i2v", "--image", half, *TINY)
    assert f"--image {half}: image file is truncated" in line
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1)  # more than twice as many are refused
    Image.new("RGB", (2, 2)).save(large := tmp_path / "large.png")
    assert "decompression bomb" in error_of(capsys, "verify", "--model", saved_models / "i2v", "--image", large, *TINY)
