"""`turbo-rcm info`."""

import fnmatch
import importlib
import json
import shutil
from types import SimpleNamespace

import numpy
import pytest
import torch
import triton
from diffusers import DiffusionPipeline
from huggingface_hub.errors import LocalEntryNotFoundError

import turbo_rcm_patch as trp
from tests.cli.running import ALLOCATOR, error_of
from turbo_rcm_patch import versions
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.cli import main, model_memory
from turbo_rcm_patch.cli.info import without_private

module = importlib.import_module("turbo_rcm_patch.cli.info")  # `commands` imports its function by this name


def test_info(tmp_path, capsys):
    assert main(["info", "--device", "cpu", "--json", str(tmp_path / "info.json")]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    result = json.loads((tmp_path / "info.json").read_text())
    assert "torch reference" in result["kernels"]["self_attention: projection + skip"]
    assert result["environment"]["diffusers"] in printed


@pytest.mark.parametrize("options", [[], ["--report"]])
def test_a_pair_that_never_ran_on_a_gpu_is_warned_of_on_a_gpu(options, monkeypatch, capsys):
    monkeypatch.setattr(versions, "RAN_ON_A_GPU", (("1.0", "2.0"),))
    assert main(["info", "--device", "cpu", *options]) == 0
    assert "On a GPU nobody ran" not in capsys.readouterr().out
    monkeypatch.setattr(module, "choose_device", lambda arguments: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(module, "describe_environment", lambda device: describe_environment("cpu"))
    monkeypatch.setattr(module, "choose_dtype", lambda *_: torch.float32)
    monkeypatch.setattr(module, "load_embedded_pipeline", lambda *_: trp.load_embedded_pipeline())
    monkeypatch.setattr(module, "tuned_tiers", lambda device: {})
    assert main(["info", "--device", "cpu", *options]) == 0
    expected = f"ran torch {torch.__version__} with Triton {triton.__version__} yet, only torch 1.0 with Triton 2.0."
    assert expected in capsys.readouterr().out


def test_a_report_is_markdown_without_what_is_private(saved_models, monkeypatch, capsys):
    home = saved_models.parent
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(versions, "NEWEST_TESTED", {"torch": "2.1"})
    monkeypatch.delenv(ALLOCATOR, raising=False)
    model = ["--model", str(saved_models / "t2v"), "--vram", "8GB", "--preset", "exact"]
    assert main(["info", "--device", "cpu", "--report", *model]) == 0
    printed = capsys.readouterr().out
    assert f"| torch | {torch.__version__} |\n" in printed
    assert f"| turbo_rcm_patch | {trp.__version__} |\n" in printed
    assert "| TRITON_INTERPRET | 1 |\n" in printed
    assert f"| numpy | {numpy.__version__} |\n" in printed
    assert f"Not tested with torch {torch.__version__} (the tests run with 2.1 at most)." in printed
    assert "self_attention" in printed
    memory, kernels = printed.split("\n\nMemory of the model:\n\n```\n")[1].split(f"\n```\n\n{module.TINY_MODEL}\n")
    assert "on the GPU, GB" in memory
    assert ALLOCATOR not in printed  # a setting of `generate --vram`, not of the user's
    assert "self_attention" in kernels
    assert "`" not in memory + kernels.strip("`\n")
    assert f"~/{saved_models.name}/t2v" in printed
    assert str(home) not in printed
    assert "hf_" not in printed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/models/wan", "~/models/wan"),
        ("in /home/ann: 3 files", "in ~: 3 files"),
        ("/home/anna/models", "/home/anna/models"),
        ("token hf_AbCdEfGhIjKlMn1234", "token hf_..."),
        ("Wan's hf_hub", "Wan's hf_hub"),
    ],
)
def test_what_is_private(monkeypatch, text, shown):
    monkeypatch.setenv("HOME", "/home/ann")
    assert without_private(text) == shown


def info_of(tmp_path, capsys, *options, code=0):
    """Run `info --model`, and return its output and the memory in its JSON file."""
    path = tmp_path / "info.json"
    assert main(["info", "--device", "cpu", "--json", str(path), "--model", *map(str, options)]) == code
    return capsys.readouterr().out, json.loads(path.read_text())["memory"]


def test_the_memory_of_a_model_comes_first_and_the_tiny_models_kernels_if_asked_for(saved_models, tmp_path, capsys):
    printed, _ = info_of(tmp_path, capsys, saved_models / "t2v", "--preset", "exact", "--vram", "8GB")
    assert printed.startswith(f"{saved_models / 't2v'}, exact, on a GPU with 8GB:\n")
    assert f"torch           {torch.__version__}" in printed
    assert "self_attention" not in printed
    printed, _ = info_of(tmp_path, capsys, saved_models / "t2v", "--preset", "exact", "-v")
    memory, kernels = printed.split(module.TINY_MODEL)
    assert memory.startswith(f"{saved_models / 't2v'} on a GPU:\n")
    assert "self_attention" in kernels


def test_info_tells_what_each_tier_takes(saved_models, tmp_path, capsys):
    printed, memory = info_of(tmp_path, capsys, saved_models / "t2v")
    assert "1280x720, 81 frames" in printed
    assert [need["tier"] for need in memory[::2]] == ["exact", "quantized", "sparse", "block_sparse"]
    assert [need["video"] for need in memory[:2]] == [[480, 832, 81], [720, 1280, 81]]
    assert {component["name"] for component in memory[0]["components"]} == {"text_encoder", "transformer", "vae"}
    assert memory[0]["resident"] > memory[0]["least"]
    printed, _ = info_of(tmp_path, capsys, "wan2.2-5b", "--preset", "exact")  # a size, before a download
    assert "wan2.2-5b on a GPU" in printed or "wan2.2-5b, exact" in printed
    assert "1280x704, 81 frames" in printed  # 32 divides the sizes of its videos
    printed, one = info_of(tmp_path, capsys, saved_models / "t2v", "--preset", "quantized", "--frames", 17)
    assert "480, 17 frames" in printed
    assert [(need["tier"], need["video"]) for need in one] == [("quantized", [480, 832, 17])]


def test_info_plans_for_a_card_without_weights(tmp_path, capsys):
    printed, (plan,) = info_of(tmp_path, capsys, "wan2.2-a14b", "--vram", "8GB", "--preset", "quantized")
    assert "wan2.2-a14b, quantized, on a GPU with 8GB:" in printed
    assert "its blocks stream" in printed
    assert plan["tier"] == "quantized"
    assert {"transformer", "transformer_2"} < set(plan["streaming"])
    assert max(plan["peaks"].values()) <= plan["budget"] == 74 * 10**8


def test_info_fails_if_nothing_that_was_asked_for_fits(saved_models, tmp_path, capsys):
    printed, (plan,) = info_of(tmp_path, capsys, "wan2.1-14b", "--vram", "5 GB", "--preset", "exact", code=1)
    assert "5.00 GB are given. It fits with the preset 'quantized'." in printed
    assert printed.count(plan["error"]) == 1
    _, plans = info_of(tmp_path, capsys, saved_models / "t2v", "--vram", "0.5GB", code=1)
    assert [plan["tier"] for plan in plans] == list(trp.PRESETS)
    _, (exact, *others) = info_of(tmp_path, capsys, "wan2.1-14b", "--vram", "5GB")
    assert "error" in exact
    assert not any("error" in plan for plan in others)


def test_the_plan_without_weights_is_that_of_the_loaded_pipeline(saved_models, tmp_path, capsys):
    size = ["--height", 32, "--width", 48, "--frames", 5, "--dtype", "float32"]
    _, (empty,) = info_of(tmp_path, capsys, saved_models / "i2v", "--vram", "10GB", "--preset", "quantized", *size)
    pipe = DiffusionPipeline.from_pretrained(saved_models / "i2v")
    trp.patch(pipe, trp.Quantized(restorable=False))
    loaded = trp.fit(pipe, "10 GB", height=32, width=48, num_frames=5, device="cpu").to_dict()
    by_name = {component["name"]: component for component in empty["components"]}
    assert by_name == {component["name"]: component for component in loaded["components"]}
    assert empty["peaks"] == loaded["peaks"]


def test_of_a_hub_id_only_the_configs_are_downloaded(saved_models, tmp_path, monkeypatch, capsys):
    def download(source, allow_patterns):
        names = [str(path.relative_to(saved_models / "t2v")) for path in (saved_models / "t2v").rglob("*")]
        for name in {name for pattern in allow_patterns for name in fnmatch.filter(names, pattern)}:
            (tmp_path / source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(saved_models / "t2v" / name, tmp_path / source / name)
        return str(tmp_path / source)

    monkeypatch.setattr(model_memory, "snapshot_download", download)
    printed, (need,) = info_of(tmp_path, capsys, "org/wan", "--preset", "exact", "--frames", 17)
    assert printed.startswith("org/wan on a GPU:\n")
    _, (of_folder,) = info_of(tmp_path, capsys, saved_models / "t2v", "--preset", "exact", "--frames", 17)
    assert need == of_folder
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_hub_that_is_not_reached_is_said(monkeypatch, capsys):
    def download(source, allow_patterns):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(model_memory, "snapshot_download", download)
    error = error_of(capsys, "info", "--device", "cpu", "--model", "org/wan")
    assert "--model org/wan: the hub cannot be reached, and this machine has no copy; check the network" in error


def test_info_counts_a_text_encoder_in_8_bits(tmp_path, capsys):
    options = ["wan2.1-14b", "--vram", "8GB", "--preset", "quantized"]
    _, (bf16,) = info_of(tmp_path, capsys, *options)
    printed, (in_8_bits,) = info_of(tmp_path, capsys, *options, "--text-encoder", "8bit")
    assert "in 8 bits, its blocks stream, its token embeddings stay on the host" in printed
    sizes = [next(c for c in plan["components"] if c["name"] == "text_encoder") for plan in (bf16, in_8_bits)]
    assert sizes[1]["blocks"] == pytest.approx(sizes[0]["blocks"] * 9 / 16, rel=1e-3)
    assert sizes[1]["originals"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text-encoder", "8bit"], "--text-encoder is about the memory that a model takes; give --model too."),
        (["--vram", "8GB"], "--vram is about the memory that a model takes; give --model too."),
        (["--preset", "exact"], "--preset is about the memory"),
        (["--model", "tiny", "--vram", "8"], "--vram: '8' is no amount of memory"),
        (["--model", "tiny", "--preset", "fastest"], "--preset: preset 'fastest' is unknown"),
        (["--model", "tiny", "--height", "100"], "--height 100 is not divisible by 16; try 96"),
        (["--model", "tiny", "--frames", "80"], "--frames 80 is not 4k+1; try 81"),
    ],
)
def test_wrong_options_about_memory(capsys, options, message):
    assert message in error_of(capsys, "info", "--device", "cpu", *options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nofolder", "no such folder; give the folder of a diffusers pipeline or transformer, or a size: wan2.1-1.3b,"),
        (".", "holds no transformer: neither a config.json nor transformer or transformer_2"),
    ],
)
def test_a_model_that_is_not_there_is_said_before_anything_else(tmp_path, monkeypatch, capsys, model, message):
    monkeypatch.chdir(tmp_path)
    assert main(["info", "--device", "cpu", "--model", model]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
