"""`turbo-rcm convert`."""

import shlex
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors.torch import save_file

import turbo_rcm_patch as trp
from tests.cli.running import TINY, error_of
from tests.official_names import in_8_bits, official_state_dict, with_proj_l, with_scales
from tests.tiny_families import vace
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.cli import commands, main, transformers
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears

CPU = ("--device", "cpu")


def test_a_converted_model_can_be_loaded(saved_models, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        main(["convert", str(saved_models / "t2v"), str(out), "--dtype", "float32", "--keep", "blocks.0.*", *CPU]) == 0
    )
    assert "t2v/transformer: 10 linears in 8 bits, 0.00 GiB in all" in capsys.readouterr().out
    model, expected = tiny_wan_transformer(seed=7), tiny_wan_transformer()
    trp.load_converted(out, model, trp.Quantized())
    trp.patch(expected, trp.Quantized(keep=["blocks.0.*"]))
    assert {linear.quantized().format for linear in quantized_linears(model)} == {torch.float8_e4m3fn, torch.int8}
    with torch.no_grad():
        assert torch.equal(*(each(**tiny_transformer_inputs(each))[0] for each in (model, expected)))


def test_the_line_names_the_class_of_the_model(tmp_path, capsys):
    vace().save_pretrained(tmp_path / "vace")
    assert main(["convert", str(tmp_path / "vace"), str(tmp_path / "out"), "--preset", "exact", *CPU]) == 0
    line = f"WanVACETransformer3DModel.from_pretrained('{tmp_path / 'out'}', dtype=torch.bfloat16)"
    assert line in capsys.readouterr().out


def words_of_the_line(printed):
    """The arguments of the line of `generate` that `convert` prints."""
    line = next(line for line in printed.splitlines() if line.strip().startswith("turbo-rcm generate"))
    return shlex.split(line)[2:]


@pytest.mark.parametrize("preset", ["quantized", "exact"])
def test_convert_prints_the_line_that_uses_what_it_wrote(saved_models, tmp_path, capsys, preset):
    out = tmp_path / "con verted"
    assert main(["convert", str(saved_models / "t2v"), str(out), "--preset", preset, "--dtype", "float32", *CPU]) == 0
    printed = capsys.readouterr().out
    assert f"wrote {out}; use it by" in printed
    assert ("trp.load_converted(" in printed) == (preset == "quantized")
    again = ["generate", "a fox", "-o", str(tmp_path / "out.mp4"), *words_of_the_line(printed)[3:], *TINY, "-v"]
    assert main(again) == 0
    assert ("linears in 8 bits" in capsys.readouterr().out) == (preset == "quantized")


def test_the_lines_run_sparse_linear_attention_where_the_weights_have_it(saved_models, tmp_path, capsys):
    model, out = tiny_wan_transformer(), tmp_path / "out"
    torch.save(with_proj_l(official_state_dict(model), model), tmp_path / "model.pth")
    convert = ["convert", str(tmp_path / "model.pth"), str(out), "--preset", "exact", "--dtype", "float32", *CPU]
    assert main(convert) == 0
    printed = capsys.readouterr().out
    words = words_of_the_line(printed)
    assert words[-4:] == ["--preset", "sparse", "--recipe", "turbowan"]
    words[words.index("PIPELINE")] = str(saved_models / "t2v")
    assert main(["generate", "a fox", "-o", str(tmp_path / "out.mp4"), *words[3:], *TINY, "-v"]) == 0
    assert "SLA 1/1 blocks" in capsys.readouterr().out
    pipe = WanPipeline.from_pretrained(saved_models / "t2v")
    eval(printed.split("or in Python by\n")[1].strip(), {"trp": trp, "pipe": pipe})
    assert hasattr(pipe.transformer.blocks[0].attn1, "proj_l")


def test_the_lines_keep_the_attentions_that_were_kept(saved_models, tmp_path, capsys):
    """The files tell of linears alone."""
    out, keep = tmp_path / "out", ["--keep", "*.processor", "--keep", "blocks.0.ffn.*"]
    assert main(["convert", str(saved_models / "t2v"), str(out), "--dtype", "float32", *keep, *CPU]) == 0
    printed = capsys.readouterr().out
    again = ["generate", "a fox", "-o", str(tmp_path / "out.mp4"), *words_of_the_line(printed)[3:], *TINY, "-v"]
    assert main(again) == 0
    assert "named in keep (2)" in capsys.readouterr().out
    pipe = WanPipeline.from_pretrained(saved_models / "t2v")
    patch = eval(printed.split("or in Python by\n")[1].strip(), {"trp": trp, "pipe": pipe})
    pipe.transformer(**tiny_transformer_inputs(pipe.transformer))
    assert "named in keep (2)" in patch.summary()


@pytest.mark.parametrize("preset", ["exact", "quantized"])
def test_a_folder_whose_parent_has_a_config_of_its_own_is_named_itself(tmp_path, capsys, preset):
    model, out = tiny_wan_transformer(), tmp_path / "transformer"
    torch.save(official_state_dict(model), tmp_path / "model.pth")
    (tmp_path / "config.json").write_text("{}")
    assert main(["convert", str(tmp_path / "model.pth"), str(out), "--preset", preset, *CPU]) == 0
    assert str(out) in words_of_the_line(capsys.readouterr().out)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_the_lines_in_python_are_for_every_transformer_of_the_folder(tmp_path, capsys, dtype):
    pipe, out, given = tiny_wan_pipeline("wan22"), tmp_path / "out", ["--dtype", dtype] if dtype else []
    pipe.save_pretrained(tmp_path / "pipe")
    assert main(["convert", str(tmp_path / "pipe"), str(out), "--preset", "exact", *given, *CPU]) == 0
    lines = capsys.readouterr().out.split("or in Python by\n")[1]
    names = {"pipe": SimpleNamespace(), "torch": torch, "WanTransformer3DModel": WanTransformer3DModel}
    exec(textwrap.dedent(lines), names)
    for name in ("transformer", "transformer_2"):
        found, expected = (getattr(one, name).proj_out.weight for one in (names["pipe"], pipe))
        assert found.dtype == getattr(torch, dtype or "bfloat16")
        assert torch.equal(found, expected.to(found.dtype))


def test_a_converted_folder_is_refused_where_its_weights_cannot_run(saved_models, tmp_path, capsys):
    model, out = saved_models / "t2v", tmp_path / "out"
    assert main(["convert", str(model), str(out), *CPU]) == 0
    given = ["--model", model, "--transformer", out, *TINY]
    assert "8-bit weights, which run patched alone" in error_of(capsys, "compare", *given, "--preset", "quantized")
    assert f"--transformer {out} holds 8-bit weights; give --preset quantized" in error_of(
        capsys, "generate", "a", "-o", tmp_path / "o.mp4", *given
    )
    assert "holds a transformer alone: give it as --transformer" in error_of(capsys, "verify", "--model", out)


def test_a_single_file_that_cannot_be_a_transformer_is_refused(saved_models, tmp_path, capsys, monkeypatch):
    name = "model.diffusion_model.blocks.0.ffn.0"
    in_8_bits = {
        f"has {name}.weight_scale_inv beside blocks.0.ffn.0.weight": ("weight", "weight_scale_inv"),
        f"has {name}.qweight in place of blocks.0.ffn.0.weight": ("qweight", "wscales"),
        "8.safetensors holds 8-bit weights, which run patched alone": ("int8_weight", "scale"),
    }
    save_file({f"{name}.bias": torch.ones(48)}, tmp_path / "part.safetensors")
    (tmp_path / "b.gguf").touch()
    command = ["compare", "--model", str(saved_models / "t2v"), *TINY, "--transformer"]
    for message, parts in in_8_bits.items():
        save_file({f"{name}.{part}": torch.ones(1) for part in parts}, tmp_path / "8.safetensors")
        assert message in error_of(capsys, *command, tmp_path / "8.safetensors")
    message = error_of(capsys, *command, tmp_path / "part.safetensors")
    assert "part.safetensors: diffusers does not find all weights of a WanTransformer3DModel in it. turbo-" in message
    assert f"cannot load --transformer {tmp_path / 'b.gguf'}: " in error_of(capsys, *command, tmp_path / "b.gguf")
    monkeypatch.setattr(transformers, "find_spec", lambda name: None)
    message = error_of(capsys, *command, tmp_path / "b.gguf")
    assert "b.gguf: GGUF files need the package gguf; install it with: pip install gguf" in message
    assert "is a file; diffusers takes a single file as a transformer" in error_of(
        capsys, "verify", "--model", tmp_path / "b.gguf"
    )
    second = [*command[:-1], "--transformer-2", tmp_path / "b.gguf"]
    assert "replaces the pipeline's transformer_2, but --model" in error_of(capsys, *second)
    tiny_wan_transformer().save_pretrained(tmp_path / "low" / "transformer_2")
    for more in ("--transformer-2", tmp_path / "low" / "transformer_2"), ("--transformer", tmp_path / "low"):
        assert "replaces the pipeline's transformer_2, but --model" in error_of(capsys, *second[:-2], *more)
    assert "--transformer nothing: no such file or folder" in error_of(capsys, *command, "nothing")
    assert "--transformer goes with --model" in error_of(capsys, "verify", "--transformer", tmp_path)


def test_convert_knows_names_that_diffusers_does_not(saved_models, tmp_path, capsys):
    save_file(official_state_dict(tiny_wan_transformer(), prefix="net."), tmp_path / "net.safetensors")
    given = ["--model", saved_models / "t2v", *TINY, "--transformer"]
    assert "convert FILE FOLDER --preset exact" in error_of(capsys, "verify", *given, tmp_path / "net.safetensors")
    convert = ["convert", tmp_path / "net.safetensors", tmp_path / "out", "--preset", "exact", *CPU]
    assert main(list(map(str, convert))) == 0


def test_integers_without_scales_are_no_weights(saved_models, tmp_path, capsys):
    """diffusers would load them."""
    weights, name = official_state_dict(tiny_wan_transformer()), "blocks.1.ffn.2.weight"
    save_file(weights | {name: weights[name].to(torch.int8)}, tmp_path / "int8.safetensors")
    given = ["--model", saved_models / "t2v", "--transformer", tmp_path / "int8.safetensors", *TINY]
    assert f"{name} holds integers, but the file has no scales" in error_of(capsys, "verify", *given)


@pytest.mark.parametrize("preset", ["quantized", "exact"])
def test_a_single_file_in_8_bits_is_generated_with(saved_models, tmp_path, capsys, preset):
    path = tmp_path / "fp8_scaled.safetensors"
    save_file(with_scales(official_state_dict(tiny_wan_transformer(seed=5)), prefix="model.diffusion_model."), path)
    given = ["--model", saved_models / "t2v", "--transformer", path, *TINY, "-v"]
    command = ["generate", "a fox", "-o", tmp_path / "out.mp4", *given, "--preset", preset]
    assert main(list(map(str, command))) == 0
    assert ("20 linears with the file's own 8-bit values" in capsys.readouterr().out) == (preset == "quantized")
    message = "convert FILE FOLDER --preset exact" if preset == "exact" else "leave it or --no-patch out"
    assert message in error_of(capsys, *command, "--no-patch")
    assert "it goes with generate" in error_of(capsys, "verify", *given)


def test_a_quant_file_of_turbowan_is_generated_with(saved_models, tmp_path, capsys):
    model, path = tiny_wan_transformer(seed=5), tmp_path / "TurboWan-quant.pth"
    torch.save(in_8_bits(with_proj_l(official_state_dict(model), model)), path)
    given = ["--model", saved_models / "t2v", "--transformer", path, *TINY, "-v", "--preset"]
    command = ["generate", "a fox", "-o", tmp_path / "out.mp4", *given]
    assert main([*map(str, command), "sparse"]) == 0
    assert "to the weights of 20 linears" in capsys.readouterr().out
    assert "(it has proj_l), which --preset quantized leaves out; give --preset sparse." in error_of(
        capsys, *command, "quantized"
    )


def test_both_experts_have_to_be_in_8_bits(tmp_path, capsys):
    pipe, paths = tiny_wan_pipeline("wan22"), [tmp_path / "high.safetensors", tmp_path / "low.safetensors"]
    pipe.save_pretrained(tmp_path / "pipe")
    for path, model in zip(paths, (pipe.transformer, pipe.transformer_2), strict=True):
        save_file(with_scales(official_state_dict(model)), path)
    command = ["generate", "a fox", "-o", tmp_path / "out.mp4", "--model", tmp_path / "pipe", *TINY]
    command += ["--preset", "quantized"]
    given = {"--transformer": paths[0], "--transformer-2": paths[1]}
    for option, path in given.items():
        message = f"{option} {path} holds 8-bit weights, but the pipeline has two transformers; give such a file for"
        assert message in error_of(capsys, *command, option, path)
    paths[1].with_name("broken.safetensors").touch()
    broken = ["--transformer-2", tmp_path / "broken.safetensors"]
    assert f"cannot load {broken[0]} {broken[1]}: " in error_of(capsys, *command, *broken)
    assert main(list(map(str, [*command, *(part for each in given.items() for part in each)]))) == 0


def test_a_single_file_is_loaded_as_diffusers_does(saved_models, tmp_path, monkeypatch):
    """The file has its authors' names. The config is that of the pipeline's transformer."""
    model = tiny_wan_transformer(seed=5)
    save_file(
        {name: tensor.contiguous() for name, tensor in official_state_dict(model).items()}, tmp_path / "wan.safetensors"
    )
    found = []
    monkeypatch.setattr(commands, "compare", lambda pipe, *_, **__: found.append(pipe.transformer) or sys.exit(0))
    with pytest.raises(SystemExit):
        main(
            ["compare", "--model", str(saved_models / "t2v"), *TINY, "--transformer", str(tmp_path / "wan.safetensors")]
        )
    loaded, expected = found[0].state_dict(), model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("quant", [False, True])
def test_the_error_added_to_weights_in_8_bits_is_printed(tmp_path, capsys, quant):
    model = tiny_wan_transformer()
    weights = with_proj_l(official_state_dict(model), model)
    torch.save(in_8_bits(weights) if quant else weights, tmp_path / "TurboWan.pth")
    convert = ["convert", str(tmp_path / "TurboWan.pth")]
    assert main([*convert, str(tmp_path / "out"), "--preset", "sparse", *CPU]) == 0
    printed = capsys.readouterr().out
    assert ("adds a relative error of" in printed) == quant
    assert ("to the weights of 20 linears" in printed) == quant
    assert main([*convert, str(tmp_path / "exact"), "--preset", "exact", *CPU]) == 0
    assert "adds a relative error" not in capsys.readouterr().out


def test_errors(saved_models, tmp_path, capsys):
    model, out = saved_models / "t2v", tmp_path / "out"
    assert "no such file or folder" in error_of(capsys, "convert", tmp_path / "none", out, *CPU)
    assert "does not exist; create it first" in error_of(capsys, "convert", model, out / "deeper", *CPU)
    assert "preset 'fast' is unknown; accepted are" in error_of(capsys, "convert", model, out, "--preset", "fast", *CPU)
    keep = ("--preset", "exact", "--keep", "blocks.0.*")
    assert "--keep is an option of --preset quantized" in error_of(capsys, "convert", model, out, *keep, *CPU)
    assert "keep='x' fits no module" in error_of(capsys, "convert", model, out, "--keep", "x", *CPU)
    assert "holds no transformer" in error_of(capsys, "convert", saved_models / "flux", out, *CPU)
    assert "exists and is not empty" in error_of(capsys, "convert", model, saved_models, *CPU)
    assert not list(tmp_path.iterdir())
