import copy
import pickle

import pytest
import torch

import turbo_rcm_patch as trp
from tests.patching.test_equivalence import DEVICES, captured_block_inputs, model_and_inputs

REMEDY = "Patch with residual='same'"


def block_inputs(on, largest):
    """Return a model and the inputs of its first block, with one column of the hidden states at ``largest``."""
    model, inputs = model_and_inputs("t2v", on, torch.bfloat16)
    x, *rest = captured_block_inputs(model, inputs)[0]
    x[..., 0] = largest
    return model, (x, *rest)


def call(model, args):
    with torch.no_grad():
        result = model.blocks[0](*args)
    if result.is_cuda:
        torch.cuda.synchronize()
    return result


def warnings_of(caplog):
    return sum(REMEDY in record.message for record in caplog.records)


@pytest.mark.parametrize("on", DEVICES)
def test_a_residual_that_fp16_cannot_hold_saturates_and_says_so_once(on, caplog):
    model, args = block_inputs(on, 3e6)
    with trp.patch(model) as patch:
        assert "were cut off" not in patch.summary()
        for _ in range(3):
            assert call(model, args).isfinite().all()
        assert "were cut off" in patch.summary()
    assert warnings_of(caplog) == 1


def test_the_first_call_says_so(caplog):
    model, args = block_inputs("cpu", 3e6)
    with trp.patch(model):
        call(model, args)
    assert warnings_of(caplog) == 1


@pytest.mark.parametrize("on", DEVICES)
def test_another_model_is_not_accused(on, caplog):
    """The other model gives no warning, and neither does a copy of the model that saturated."""
    (guilty, large), (innocent, args) = block_inputs(on, 3e6), block_inputs(on, 1.0)
    with trp.patch(guilty), trp.patch(innocent) as patch:
        for _ in range(2):
            call(guilty, large)
            call(innocent, args)
        assert "were cut off" not in patch.summary()
        assert warnings_of(caplog) == 1
        for copied in (copy.deepcopy(guilty), pickle.loads(pickle.dumps(guilty))):
            call(copied, args)
        assert warnings_of(caplog) == 1


@pytest.mark.gpu
def test_a_replayed_graph_says_so(caplog):
    """Saturation inside a graph is found in the next call."""
    model, inputs = model_and_inputs("t2v", "cuda", torch.bfloat16)
    with torch.no_grad(), trp.patch(model, trp.Exact(cuda_graph="on")) as patch:
        for _ in range(3):
            model(**inputs)
        assert patch.graph_count == 1
        model.blocks[0].attn1.to_out[0].bias.fill_(1e8)
        for _ in range(2):
            model(**inputs)
            torch.cuda.synchronize()
    assert warnings_of(caplog) == 1
