"""`turbo-rcm tune`: the file it keeps, who uses it, and what removes it. Times are injected."""

import json
import pwd
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import turbo_rcm_patch as trp
from tests.cli.running import error_of
from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from tests.tune_times import small_shapes, timed
from turbo_rcm_patch import kernels
from turbo_rcm_patch.bench.tune import cases
from turbo_rcm_patch.cli import info, main
from turbo_rcm_patch.cli.errors import CommandError
from turbo_rcm_patch.cli.tuning import keep
from turbo_rcm_patch.kernels import measured_on, tuned_sdpa, tuned_tiers, why_torch
from turbo_rcm_patch.kernels.choice import measured, tuned
from turbo_rcm_patch.kernels.choice.measured import OPS, Verdict
from turbo_rcm_patch.patching import summary

GPU, CUDA = "NVIDIA GeForce RTX 4090", torch.device("cuda")
get_device_name = torch.cuda.get_device_name
ORIGIN = f"{GPU} by turbo-rcm tune, of small at 32x48x5"
SHAPES = small_shapes()


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache folder, as another process finds it that runs on the GPU (8, 9) after `tune`."""
    monkeypatch.setenv(tuned.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    measured.all_tuned.cache_clear()
    yield tmp_path / "cache"
    measured.all_tuned.cache_clear()


@pytest.fixture
def next_process():
    """Lets the next choice read the files again, as another process does."""
    return measured.all_tuned.cache_clear


def test_the_patch_takes_what_was_faster(next_process, capsys, cache):
    verdicts = keep(SHAPES, GPU, (8, 9), timed(linear_gelu=4.0, linear_qkv=None))
    assert {op for op, verdict in verdicts.items() if verdict.is_ours} == {"attention", "linear_skip", "conv_skip"}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["tune", "for", "small", "at", "32x48x5"]
    assert ["attention", "4.000", "6.000", "ours"] in lines
    assert ["linear_qkv", "failed", "3.000", "PyTorch's"] in lines
    next_process()
    assert {op: why_torch(op, CUDA, torch.bfloat16) for op in OPS} == {
        "attention": None,
        "linear_skip": None,
        "linear_gelu": f"PyTorch's was faster on {ORIGIN}",
        "linear_qkv": f"failed its check on {ORIGIN}",
        "conv_skip": None,
    }
    assert measured_on("attention", CUDA) == ORIGIN
    (file,) = (cache / "tuned").iterdir()
    kept = json.loads(file.read_text())
    assert (kept["model"], kept["size"]) == ("small", "32x48x5")


SELF, CROSSING = "attention 2×70×70×64", "attention 2×70×512×64"
SLOW, EQUAL, FAST = ("memory-efficient", 9.0), ("FlashAttention", 2.95), ("cuDNN", 2.5)


def sdpa_of(dtype=torch.bfloat16, device=CUDA):
    return [tuned_sdpa(device, dtype, crossing=crossing) for crossing in (False, True)]


def test_the_patch_takes_the_backend_of_pytorchs_attention_that_was_faster(next_process, capsys):
    assert sdpa_of() == [None, None]
    keep(SHAPES, GPU, (8, 9), timed({SELF: [SLOW, EQUAL, FAST], CROSSING: [SLOW, EQUAL]}, attention=4.0))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["attention", "2x70x70x64", "4.000", "PyTorch", "SDPA", "(cuDNN)", "2.500"] in lines
    assert ["attention", "2x70x512x64", "4.000", "PyTorch", "SDPA", "(FlashAttention)", "2.950"] in lines
    next_process()
    assert sdpa_of() == ["cuDNN", None]  # of the other a backend is faster too, but by less than 2 %
    assert sdpa_of(torch.float32) == [None, None]
    assert sdpa_of(device=torch.device("cpu")) == [None, None]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_importing_reads_no_file(cache, monkeypatch):
    keep(SHAPES, GPU, (8, 9), timed())
    read = []
    monkeypatch.setattr(Path, "read_text", lambda path, **_: read.append(path) or "{}")
    runpy.run_module(measured.__name__)
    assert read == []


def test_files_are_read_when_first_asked_for_and_once(next_process, monkeypatch):
    read = []
    monkeypatch.setattr(measured, "read_tuned", lambda: read.append("tuned") or {})
    monkeypatch.setattr(measured, "read_verdicts", lambda files: read.append("shipped") or {})
    measured.shipped.cache_clear()
    next_process()
    assert why_torch("attention", CUDA, torch.bfloat16) == "not measured on sm_89"
    assert why_torch("linear_skip", CUDA, torch.bfloat16) == "not measured on sm_89"
    assert read == ["tuned", "shipped"]
    measured.shipped.cache_clear()


def test_a_file_without_its_size_and_backends_is_read(next_process, cache):
    keep(SHAPES, GPU, (8, 9), timed({SELF: [FAST]}))
    (file,) = (cache / "tuned").iterdir()
    content = json.loads(file.read_text())
    del content["size"]
    for row in content["rows"]:
        row.pop("sdpa", None)
    file.write_text(json.dumps(content))
    next_process()
    assert why_torch("attention", CUDA, torch.bfloat16) is None
    assert sdpa_of() == [None, None]
    assert measured_on("attention", CUDA) == f"{GPU} by turbo-rcm tune, of small"


TIERS = {"attention_8bit": 1.0, "linear_qkv_8bit": 4.0, "block_sparse_attention": None}  # the exact tier takes 2 ms
GPUS = (ORIGIN,)


def test_the_other_tiers_are_shown_and_nothing_is_chosen_by_them(next_process, capsys):
    verdicts = keep(SHAPES, GPU, (8, 9), timed(**TIERS))
    assert set(verdicts) == set(OPS)
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    lines = [[cell.strip() for cell in line if cell] for line in lines]
    assert ["8-bit attention", "1.000", "2.000", "2.00x as fast"] in lines
    assert ["8-bit linears", "8.000", "6.000", "0.75x as fast"] in lines
    assert ["sparse-linear attention", "2.000", "2.000", "1.00x as fast"] in lines
    assert ["block-sparse attention", "failed", "2.000", "failed its check"] in lines
    next_process()
    assert all(why_torch(op, CUDA, torch.bfloat16) is None for op in OPS)
    assert tuned_tiers(CUDA) == {
        "8-bit linears": Verdict(GPUS, 8.0, 6.0),
        "8-bit attention": Verdict(GPUS, 1.0, 2.0),
        "sparse-linear attention": Verdict(GPUS, 2.0, 2.0),
        "block-sparse attention": Verdict(GPUS, None, 2.0),
    }
    assert tuned_tiers(torch.device("cpu")) == {}


def test_what_the_exact_tier_failed_at_says_nothing_of_the_others(next_process):
    def measure(case):
        if case.key.op == "linear_qkv":
            raise ValueError("no kernel")
        return timed(**TIERS)(case)

    keep(SHAPES, GPU, (8, 9), measure)
    next_process()
    assert tuned_tiers(CUDA)["8-bit linears"] == Verdict(GPUS, 4.0, 4.0)


def test_what_could_not_be_timed_at_all_has_no_time(capsys):
    def measure(case):
        raise RuntimeError("no kernel")

    keep(SHAPES, GPU, (8, 9), measure)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["linear_qkv", "failed", "failed", "PyTorch's"] in lines


def test_a_folder_has_the_sizes_of_its_vae(tmp_path, capsys):
    def write(part, config):
        (tmp_path / part).mkdir(exist_ok=True)
        (tmp_path / part / "config.json").write_text(json.dumps(config))

    transformer = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 24, "ffn_dim": 64}
    write("transformer", transformer)
    write("vae", {"z_dim": 48, "scale_factor_spatial": 16})
    options = "tune", "--model", tmp_path, "--height", "720"
    assert "--height 720 is not divisible by 32; try 704." in error_of(capsys, *options)
    write("transformer", {**transformer, "patch_size": [2, 2]})
    assert "has patch_size [2, 2]; accepted are three numbers" in error_of(capsys, *options)


def notes_on(gpu_name, config):
    """Return the summary's notes on a patch's tier on a GPU."""
    return summary.beside_exact(summary._slower(config, torch.device(gpu_name)))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (trp.Exact(), None),
        (trp.Quantized(), "8-bit linears 0.75x as fast"),
        (trp.Quantized(quantize=["attention"]), None),
        (trp.Sparse(), "8-bit linears 0.75x as fast"),
        (trp.BlockSparse(), "8-bit linears 0.75x as fast, block-sparse attention failed its check"),
        (trp.BlockSparse(quantize=[]), None),
    ],
)
def test_the_summary_says_what_of_a_tier_is_slower_than_the_exact_one(next_process, config, expected):
    assert notes_on("cuda", config) == []
    keep(SHAPES, GPU, (8, 9), timed(**TIERS))
    next_process()
    assert notes_on("cuda", config) == ([f"beside the exact tier, on {GPUS[0]}: {expected}"] if expected else [])
    assert notes_on("cpu", config) == []


def test_a_patch_of_that_tier_prints_it(monkeypatch):
    slow = {"8-bit attention": Verdict(GPUS, 2.0, 1.0), "8-bit linears": Verdict(GPUS, 1.0, 2.0)}
    monkeypatch.setattr(kernels, "tuned_tiers", lambda device: slow)
    model = tiny_wan_transformer()
    line = f"beside the exact tier, on {GPUS[0]}: 8-bit attention 0.50x as fast"
    with trp.patch(model, "quantized") as patch:
        assert line in [note.strip() for note in patch.summary().splitlines()]
    with trp.patch(model) as patch:
        assert "beside the exact tier" not in patch.summary()


def test_a_vae_says_where_the_choice_of_its_convolutions_comes_from(next_process, monkeypatch):
    monkeypatch.setattr(summary, "get_module_execution_device", lambda model: CUDA)
    pipe = tiny_wan_pipeline("t2v")
    pipe.vae.bfloat16()
    with trp.patch(pipe):
        (unmeasured,) = (note for note in vae_notes(pipe.vae) if "convolutions" in note)
        assert "ours were not measured on this GPU; run turbo-rcm tune" in unmeasured
        keep(SHAPES, GPU, (8, 9), timed())
        next_process()
        assert f"convolutions: the faster ones as measured on {ORIGIN}" in vae_notes(pipe.vae)
    pipe.vae.float()  # whose convolutions are PyTorch's, and say so themselves
    with trp.patch(pipe):
        assert not any(note.startswith("convolutions: ") for note in vae_notes(pipe.vae))


def vae_notes(vae):
    return summary.vae_section(vae, trp.Exact()).notes


def test_info_repeats_how_fast_the_other_tiers_are(monkeypatch, capsys):
    assert main(["info", "--device", "cpu"]) == 0
    assert "beside the exact tier" not in capsys.readouterr().out
    found = {"8-bit attention": Verdict(GPUS, 1.0, 1.3), "8-bit linears": Verdict(GPUS, 1.0, 1.6)}
    monkeypatch.setattr(info, "tuned_tiers", lambda device: found)
    assert main(["info", "--device", "cpu"]) == 0
    line = f"beside the exact tier, on {GPUS[0]}: 8-bit attention 1.30x as fast, 8-bit linears 1.60x as fast"
    assert line in capsys.readouterr().out.splitlines()


def test_it_goes_before_what_ships(next_process, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert why_torch("linear_gelu", CUDA, torch.bfloat16) is None
    keep(SHAPES, "NVIDIA H200", (9, 0), timed(linear_gelu=4.0))
    next_process()
    assert "by turbo-rcm tune" in why_torch("linear_gelu", CUDA, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    assert why_torch("linear_gelu", CUDA, torch.bfloat16) is None  # of another GPU nothing is known but what ships
    assert measured_on("linear_gelu", CUDA) == "NVIDIA H100 80GB HBM3, NVIDIA H200"


@pytest.mark.parametrize("ours", [2.0, 4.0])
def test_a_traced_model_chooses_by_it_too(next_process, monkeypatch, ours):
    monkeypatch.setattr(torch.cuda, "get_device_name", get_device_name)  # torch.compile knows it, not its substitute
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=GPU))
    keep(SHAPES, GPU, (8, 9), timed({SELF: [FAST]}, linear_gelu=ours))
    next_process()

    def chosen(x):
        takes_ours = why_torch("linear_gelu", CUDA, torch.bfloat16) is None
        takes_backend = tuned_sdpa(CUDA, torch.bfloat16, crossing=False) == "cuDNN"
        return x + takes_ours, x + takes_backend

    torch.compiler.reset()
    compiled = torch.compile(chosen, fullgraph=True, backend="eager")
    assert [found.item() for found in compiled(torch.zeros(1))] == [ours < 3, True]


def test_it_counts_for_its_gpu_and_versions_alone(next_process, monkeypatch):
    keep(SHAPES, GPU, (8, 9), timed())
    monkeypatch.setattr(tuned.triton, "__version__", "9.9")
    next_process()
    assert why_torch("attention", CUDA, torch.bfloat16) == "not measured on sm_89"


def test_an_interrupted_run_leaves_the_old_choice(next_process, cache):
    keep(SHAPES, GPU, (8, 9), timed())
    before = [path.read_text() for path in (cache / "tuned").iterdir()]
    left = iter(cases(SHAPES))

    def interrupted(case):
        next(left), next(left)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keep(SHAPES, GPU, (8, 9), interrupted)
    assert [path.read_text() for path in (cache / "tuned").iterdir()] == before


def test_reset_forgets_it(next_process, cache, capsys):
    keep(SHAPES, GPU, (8, 9), timed())
    (file,) = (cache / "tuned").iterdir()
    capsys.readouterr()
    assert main(["tune", "--reset"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"removed {file}"
    next_process()
    assert why_torch("attention", CUDA, torch.bfloat16) == "not measured on sm_89"
    assert main(["tune", "--reset"]) == 0


def test_a_file_that_cannot_be_read_is_left_out(next_process, cache, caplog):
    keep(SHAPES, GPU, (8, 9), timed({SELF: [FAST]}))
    (file,) = (cache / "tuned").iterdir()
    kept = file.read_text()
    wrong_rows = kept.replace('"ours"', '"theirs"'), kept.replace(": 2.0", ': "2"'), kept.replace('"attention"', "[]")
    wrong_rows += kept.replace('"cuDNN"', '"TPU"'), kept.replace('"shape": [', '"shape": [], "was": [')
    for content in ("{", "[]", '{"versions": 1}', *wrong_rows):
        file.write_text(content)
        next_process()
        assert why_torch("attention", CUDA, torch.bfloat16) == "not measured on sm_89"
    assert caplog.text.count("run turbo-rcm tune again") == 7  # a file of other versions is not an error


def test_what_cannot_be_removed_is_one_line(cache, capsys):
    (cache / "tuned" / "folder.json").mkdir(parents=True)
    assert "--reset: " in error_of(capsys, "tune", "--reset")


def test_without_a_home_the_package_can_be_imported(monkeypatch):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in (tuned.CACHE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert tuned.read_tuned() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "PyTorch finds none here"),
        (["--device", "cpu"], "PyTorch finds none here"),
        (["--device", "cuda"], "PyTorch finds none here"),
        (["--device", "gpu"], "--device gpu is unknown; give cuda or cuda:N."),
        (["--config", "flux"], "--config flux is unknown; accepted are wan2.1-1.3b"),
        (["--model", "Wan-AI/Wan2.1"], "--model Wan-AI/Wan2.1: no such folder; give the downloaded folder"),
        (["--model", str(Path(__file__).parent)], "holds no transformer"),
        (["--reset", "--height", "480"], "--reset deletes all measurements; leave --height out."),
        (["--reset", "--device", "cuda"], "leave --device out."),
        (["--frames", "6"], "--frames 6 is not 4k+1; try 5"),
        (["--config", "wan2.2-5b", "--height", "720"], "--height 720 is not divisible by 32; try 704."),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_and_with_bad_options_it_is_one_line(capsys, options, message):
    assert message in error_of(capsys, "tune", *options)


def test_with_a_gpu_another_device_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "--device cpu: tune times kernels on an NVIDIA GPU; leave it out." in error_of(
        capsys, "tune", "--device", "cpu"
    )


def test_a_folder_that_cannot_be_made_is_one_line_before_anything_is_measured(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(tuned.CACHE, str(tmp_path / "file"))
    with pytest.raises(CommandError, match="set TURBO_RCM_PATCH_CACHE to another folder"):
        keep(SHAPES, GPU, (8, 9), lambda case: pytest.fail("it was measured"))


def test_a_folder_that_cannot_be_written_in_is_one_line_before_anything_is_measured(monkeypatch, tmp_path):
    def denied(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setenv(tuned.CACHE, str(tmp_path))
    monkeypatch.setattr("tempfile.TemporaryFile", denied)  # file modes do not stop root
    with pytest.raises(CommandError, match=f"cannot write in {tmp_path}.*set TURBO_RCM_PATCH_CACHE"):
        keep(SHAPES, GPU, (8, 9), lambda case: pytest.fail("it was measured"))
