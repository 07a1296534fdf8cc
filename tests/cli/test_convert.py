"""`turbo-rcm convert`."""

import pytest
import torch

import turbo_rcm_patch as trp
from tests.cli.running import error_of
from tests.official_names import in_8_bits, official_state_dict, with_proj_l
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.cli import main
from turbo_rcm_patch.patching.weights.convert import quantized_linears

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
    assert "--preset fast is unknown; accepted are" in error_of(capsys, "convert", model, out, "--preset", "fast", *CPU)
    keep = ("--preset", "exact", "--keep", "blocks.0.*")
    assert "--keep is about 8 bits" in error_of(capsys, "convert", model, out, *keep, *CPU)
    assert "keep='x' fits no module" in error_of(capsys, "convert", model, out, "--keep", "x", *CPU)
    assert "holds no transformer" in error_of(capsys, "convert", saved_models / "flux", out, *CPU)
    assert "exists and is not empty" in error_of(capsys, "convert", model, saved_models, *CPU)
    assert not list(tmp_path.iterdir())
