"""`fit` with a patched text encoder: its plan, the same embeddings while its layers stream, and the way back."""

import pytest
import torch

import turbo_rcm_patch as trp
from tests.memory.test_fit import fit_on_the_cpu, hooks_of
from tests.patching.text_encoder.test_forward import LONG, SHORT, assert_same, encoded, lean  # noqa: F401
from tests.tiny_wan import tiny_wan_pipeline
from tests.umt5 import random_encoder
from turbo_rcm_patch.memory.choose import BLOCKS_AT_ONCE
from turbo_rcm_patch.memory.components import component_of
from turbo_rcm_patch.memory.stages import encoder_bytes
from turbo_rcm_patch.memory.streaming import stop_streaming, stream
from turbo_rcm_patch.plain import hook_on

PROMPTS = [SHORT, LONG], ["", "ugly"]


def test_weights_that_stream_are_not_stored_in_8_bits(everything_streams):
    pipe = tiny_wan_pipeline()
    plan = fit_on_the_cpu(pipe)
    with pytest.raises(trp.PatchError, match=r"before trp\.fit"):
        trp.patch_text_encoder(pipe, in_8_bits=True)
    plan.undo()
    trp.patch_text_encoder(pipe, in_8_bits=True).restore()


@pytest.mark.parametrize(("first", "in_8_bits"), [("fit", False), ("patch", False), ("patch", True)])
def test_a_streaming_encoder_gives_the_same_embeddings(first, in_8_bits, everything_streams, lean):  # noqa: F811
    pipe = tiny_wan_pipeline()
    with trp.patch_text_encoder(pipe, in_8_bits=in_8_bits):
        expected = encoded(pipe, *PROMPTS)
    if first == "patch":
        patch = trp.patch_text_encoder(pipe, in_8_bits=in_8_bits)
    plan = fit_on_the_cpu(pipe)
    if first == "fit":
        patch = trp.patch_text_encoder(pipe)
    lean.clear()
    assert_same(encoded(pipe, *PROMPTS), expected)
    assert lean
    if in_8_bits:
        with pytest.raises(trp.PatchError, match=r"plan\.undo"):
            patch.restore()
        assert_same(encoded(pipe, *PROMPTS), expected)
        plan.undo()
        patch.restore()
    else:
        patch.restore()
        assert_same(encoded(pipe, *PROMPTS), expected)
        plan.undo()
    assert not hooks_of(pipe)
    assert not any(map(hook_on, pipe.text_encoder.modules()))  # no forward is the patch's


def test_an_encoder_that_stays_on_the_gpu_is_patched_and_restored_within_a_plan():
    pipe = tiny_wan_pipeline()
    with trp.patch_text_encoder(pipe, in_8_bits=True):
        expected = encoded(pipe, *PROMPTS)
    before = encoded(pipe, *PROMPTS)
    plan = fit_on_the_cpu(pipe)
    patch = trp.patch_text_encoder(pipe, in_8_bits=True)
    assert_same(encoded(pipe, *PROMPTS), expected)
    patch.restore()
    assert_same(encoded(pipe, *PROMPTS), before)
    plan.undo()
    assert_same(encoded(pipe, *PROMPTS), before)


def test_prompts_that_are_kept_do_not_stream(everything_streams, lean):  # noqa: F811
    pipe = tiny_wan_pipeline()
    trp.patch_text_encoder(pipe, in_8_bits=True, keep_prompts=2)
    fit_on_the_cpu(pipe)
    expected = encoded(pipe, *PROMPTS)
    lean.clear()
    assert_same(encoded(pipe, *PROMPTS), expected)
    assert not lean


def test_the_plan_counts_8_bits_and_says_so(everything_streams):
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16)
    pipe.text_encoder = random_encoder(128, 2).bfloat16()
    before = fit_on_the_cpu(pipe)
    assert "in 8 bits it would be about half" in str(before)
    before.undo()
    patch = trp.patch_text_encoder(pipe, in_8_bits=True)
    after = fit_on_the_cpu(pipe)
    bf16, in_8_bits = (next(c for c in plan.components if c.name == "text_encoder") for plan in (before, after))
    assert 0.5 < in_8_bits.blocks / bf16.blocks < 0.6
    assert in_8_bits.blocks == sum(t.nbytes for t in pipe.text_encoder.encoder.block.parameters())
    assert in_8_bits.originals == sum(linear.numel() * 2 for linear in linear_weights(pipe.text_encoder))
    text = str(after)
    assert "in 8 bits, its blocks stream" in text
    assert "would be about half" not in text
    assert "original weights for restore()" in text
    after.undo()
    patch.restore()


def linear_weights(encoder):
    return [module.weight for module in encoder.modules() if isinstance(module, torch.nn.Linear)]


def test_a_weight_in_the_models_dtype_counts_while_its_linear_runs():
    encoder = random_encoder(128, 2).bfloat16()
    as_it_is = encoder_bytes(encoder, 8)
    with trp.patch_text_encoder(encoder):
        patched = encoder_bytes(encoder, 8)
    with trp.patch_text_encoder(encoder, in_8_bits=True):
        assert encoder_bytes(encoder, 8) - patched == 128 * 320 * 2
    assert patched < as_it_is == encoder_bytes(encoder, 8)
    in_fp16 = encoder.half()  # whose layers run as transformers runs them
    with trp.patch_text_encoder(in_fp16):
        assert encoder_bytes(in_fp16, 8) == as_it_is


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_the_predicted_peak_on_a_gpu(in_8_bits, streams):
    device = torch.device("cuda")
    encoder = random_encoder(1024, 12).bfloat16()
    tokens = torch.randint(3, 256, (1, 512), device=device)
    mask = torch.ones_like(tokens)
    patch = trp.patch_text_encoder(encoder, in_8_bits=in_8_bits)
    with torch.no_grad():
        encoder.to(device)
        expected = encoder(tokens, mask).last_hidden_state
        component = component_of("text_encoder", encoder, trp.Exact())
        encoder.to("cpu")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        if streams:
            stream(encoder, device)
            weights = component.outside + BLOCKS_AT_ONCE * component.largest
        else:
            encoder.to(device)
            weights = component.weights
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            found = encoder(tokens, mask).last_hidden_state
            peak = torch.cuda.max_memory_allocated() - before
        assert torch.equal(found, expected)
    assert peak <= 1.05 * (weights + encoder_bytes(encoder, 512))
    if streams:
        stop_streaming(encoder)
        encoder.to(device)
    patch.restore()
