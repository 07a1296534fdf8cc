"""PyTorch's attention under the patch asks the backend first that turbo-rcm tune found faster."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

import turbo_rcm_patch as trp
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.kernels.attention import attention as own
from turbo_rcm_patch.kernels.attention import sdpa

DEFAULT = _cur_sdpa_kernel_backends(with_priority=True)[0]
TUNED = {False: "FlashAttention", True: "cuDNN"}  # a CPU takes the first, and does not have the second


@pytest.fixture(autouse=True)
def tuned(monkeypatch):
    monkeypatch.setattr(own, "tuned_sdpa", lambda device, dtype, *, crossing: TUNED[crossing])


@pytest.fixture
def first(monkeypatch):
    """The backend that PyTorch asks first at each call of its attention."""
    found, attend = [], F.scaled_dot_product_attention

    def noted(*arguments, **options):
        found.append(_cur_sdpa_kernel_backends(with_priority=True)[0])
        return attend(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(sdpa, "PYTORCHS", noted)
    return found


def run(model, config, *, grad=False):
    with torch.set_grad_enabled(grad), trp.patch(model, config) as patch:
        output = model(**tiny_transformer_inputs(model))[0]
        kernels_of = {row.sub_layer: row.kernel for row in patch.rows() if row.step == "attention"}
    return output, kernels_of


@pytest.mark.parametrize("config", [trp.Exact(), trp.Exact(attention="sdpa")])
def test_each_attention_asks_the_faster_one_first_and_the_summary_names_it(first, config):
    model = tiny_wan_transformer()
    output, kernels_of = run(model, config)
    assert first == 2 * [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    assert kernels_of == {
        "self_attention": "PyTorch SDPA (FlashAttention, by turbo-rcm tune)",
        "cross_attention": "PyTorch SDPA (FlashAttention)",  # the preferred backend cannot take the call
    }
    assert torch.equal(output, run(model, trp.Exact(implementation="torch"))[0])


def test_an_image_is_attended_to_as_the_text_is(first):
    model = tiny_wan_transformer(image_dim=4, added_kv_proj_dim=128, in_channels=36)
    run(model, trp.Exact())
    cross = SDPBackend.CUDNN_ATTENTION
    assert first == 2 * [SDPBackend.FLASH_ATTENTION, cross, cross]


@pytest.mark.parametrize(("config", "grad"), [(trp.Exact(implementation="torch"), False), (trp.Exact(), True)])
def test_the_reference_and_what_is_differentiated_are_as_pytorch_has_them(first, config, grad):
    _, kernels_of = run(tiny_wan_transformer(), config, grad=grad)
    assert first == 4 * [DEFAULT]
    if not grad:  # the summary is of calls without
        assert "tune" not in "".join(kernels_of.values())


def test_under_torch_compile_and_bitwise_the_same():
    model = tiny_wan_transformer(layers=1)
    expected, _ = run(model, trp.Exact())
    torch.compiler.reset()
    with torch.no_grad(), trp.patch(model):
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        assert torch.equal(model(**tiny_transformer_inputs(model))[0], expected)
