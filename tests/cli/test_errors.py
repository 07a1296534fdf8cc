"""Every command ends with one line for what a user can fix."""

import json
import re
import socket
import subprocess
import sys

import pytest
import torch

import turbo_rcm_patch as trp
from tests.cli.running import CAPTION, TINY, error_of
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.bench import verify as verify_module
from turbo_rcm_patch.cli import commands, files, main, pipelines
from turbo_rcm_patch.cli.arguments import parse_arguments
from turbo_rcm_patch.cli.errors import CommandError, why_not_loaded
from turbo_rcm_patch.cli.sizes import size_rules


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("generate x --model=~/m --transformer=~/m --transformer-2=~/m --image=~/m --tiny-vae=~/m --output=~/m", 6),
        ("generate x -o ~/m --lora=~/m --lora-2=~/m:0.5 --keep=~/m", 4),
        ("compare --model=~/m --json=~/m --plot=~/m --video=~/m", 4),
        ("verify --json=~/m --keep-out=~/m", 2),
        ("evaluate --model=~/m --json=~/m", 2),
        ("info --model=~/m --json=~/m", 2),
        ("convert ~/m ~/m", 2),
        ("demo --model=~/m --lora=~/m", 2),
        ("tune --model=~/m", 1),
    ],
)
def test_the_home_folder_is_found_where_the_shell_left_its_sign(monkeypatch, command, names):
    """The shell expands ~ neither in quotes nor after "="."""
    monkeypatch.setenv("HOME", "/home/fox")
    given = str(vars(parse_arguments(command.split())))
    assert given.count("/home/fox/m'") == names
    assert "~" not in given


def test_a_prompt_without_quotes(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "a", "red", "fox", "-o", "out.mp4"])
    assert "unrecognized arguments: red fox; put a prompt of several words in quotes" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["info", "--colour"])
    assert "unrecognized arguments: --colour (see" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "unknown"),
    [
        ("compare x --no-patch", "--no-patch"),
        ("compare x --fps 8 y", "--fps 8 y"),
        ("info foo", "foo"),
        ("convert a b c", "c"),
        ("evaluate --n 64", "--n 64"),
        ("compare x --vid out.mp4", "--vid out.mp4"),
    ],
)
def test_an_unknown_option_names_the_commands_help(capsys, given, unknown):
    with pytest.raises(SystemExit, match="2"):
        main(given.split())
    command = f"turbo-rcm {given.split()[0]}"
    assert capsys.readouterr().err == f"{command}: unrecognized arguments: {unknown} (see {command} --help)\n"


def test_the_help_of_convert_names_every_preset_that_it_takes(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["convert", "--help"])
    of_preset = capsys.readouterr().out.rpartition("--preset PRESET")[2].partition("--format")[0]
    assert set(trp.PRESETS) <= set(re.findall(r"\w+", of_preset))


def test_a_vae_that_keeps_all_frames_takes_any_number_of_them():
    """The error was that 5 frames are not 1k+1, and to try 5."""
    rules = size_rules({"scale_factor_temporal": 1}, {})
    rules.check(None, None, 5)
    with pytest.raises(CommandError, match=r"--frames 0 is not 1k\+1; try 1\."):
        rules.check(None, None, 0)


def test_a_config_larger_than_its_rope_table_is_refused_before_it_is_built(capsys, monkeypatch):
    monkeypatch.setattr(pipelines, "build_pipeline", lambda *args, **kwargs: pytest.fail("weights were drawn"))
    wide = ["verify", "--config", "wan2.1-1.3b", "--width", 16400]
    assert "--width 16400 is too large: the model's RoPE table has 1024" in error_of(capsys, *wide)
    assert "give at most 4093" in error_of(capsys, "verify", "--config", "wan2.1-1.3b", "--frames", 4097)


def test_a_size_at_the_end_of_the_rope_table_runs():
    """The limit is the table's, not a position short of it or beyond."""
    transformer = tiny_wan_pipeline("t2v").transformer
    positions = transformer.config.rope_max_seq_len
    channels, text = transformer.config.in_channels, torch.zeros(1, 1, transformer.config.text_dim)

    def run(frames):
        transformer(torch.zeros(1, channels, frames, 2, 2), torch.zeros(1), text)

    assert size_rules({}, transformer.config).positions == positions
    run(positions)
    with pytest.raises(RuntimeError, match="shape"):
        run(positions + 1)


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
    monkeypatch.setattr(loader, "load_config", lambda model: {"_class_name": "WanPipeline"})
    given = ("compare", "--model", "owner/wan", "--guidance", "3", "--guidance-2", "2", *TINY)
    assert "owner/wan has no second transformer; leave --guidance-2 out" in error_of(capsys, *given)

    def not_found(model):
        raise OSError("owner/name is not a local folder\nand is not on the hub")

    monkeypatch.setattr(loader, "load_config", not_found)
    message = error_of(capsys, "verify", "--model", "owner/name", *TINY)
    assert "cannot load --model owner/name: owner/name is not a local folder; check the name" in message


@pytest.mark.parametrize("cause", [socket.gaierror(-2, "unknown name"), ConnectionRefusedError(), TimeoutError()])
def test_an_error_of_the_network_is_recognised_by_its_cause(cause):
    """A pipeline class of diffusers says that the model is not fully cached."""
    error = OSError("Cannot load model a/b: the model is not fully cached locally")
    error.__context__ = RuntimeError("httpx")
    error.__context__.__cause__ = cause
    assert why_not_loaded(error).startswith("the hub cannot be reached")


def test_without_network_the_hub_is_blamed_and_not_the_model(capsys, monkeypatch):
    """diffusers says that the repository lacks a file."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = error_of(capsys, "verify", "--model", "nobody/nothing", *TINY)
    assert "cannot load --model nobody/nothing: the hub cannot be reached, and this machine has no copy" in message
    assert "model_index.json" not in message


def test_the_size_rules_of_a_hub_model_are_checked_after_loading(capsys, monkeypatch):
    pipe = trp.load_embedded_pipeline()
    pipe.vae.register_to_config(scale_factor_spatial=16)
    monkeypatch.setattr(pipelines.DiffusionPipeline, "load_config", lambda model: {"_class_name": "WanPipeline"})
    monkeypatch.setattr(pipelines.DiffusionPipeline, "from_pretrained", lambda *args, **kwargs: pipe)
    message = error_of(capsys, "verify", "--model", "owner/name", *TINY)
    assert "--width 48 is not divisible by 32" in message


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
def test_a_gpu_that_is_not_there(tmp_path, capsys):
    assert "PyTorch finds no CUDA GPU; use --device cpu" in error_of(capsys, "info", "--device", "cuda")
    assert "this runs on the CPU; leave it out" in error_of(capsys, "verify", "--offload")
    message = error_of(capsys, "generate", CAPTION, "-o", tmp_path / "out.mp4", "--vram", "8GB")
    assert "--vram is the memory of a GPU, and this runs on the CPU; leave it out" in message


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


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("tune", "Time this package's kernels and PyTorch's on this GPU; the patch then takes the faster ones."),
        ("info", "Show the GPU, versions, and the kernel that each op takes here."),
        ("convert", "Store a model's transformers for a tier: in 8 bits, or in diffusers' own format."),
    ],
)
def test_help_of_a_command_begins_with_a_sentence_that_keeps_its_capitals(capsys, command, sentence):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"turbo-rcm {trp.__version__}\n"


def test_python_dash_m():
    command = [sys.executable, "-m", "turbo_rcm_patch.cli", "generate", CAPTION, "-o", "out.mp4", "--steps", "9"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "turbo-rcm generate: --steps 9: the sampler takes 1 to 4 steps.\n"


def test_replacing_removes_its_temporary_file_after_any_error(tmp_path):
    def interrupted(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / "out.json") as temporary:
        interrupted(temporary)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CommandError, match="cannot write"), files.replacing(tmp_path / "out.json"):
        raise OSError("broken pipe")


def test_an_ffmpeg_that_does_not_run_is_found_before_generating(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/bin/false")
    assert "no ffmpeg found" in error_of(capsys, "generate", CAPTION, "-o", tmp_path / "circle.mp4", *TINY)
    assert not list(tmp_path.iterdir())


def test_a_reader_that_leaves_ends_the_command_without_a_word():
    code = "from turbo_rcm_patch.cli.errors import exit_code; raise SystemExit(exit_code('x', lambda: print('line')))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1
