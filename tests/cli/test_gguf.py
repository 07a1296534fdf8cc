"""`--transformer FILE.gguf`: a Wan transformer in packed weights, as published GGUF files have it."""

import pytest
import torch
from diffusers import GGUFQuantizationConfig, WanTransformer3DModel

import turbo_rcm_patch as trp
from tests import lora_files
from tests.cli.running import TINY, error_of
from tests.official_names import official_state_dict
from tests.tiny_wan import output_of, tiny_wan_pipeline
from turbo_rcm_patch.cli import main

gguf = pytest.importorskip("gguf")
Q8_0, FP32 = gguf.GGMLQuantizationType.Q8_0, torch.float32


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A pipeline's folder, and a file with its transformer, whose blocks' linears are packed in 8 bits."""
    folder = tmp_path_factory.mktemp("gguf")
    pipe = tiny_wan_pipeline(ffn_dim=64)  # packed in rows of 32 values
    pipe.save_pretrained(folder / "pipe")
    writer = gguf.GGUFWriter(folder / "wan.gguf", "wan")
    for name, tensor in official_state_dict(pipe.transformer).items():
        values = tensor.numpy()
        if name.startswith("blocks") and name.endswith("weight") and tensor.dim() == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


@pytest.fixture
def model(packed):
    options = {"quantization_config": GGUFQuantizationConfig(compute_dtype=FP32), "dtype": FP32}
    path = str(packed / "wan.gguf")
    return WanTransformer3DModel.from_single_file(
        path, config=str(packed / "pipe"), subfolder="transformer", **options
    ).eval()


@pytest.mark.parametrize("command", ["generate", "verify"])
def test_the_commands_run_it(packed, tmp_path, capsys, command):
    prompt = ["a fox", "-o", str(tmp_path / "o.mp4"), "-v"] if command == "generate" else ["a fox"]
    given = ["--model", str(packed / "pipe"), "--transformer", str(packed / "wan.gguf"), *TINY]
    assert main([command, *prompt, *given]) == 0
    printed = capsys.readouterr().out
    assert "diffusers GGUFLinear layer (2)" in printed
    if command == "verify":
        assert "all 2 blocks and the VAE are within the allowed error" in printed


@pytest.mark.parametrize("preset", ["exact", "quantized"])
def test_its_linears_run_by_diffusers_and_the_summary_says_so(model, preset):
    expected = output_of(model)
    with trp.patch(model, preset) as patch:
        error = (output_of(model) - expected).norm() / expected.norm()
        assert error < (1e-6 if preset == "exact" else 0.03)
        assert "QKV projection           PyTorch module" in patch.summary() or preset == "exact"
        assert patch.summary().count("diffusers GGUFLinear layer (2)") == 5
        assert "linears in 8 bits" not in patch.summary()
    assert torch.equal(output_of(model), expected)


def test_a_lora_runs_beside_packed_weights_and_a_lokr_is_refused(packed, model, tmp_path):
    pipe = tiny_wan_pipeline(ffn_dim=64)
    file, products = lora_files.lightx2v(pipe.transformer), lora_files.lokr(pipe.transformer)
    expected, plain = output_of(file.merged()), output_of(model)
    pipe.register_modules(transformer=model)
    with trp.use_distilled(pipe, file.save(tmp_path / "lora.safetensors"), recipe="lightx2v") as handle:
        assert not handle.unused
        assert (output_of(model) - expected).norm() < 0.01 * expected.norm()
    assert torch.equal(output_of(model), plain)
    with pytest.raises(RuntimeError, match=r"the LoKr cannot be added to .*: the parameter is a GGUFParameter"):
        trp.use_distilled(pipe, products.save(tmp_path / "lokr.safetensors"), recipe="lightx2v")
    assert torch.equal(output_of(model), plain)


def test_the_sparse_tier_is_refused(packed, capsys):
    given = ["--model", packed / "pipe", "--transformer", packed / "wan.gguf", *TINY, "--preset", "sparse"]
    assert "wan.gguf: diffusers loads GGUF files" in error_of(capsys, "verify", "a", *given)
