"""The command line in this process, on the embedded model or on a saved tiny pipeline."""

import argparse
import json
import subprocess
import sys

import imageio.v3 as iio
import numpy as np
import pytest
import torch

import turbo_rcm_patch as trp
from tests.bench.damage import damage_block
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch import embedded
from turbo_rcm_patch.bench import verify as verify_module
from turbo_rcm_patch.cli import commands, files, main, pipelines
from turbo_rcm_patch.cli.arguments import parse_arguments
from turbo_rcm_patch.cli.errors import CommandError
from turbo_rcm_patch.shapes import grammar

CAPTION = "a red circle moves right"
TINY = ["--height", "32", "--width", "48", "--frames", "5", "--steps", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory):
    """Folders of saved pipelines: text to video, image to video, and two that are no use."""
    root = tmp_path_factory.mktemp("models")
    tiny_wan_pipeline("t2v").save_pretrained(root / "t2v")
    tiny_wan_pipeline("i2v").save_pretrained(root / "i2v")
    for name, index in (("flux", '{"_class_name": "FluxPipeline"}'), ("broken", "{"), ("listed", "[]")):
        (root / name).mkdir()
        (root / name / "model_index.json").write_text(index)
    (root / "empty").mkdir()
    return root


def error_of(capsys, *argv):
    """The one line that a failing command prints."""
    assert main(list(map(str, argv))) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("turbo-rcm") and "warning" not in line]
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]


# --- generate


def test_generate_writes_the_video_that_the_pipeline_makes(tmp_path, capsys):
    output = tmp_path / "circle.mp4"
    assert main(["generate", CAPTION, "-o", str(output), *TINY, "--seed", "7", "--fps", "8"]) == 0
    printed = capsys.readouterr().out
    for text in ("WanTransformer3DModel", "text encoding", "step 2", "VAE decode", "total", str(output)):
        assert text in printed
    assert [path.name for path in tmp_path.iterdir()] == ["circle.mp4"]

    pipe = trp.load_embedded_pipeline()
    trp.use_rcm(pipe)
    size = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 1.0}
    expected = pipe(CAPTION, generator=torch.Generator().manual_seed(7), **size).frames[0]
    frames = iio.imread(output) / 255
    assert frames.shape == expected.shape
    assert np.abs(frames - expected).mean() < 0.06  # what the mp4's compression leaves
    assert np.abs(frames[::-1] - expected).mean() > np.abs(frames - expected).mean()
    assert iio.immeta(output)["fps"] == 8


def test_generate_no_patch_and_a_saved_model(tmp_path, capsys, saved_models):
    outputs = [tmp_path / "patched.mp4", tmp_path / "plain.mp4"]
    model = ["--model", str(saved_models / "t2v")]
    assert main(["generate", "a fox", "-o", str(outputs[0]), *model, *TINY]) == 0
    assert "self_attention" in capsys.readouterr().out
    assert main(["generate", "a fox", "-o", str(outputs[1]), *model, *TINY, "--no-patch"]) == 0
    assert "self_attention" not in capsys.readouterr().out
    patched, plain = (iio.imread(output).astype(float) for output in outputs)
    assert np.abs(patched - plain).mean() < 1


def test_generate_from_an_image(tmp_path, saved_models):
    image, output = tmp_path / "first.png", tmp_path / "out.mp4"
    iio.imwrite(image, np.full((32, 48, 3), 90, dtype=np.uint8))
    model = ["--model", str(saved_models / "i2v"), "--image", str(image)]
    assert main(["generate", "a fox", "-o", str(output), *model, *TINY]) == 0
    assert iio.imread(output).shape == (5, 32, 48, 3)


@pytest.mark.parametrize("command", ["generate", "compare", "verify"])
def test_a_prompt_outside_the_grammar_is_warned_about(tmp_path, capsys, command):
    options = {"generate": ["-o", str(tmp_path / "fox.mp4")], "compare": ["--repeats", "1"], "verify": []}[command]
    assert main([command, "a red fox leaps", *TINY, *options]) == 0
    warning = capsys.readouterr().err
    assert f"turbo-rcm {command}: warning: " in warning
    assert "'a red fox leaps'" in warning
    for text in (*grammar.EXAMPLES, *grammar.COLOURS, *grammar.SHAPES, *grammar.DIRECTIONS, *grammar.BACKGROUNDS):
        assert text in warning


def test_no_warning_for_a_caption_a_default_or_another_model(capsys, monkeypatch, saved_models):
    prompts = []

    def record(pipe, call, **_):
        prompts.append(call["prompt"])
        raise CommandError("recorded")

    monkeypatch.setattr(commands, "verify", record)
    for options in (["A large blue square moves UP on white"], [], ["--model", saved_models / "t2v"]):
        assert main(["verify", *map(str, options), *TINY]) == 2
    assert prompts == ["A large blue square moves UP on white", grammar.EXAMPLES[0], pipelines.DEFAULT_PROMPT]
    assert "learned captions" not in capsys.readouterr().err


def test_another_size_than_the_learned_one_is_warned_about(tmp_path, capsys, monkeypatch, saved_models):
    def warnings(*argv):
        monkeypatch.setattr(commands, "verify", lambda *_, **__: (_ for _ in ()).throw(CommandError("recorded")))
        assert main(["verify", "--device", "cpu", *map(str, argv)]) == 2
        return [line for line in capsys.readouterr().err.splitlines() if "learned videos" in line]

    (warning,) = warnings("--height", "32", "--frames", "5")
    assert f"{embedded.HEIGHT}x{embedded.WIDTH} pixels and {embedded.FRAMES} frames" in warning
    assert f"at 32x{embedded.WIDTH} and 5" in warning
    assert warnings() == []
    assert warnings("--height", embedded.HEIGHT, "--width", embedded.WIDTH) == []
    assert warnings("--model", saved_models / "t2v", *TINY) == []


def test_help_names_the_size_of_the_embedded_model(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    printed = capsys.readouterr().out
    for size in (embedded.HEIGHT, embedded.WIDTH, embedded.FRAMES):
        assert f"embedded model {size})" in " ".join(printed.split())


def test_an_old_video_is_replaced_only_by_a_whole_one(tmp_path, capsys, monkeypatch):
    output = tmp_path / "circle.mp4"
    output.write_bytes(b"old")

    def disk_full(frames, path, fps):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diffusers.utils.export_to_video", disk_full)
    assert "No space left on device" in error_of(capsys, "generate", CAPTION, "-o", output, *TINY)
    assert output.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["circle.mp4"]


# --- compare, verify, info


def test_compare_writes_json_plot_and_video(tmp_path, capsys):
    outputs = {option: tmp_path / f"compare{suffix}" for option, suffix in OUTPUTS_OF_COMPARE.items()}
    options = [text for option, path in outputs.items() for text in (option, str(path))]
    assert main(["compare", CAPTION, *TINY, "--repeats", "1", *options]) == 0
    printed = capsys.readouterr().out
    assert "speed-up" in printed
    result = json.loads(outputs["--json"].read_text())
    assert [variant["name"] for variant in result["variants"]] == ["unpatched", "patched"]
    assert result["variants"][1]["latents"]["relative_l2"] <= 1e-5
    assert len(result["variants"][1]["timings"]["steps"]) == 2
    assert result["settings"]["prompt"] == CAPTION
    assert result["settings"]["seed"] == 0
    assert result["environment"]["torch"] == torch.__version__
    assert iio.imread(outputs["--video"]).shape == (5, 32, 96, 3)
    assert outputs["--plot"].read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 3


OUTPUTS_OF_COMPARE = {"--json": ".json", "--plot": ".png", "--video": ".mp4"}


def test_verify_passes(tmp_path, capsys):
    assert main(["verify", *TINY, "--json", str(tmp_path / "verify.json")]) == 0
    assert "all 6 blocks are within the allowed error" in capsys.readouterr().out
    assert json.loads((tmp_path / "verify.json").read_text())["ok"] is True


def test_verify_exits_with_1_and_names_the_wrong_block(capsys, monkeypatch):
    damage_block(monkeypatch, verify_module, "transformer.blocks.2", lambda output: output + 1e-4 * output.roll(1, -1))
    assert main(["verify", *TINY]) == 1
    printed = capsys.readouterr().out
    assert "transformer.blocks.2, step 1: difference" in printed
    assert "blocks.1, step" not in printed


def test_verify_builds_a_config(tmp_path, capsys):
    options = ["--config", "tiny", "--layers", "1", "--steps", "2", "--device", "cpu", "--dtype", "bfloat16"]
    assert main(["verify", *options, "--json", str(tmp_path / "verify.json")]) == 0
    assert "all 1 blocks are within the allowed error" in capsys.readouterr().out
    settings = json.loads((tmp_path / "verify.json").read_text())["settings"]
    assert settings | {"config": "tiny", "layers": 1, "model": None, "dtype": "bfloat16", "height": 32} == settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "wan3"], "--config wan3 is unknown; accepted are wan2.1-1.3b, wan2.1-14b, wan2.2-5b, tiny"),
        (["--config", "tiny", "--model", "x/y"], "leave --model out"),
        (["--config", "tiny", "--image", __file__], "leave --image out"),
        (["--config", "tiny", "a fox"], "leave a prompt out"),
        (["--config", "tiny", "--offload"], "leave --offload out"),
        (["--config", "tiny", "--layers", "0"], "--layers 0: give 1 or more"),
        (["--config", "wan2.2-5b", "--height", "720"], "--height 720 is not divisible by 32; try 704"),
        (["--layers", "2"], "--layers goes with --config"),
    ],
)
def test_wrong_options_of_verify(capsys, monkeypatch, options, message):
    monkeypatch.setattr(pipelines, "build_pipeline", lambda *args, **kwargs: pytest.fail("a model was built"))
    monkeypatch.setattr(pipelines, "load_pipeline", lambda *args: pytest.fail("a model was loaded"))
    assert message in error_of(capsys, "verify", *options)


EVALUATE = ["evaluate", "--height", "32", "--width", "48", "--frames", "5", "--device", "cpu", "-n", "2"]


def test_evaluate_prints_a_table_and_progress_and_writes_json(tmp_path, capsys):
    output = tmp_path / "evaluation.json"
    options = ["--steps", "1,2", "--dtype", "bfloat16", "--seed", "3", "--json", str(output)]
    assert main([*EVALUATE, "--batch-size", "1", *options]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("variant")
    assert len(lines) == 1 + 2 * 3
    progress = [line for line in printed.err.splitlines() if line.startswith("turbo-rcm evaluate: ")]
    assert len(progress) == 2 * 2
    assert progress[-1] == "turbo-rcm evaluate: 2 steps: 2 of 2 captions in 3 variants"
    result = json.loads(output.read_text())
    assert [(one["variant"], one["steps"]) for one in result["results"][:3]] == [
        *(("unpatched", 1), ("exact", 1), ("unpatched fp32", 1)),
    ]
    expected = {"model": "embedded", "preset": "exact", "dtype": "bfloat16", "n": 2, "steps": [1, 2], "seed": 3}
    expected |= {"batch_size": 1, "height": 32, "width": 48, "num_frames": 5, "guidance_scale": 1.0, "sigma_max": 80.0}
    assert result["settings"] == expected


@pytest.mark.parametrize("model", [[], ["--model"]])
def test_evaluate_takes_the_size_of_the_embedded_model(monkeypatch, saved_models, model):
    calls = []

    def record(pipe, call, **options):
        calls.append((call, options["n"], options["steps"], options["batch_size"], options["config"]))
        raise CommandError("recorded")

    monkeypatch.setattr(commands, "evaluate", record)
    assert main(["evaluate", "--device", "cpu", *model, *([str(saved_models / "t2v")] if model else [])]) == 2
    size = {"height": embedded.HEIGHT, "width": embedded.WIDTH, "num_frames": embedded.FRAMES}
    assert calls == [({**size, "guidance_scale": 1.0}, 256, (1, 2, 4), 16, "exact")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "1,5"], "--steps 5: the sampler takes 1, 2, 3 or 4 steps"),
        (["-n", "0"], "-n 0: give 1 or more"),
        (["--batch-size", "-1"], "--batch-size -1: give 1 or more"),
        (["--preset", "fastest"], "--preset fastest is unknown"),
        (["--height", "100"], "--height 100 is not divisible by 16"),
        (["--json", "out.txt"], "give a name ending in .json"),
    ],
)
def test_wrong_options_of_evaluate(capsys, monkeypatch, options, message):
    monkeypatch.setattr(commands, "run", lambda arguments: pytest.fail("the command ran"))
    assert message in error_of(capsys, "evaluate", *options)


def test_evaluate_refuses_an_image_to_video_model_and_a_low_sigma_max(capsys, saved_models):
    message = error_of(capsys, "evaluate", "--model", saved_models / "i2v")
    assert "makes videos from an image; evaluate takes text-to-video models" in message
    assert "sigma_max=2.0: with 2 steps" in error_of(capsys, *EVALUATE, "--steps", "1,2", "--sigma-max", "2")


def test_steps_of_evaluate_count_once():
    assert parse_arguments(["evaluate", "--steps", "4,1,4"]).steps == (4, 1)


@pytest.mark.parametrize("steps", ["few", "1,,2", ""])
def test_steps_of_evaluate_that_do_not_parse(capsys, steps):
    with pytest.raises(SystemExit) as exit_:
        main(["evaluate", "--steps", steps])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert f"argument --steps: {steps!r} is no list such as 1,2,4" in error
    assert len(error.splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_verify_passes_on_a_gpu(capsys, dtype):
    assert main(["verify", "--device", "cuda", "--dtype", dtype]) == 0, capsys.readouterr().out


@pytest.mark.gpu
def test_generate_with_offload(tmp_path):
    options = ["--device", "cuda", "--offload", "--height", "32", "--width", "48", "--frames", "5"]
    assert main(["generate", CAPTION, "-o", str(tmp_path / "circle.mp4"), *options]) == 0
    assert iio.imread(tmp_path / "circle.mp4").shape == (5, 32, 48, 3)


def test_info(tmp_path, capsys):
    assert main(["info", "--device", "cpu", "--json", str(tmp_path / "info.json")]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    result = json.loads((tmp_path / "info.json").read_text())
    assert "torch reference" in result["kernels"]["self_attention: projection + skip"]
    assert result["environment"]["diffusers"] in printed


# --- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps 0: the sampler takes 1, 2, 3 or 4 steps"),
        (["--steps", "5"], "--steps 5"),
        (["--frames", "16"], "--frames 16 is not 4k+1; try 17"),
        (["--frames", "0"], "--frames 0 is not 4k+1; try 1"),
        (["--height", "100"], "--height 100 is not divisible by 16; try 96"),
        (["--width", "0"], "--width 0 is not divisible by 16; try 16"),
        (["--width", "-16"], "--width -16 is not divisible by 16; try 16"),
        (["--preset", "fastest"], "--preset fastest is unknown; accepted are exact"),
        (["--seed", "-1"], "--seed -1"),
        (["--fps", "0"], "--fps 0"),
        (["--image", "missing.png"], "--image missing.png: no such file"),
        (["--image", __file__], "the embedded model makes videos from text"),
        (["--device", "tpu"], "--device tpu is unknown"),
        (["--device", "cpu", "--offload"], "leave it out with --device cpu"),
        (["--model", "./no/such"], "--model ./no/such: no such folder"),
        (["-o", "no/such/folder/out.mp4"], "folder no/such/folder does not exist; create it first"),
        (["-o", "out.avi"], "give a name ending in .mp4"),
    ],
)
def test_wrong_options_fail_before_anything_is_loaded(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "run", lambda arguments: pytest.fail("the command ran"))
    assert message in error_of(capsys, "generate", CAPTION, "-o", "out.mp4", *options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("empty", "has no model_index.json"),
        ("flux", "is a FluxPipeline; supported are WanPipeline and WanImageToVideoPipeline"),
        ("broken", "cannot read"),
        ("listed", "holds no JSON object"),
        ("i2v", "give one with --image"),
    ],
)
def test_wrong_models_fail_before_anything_is_loaded(capsys, monkeypatch, saved_models, model, message):
    monkeypatch.setattr(commands, "run", lambda arguments: pytest.fail("the command ran"))
    assert message in error_of(capsys, "verify", "--model", saved_models / model, *TINY)


def test_sizes_follow_the_folder_of_the_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(commands, "run", lambda arguments: pytest.fail("the command ran"))
    for name, content in {
        "model_index.json": {"_class_name": "WanPipeline"},
        "vae/config.json": {"scale_factor_spatial": 16, "scale_factor_temporal": 8},
        "transformer/config.json": {"patch_size": [1, 2, 4]},
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    model = ["verify", "--model", tmp_path]
    assert "--height 48 is not divisible by 32" in error_of(capsys, *model, "--height", "48")
    assert "--width 96 is not divisible by 64" in error_of(capsys, *model, "--width", "96")
    assert "--frames 13 is not 8k+1" in error_of(capsys, *model, "--frames", "13")


def test_a_model_that_does_not_load(tmp_path, capsys):
    (tmp_path / "model_index.json").write_text(
        json.dumps(
            {"_class_name": "WanPipeline", "_diffusers_version": "0.42.1", "vae": ["diffusers", "AutoencoderKLWan"]}
        )
    )
    assert "cannot load --model" in error_of(capsys, "verify", "--model", tmp_path, *TINY)


def test_a_hub_model_is_refused_by_its_index_alone(capsys, monkeypatch):
    loader = pipelines.DiffusionPipeline
    monkeypatch.setattr(loader, "load_config", lambda model: {"_class_name": "FluxPipeline"})
    monkeypatch.setattr(loader, "from_pretrained", lambda *args, **kwargs: pytest.fail("weights were loaded"))
    assert "owner/flux is a FluxPipeline" in error_of(capsys, "verify", "--model", "owner/flux", *TINY)

    def unreachable(model):
        raise OSError("owner/name is not a local folder\nand is not on the hub")

    monkeypatch.setattr(loader, "load_config", unreachable)
    message = error_of(capsys, "verify", "--model", "owner/name", *TINY)
    assert "cannot load --model owner/name: owner/name is not a local folder; check the name" in message


def test_the_size_rules_of_a_hub_model_are_checked_after_loading(capsys, monkeypatch):
    pipe = trp.load_embedded_pipeline()
    pipe.vae.register_to_config(scale_factor_spatial=16)
    monkeypatch.setattr(pipelines.DiffusionPipeline, "load_config", lambda model: {"_class_name": "WanPipeline"})
    monkeypatch.setattr(pipelines.DiffusionPipeline, "from_pretrained", lambda *args, **kwargs: pipe)
    message = error_of(capsys, "verify", "--model", "owner/name", *TINY)
    assert "--width 48 is not divisible by 32" in message


def test_a_first_noise_level_below_the_second_one(capsys):
    assert "sigma_max=2.0" in error_of(capsys, "verify", *TINY, "--sigma-max", "2")


@pytest.mark.parametrize("set_variable", [True, False])
def test_no_ffmpeg(tmp_path, capsys, monkeypatch, set_variable):
    import imageio_ffmpeg

    def not_found():
        raise RuntimeError("No ffmpeg exe could be found.")

    if set_variable:
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "nowhere"))
    else:
        monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", not_found)
    assert "pip install imageio-ffmpeg" in error_of(capsys, "generate", CAPTION, "-o", tmp_path / "out.mp4", *TINY)
    assert not list(tmp_path.iterdir())


def test_no_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    assert "turbo_rcm_patch[plot]" in error_of(capsys, "compare", *TINY, "--plot", tmp_path / "out.png")


def test_outputs_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    (tmp_path / "folder.mp4").mkdir()
    assert "is a folder" in error_of(capsys, "generate", CAPTION, "-o", tmp_path / "folder.mp4")

    def read_only(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", read_only)
    message = error_of(capsys, "generate", CAPTION, "-o", tmp_path / "out.mp4")
    assert "cannot write in" in message
    assert "Read-only file system" in message


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
def test_out_of_memory(tmp_path, capsys, monkeypatch, error):
    def exhausted(*args, **kwargs):
        raise error

    monkeypatch.setattr(commands, "timed_generation", exhausted)
    message = error_of(capsys, "generate", CAPTION, "-o", tmp_path / "out.mp4", *TINY)
    assert "out of memory; try fewer --frames" in message
    assert not list(tmp_path.iterdir())


def test_a_fault_of_ours_is_not_dressed_up_as_the_users(monkeypatch, tmp_path):
    def broken(*args, **kwargs):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(commands, "timed_generation", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main(["generate", CAPTION, "-o", str(tmp_path / "out.mp4"), *TINY])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    assert "PyTorch finds no CUDA GPU; use --device cpu" in error_of(capsys, "info", "--device", "cuda")
    assert "there is no GPU; leave it out" in error_of(capsys, "verify", "--offload")


def test_an_unsupported_transformer(capsys, monkeypatch):
    from turbo_rcm_patch.patching import PatchError

    def refuse(*args):
        raise PatchError("cannot patch:\nthe transformer is a WanVACETransformer3DModel.")

    monkeypatch.setattr(verify_module, "patch", refuse)
    assert "cannot patch: the transformer is a WanVACETransformer3DModel." in error_of(capsys, "verify", *TINY)


@pytest.mark.parametrize(
    "argv", [[], ["paint"], ["generate", CAPTION], ["generate", "-o", "x.mp4", "a", "--steps", "few"]]
)
def test_options_that_do_not_parse_are_one_line_too(capsys, argv):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_help_needs_no_heavy_import():
    code = (
        "import sys; from turbo_rcm_patch.cli import main\n"
        "try: main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'diffusers', 'transformers', 'triton', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--frames" in done.stdout


def test_python_dash_m():
    command = [sys.executable, "-m", "turbo_rcm_patch.cli", "generate", CAPTION, "-o", "out.mp4", "--steps", "9"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "turbo-rcm generate: --steps 9: the sampler takes 1, 2, 3 or 4 steps.\n"


def test_replacing_removes_its_temporary_file_after_any_error(tmp_path):
    def interrupted(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / "out.json") as temporary:
        interrupted(temporary)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CommandError, match="cannot write"), files.replacing(tmp_path / "out.json"):
        raise OSError("broken pipe")


def test_offload_is_asked_for_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CommandError, match="there are 1 GPUs, counted from cuda:0"):
        pipelines.choose_device(argparse.Namespace(device="cuda:1", offload=False))
    assert pipelines.choose_device(argparse.Namespace(device=None, offload=True)) == torch.device("cuda")


def test_an_ffmpeg_that_does_not_run_is_found_before_generating(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/bin/false")
    assert "no ffmpeg found" in error_of(capsys, "generate", CAPTION, "-o", tmp_path / "circle.mp4", *TINY)
    assert not list(tmp_path.iterdir())


def test_a_malformed_patch_size_is_named(tmp_path, capsys):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    (tmp_path / "transformer/config.json").write_text('{"patch_size": 2}')
    assert "patch_size 2" in error_of(capsys, "generate", CAPTION, "-o", tmp_path / "circle.mp4", "--model", tmp_path)
