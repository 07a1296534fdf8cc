"""The ways to run a pipeline: each switch is on inside its context, and nothing is left outside."""

import pytest
import torch
from torch._inductor import config as inductor_config

from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.bench.variants import COMPILED, EXACT_PATCH, PATCHED, TORCHAO, UNPATCHED, memory_of, single_process
from turbo_rcm_patch.config import Exact, Quantized


def test_the_compiled_rival_compiles_blocks_and_decoder_and_leaves_no_trace():
    """Nothing is compiled before it is called."""
    pipe = tiny_wan_pipeline()
    found_last = pipe.vae.decoder.conv_out.weight  # one weight is laid out with channels last already
    found_last.data = found_last.data.contiguous(memory_format=torch.channels_last_3d)
    models = (*pipe.transformer.blocks, pipe.vae.decoder)
    layouts = {name: parameter.stride() for name, parameter in pipe.vae.named_parameters()}
    switch = single_process(pipe, Exact(), with_compile=True).switches[COMPILED]
    for _ in range(2):
        with switch():
            calls = [model._compiled_call_impl for model in models]
            assert all(calls)
            last = torch.channels_last_3d
            assert pipe.vae.decoder.conv_in.weight.is_contiguous(memory_format=last)
            assert not pipe.vae.encoder.conv_in.weight.is_contiguous(memory_format=last)
        assert not any(model._compiled_call_impl for model in models)
        assert {name: parameter.stride() for name, parameter in pipe.vae.named_parameters()} == layouts


def test_torchaos_tuning_and_memory_are_those_of_its_own_variant(monkeypatch):
    """The tuning would make every other compilation of the process minutes longer."""
    quant_api = pytest.importorskip("torchao.quantization.quant_api")
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda *_: None)  # quantising needs no GPU
    pipe = tiny_wan_pipeline().to(torch.bfloat16)
    own = pipe.transformer
    variants = single_process(pipe, Quantized(), with_compile=True)
    linears = [module for module in own.blocks.modules() if isinstance(module, torch.nn.Linear)]
    saved = sum(linear.weight.numel() - 4 * linear.out_features for linear in linears)  # a scale for each row
    assert list(variants.switches) == [UNPATCHED, COMPILED, EXACT_PATCH, TORCHAO, PATCHED]
    assert variants.spare_memory == memory_of(own) - saved
    switch = variants.switches[TORCHAO]
    for _ in range(2):
        assert pipe.transformer is own
        assert not inductor_config.coordinate_descent_tuning
        with switch():
            assert pipe.transformer is not own
            assert inductor_config.coordinate_descent_tuning
    assert not inductor_config.coordinate_descent_tuning
