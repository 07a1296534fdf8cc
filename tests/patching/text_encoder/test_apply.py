"""patch_text_encoder: exact undo, copies, kept prompts, bad input."""

import copy
import pickle
from unittest import mock

import accelerate
import pytest
import torch
from diffusers.hooks import apply_group_offloading

import turbo_rcm_patch as trp
from tests.patching.text_encoder.test_forward import LONG, SHORT, assert_same, encoded
from tests.tiny_wan import FRAMES, HEIGHT, WIDTH, tiny_wan_pipeline
from turbo_rcm_patch.patching.text_encoder import apply, forward
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.patching.weights.weight_only import WeightOnlyLinear


def attributes(encoder):
    return [(type(m), sorted(vars(m)), {name: id(p) for name, p in m._parameters.items()}) for m in encoder.modules()]


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_restore_puts_everything_back(in_8_bits):
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16)
    encoder = pipe.text_encoder
    before, values = attributes(encoder), {name: p.clone() for name, p in encoder.named_parameters()}
    patch = trp.patch_text_encoder(pipe, in_8_bits=in_8_bits, keep_prompts=1)
    assert attributes(encoder) != before
    assert ("linears in 8 bits" in str(patch)) == in_8_bits
    assert encoded(pipe, SHORT)[0].dtype == torch.bfloat16
    patch.restore()
    assert attributes(encoder) == before
    assert all(torch.equal(p, values[name]) for name, p in encoder.named_parameters())
    assert not patch.active
    with pytest.raises(trp.PatchError, match="restored already"):
        patch.restore()


def test_every_linear_is_stored_in_8_bits_and_reads_as_the_original():
    encoder = tiny_wan_pipeline().text_encoder
    names, expected = list(encoder.state_dict()), {k: v.clone() for k, v in encoder.state_dict().items()}
    trp.patch_text_encoder(encoder, in_8_bits=True)
    linears = [m for m in encoder.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 2 * 7
    assert {type(linear) for linear in linears} == {WeightOnlyLinear}
    assert list(encoder.state_dict()) == names
    assert all(torch.equal(value, expected[name]) for name, value in encoder.state_dict().items())
    with pytest.raises(RuntimeError, match="read-only"):
        encoder.load_state_dict(expected)
    with pytest.raises(RuntimeError, match="read-only"):
        linears[0].weight.zero_()


def test_freed_originals_cannot_be_restored_but_are_forgotten():
    pipe = tiny_wan_pipeline()
    patch = trp.patch_text_encoder(pipe, in_8_bits=True, restorable=False)
    assert all(linear.is_freed for linear in quantized_linears(pipe.text_encoder))
    expected = encoded(pipe, SHORT)
    with pytest.raises(trp.PatchError, match="were freed"):
        patch.restore()
    assert_same(encoded(pipe, SHORT), expected)


def test_a_copy_and_a_pickle_run_on_themselves():
    pipe = tiny_wan_pipeline()
    patch = trp.patch_text_encoder(pipe, in_8_bits=True, keep_prompts=1)
    expected = encoded(pipe, SHORT)
    for made in (copy.deepcopy, lambda encoder: pickle.loads(pickle.dumps(encoder))):
        twin = tiny_wan_pipeline()
        twin.text_encoder = made(pipe.text_encoder)
        assert all(m.forward.__self__ is m for m in twin.text_encoder.modules())
        assert_same(encoded(twin, SHORT), expected)
        with pytest.raises(trp.PatchError, match="patched already"):
            trp.patch_text_encoder(twin)
    patch.restore()
    assert_same(encoded(twin, SHORT), expected)  # the copy stays patched


def test_a_failure_puts_everything_back():
    encoder = tiny_wan_pipeline().text_encoder
    before, calls = attributes(encoder), []

    def fail_late(weight, device):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("no memory")
        return convert(weight, device)

    convert = apply.convert_in_groups
    with mock.patch.object(apply, "convert_in_groups", fail_late), pytest.raises(RuntimeError, match="no memory"):
        trp.patch_text_encoder(encoder, in_8_bits=True, restorable=False)
    assert attributes(encoder) == before


@pytest.fixture
def encodings(monkeypatch):
    seen, run = [], forward._attend
    monkeypatch.setattr(forward, "_attend", lambda *arguments: seen.append(1) or run(*arguments))
    return seen


def test_prompts_are_kept_only_if_asked(encodings):
    pipe = tiny_wan_pipeline()
    with trp.patch_text_encoder(pipe):
        encoded(pipe, SHORT)
        once = len(encodings)
        encoded(pipe, SHORT)
        assert len(encodings) == 2 * once
    with trp.patch_text_encoder(pipe, keep_prompts=2) as patch:
        expected = encoded(pipe, SHORT, "ugly")
        assert len(encodings) == 4 * once
        encoded(pipe, SHORT, "ugly")[0].zero_()  # what the caller does with a result changes none that is kept
        for options in ({}, {"num_videos_per_prompt": 2}, {"max_sequence_length": 40}, {"dtype": torch.float64}):
            rows = encoded(pipe, SHORT, "ugly", **options)[0][:1]
            assert_same([rows[:, :40].float()], [expected[0][:, :40]])
        assert len(encodings) == 4 * once
        assert patch.kept_prompts == 2
        encoded(pipe, LONG)
        assert patch.kept_prompts == 2
        encoded(pipe, SHORT)  # was dropped
        assert len(encodings) == 6 * once
        patch.forget_prompts()
        assert patch.kept_prompts == 0
    assert_same(encoded(pipe, SHORT, "ugly"), expected)


def test_prompts_with_the_same_tokens_and_other_padding_differ(encodings):
    encoder = tiny_wan_pipeline().text_encoder
    trp.patch_text_encoder(encoder, keep_prompts=4)
    tokens = torch.randint(3, 200, (1, 6))
    with torch.no_grad():
        results = [encoder(tokens, (torch.arange(6) < n).long()[None]).last_hidden_state for n in (4, 6, 4)]
    assert torch.equal(results[0], results[2])
    assert (results[0] - results[1]).norm() > 1e-2
    assert len(encodings) == 2 * 2


@pytest.mark.parametrize("write", ["in place", "load_state_dict", "to"])
def test_kept_prompts_do_not_outlive_a_change_of_the_weights(write):
    pipe = tiny_wan_pipeline()
    trp.patch_text_encoder(pipe, keep_prompts=1)
    before = encoded(pipe, SHORT)[0]
    encoder = pipe.text_encoder
    if write == "in place":
        with torch.no_grad():
            encoder.encoder.final_layer_norm.weight.mul_(2)
    elif write == "load_state_dict":
        encoder.load_state_dict({name: 2 * value for name, value in encoder.state_dict().items()})
    else:
        encoder.to(torch.bfloat16)
    after = encoded(pipe, SHORT)[0]
    assert after.dtype == encoder.dtype
    assert not torch.equal(after.float(), before)


def test_under_autograd_the_derivative_of_a_kept_prompt_reaches_the_weights():
    encoder = tiny_wan_pipeline().text_encoder
    tokens, mask = torch.randint(3, 200, (1, 5)), torch.ones(1, 5, dtype=torch.long)
    patch = trp.patch_text_encoder(encoder, keep_prompts=2)
    with torch.no_grad():
        encoder(tokens, mask)
    assert encoder(tokens, mask).last_hidden_state.requires_grad
    assert patch.kept_prompts == 1
    encoder.requires_grad_(False)
    assert not encoder(tokens, mask).last_hidden_state.requires_grad
    assert vars(encoder)[forward.KEPT].hits == 1


def test_embeddings_with_the_derivative_of_a_hook_are_not_kept():
    encoder, added = tiny_wan_pipeline().text_encoder.requires_grad_(False), torch.zeros(1, requires_grad=True)
    encoder.encoder.block[1].register_forward_hook(lambda module, args, output: output + added)
    tokens, mask = torch.randint(3, 200, (1, 5)), torch.ones(1, 5, dtype=torch.long)
    patch = trp.patch_text_encoder(encoder, keep_prompts=2)
    for _ in range(2):
        encoder(tokens, mask).last_hidden_state.sum().backward()
    assert patch.kept_prompts == 0


def test_kept_prompts_outlive_a_move_of_the_weights(encodings):
    """Offloading moves weights between devices so."""
    pipe = tiny_wan_pipeline()
    trp.patch_text_encoder(pipe, keep_prompts=1)
    encoded(pipe, SHORT)
    once = len(encodings)
    for parameter in pipe.text_encoder.parameters():
        parameter.data = parameter.data.clone()
    encoded(pipe, SHORT)
    assert len(encodings) == once


def test_a_stack_of_another_class_runs_as_it_is():
    encoder = tiny_wan_pipeline().text_encoder
    encoder.encoder = torch.nn.Sequential(encoder.encoder)
    assert "run as transformers runs them: layers of another class" in str(trp.patch_text_encoder(encoder))


def test_a_whole_generation():
    pipe = tiny_wan_pipeline()

    def video():
        generator = torch.Generator().manual_seed(0)
        size = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES}
        return pipe(SHORT, **size, num_inference_steps=2, output_type="np", generator=generator).frames

    expected = video()
    trp.patch(pipe)
    trp.patch_text_encoder(pipe, keep_prompts=2)
    assert abs(video() - expected).max() < 1e-4
    assert abs(video() - expected).max() < 1e-4


BAD = {
    "a CLIP": (lambda: tiny_wan_pipeline("i2v").image_encoder, {}, trp.PatchError, "found a CLIPVisionModel"),
    "none": (lambda: torch.nn.Module(), {}, trp.PatchError, "found a Module"),
    "no encoder": (object, {}, trp.PatchError, "found no text encoder"),
    "compiled": (lambda: torch.compile(tiny_wan_pipeline().text_encoder), {}, trp.PatchError, "before torch.compile"),
    "negative": (tiny_wan_pipeline, {"keep_prompts": -1}, ValueError, "0 or more"),
    "true": (tiny_wan_pipeline, {"keep_prompts": True}, ValueError, "0 or more"),
}


@pytest.mark.parametrize(("target", "options", "error", "match"), BAD.values(), ids=BAD)
def test_bad_input(target, options, error, match):
    with pytest.raises(error, match=match):
        trp.patch_text_encoder(target(), **options)


OFFLOADING = {
    "whole": lambda encoder: accelerate.cpu_offload_with_hook(encoder, "cpu"),
    "sequential": lambda encoder: accelerate.cpu_offload(encoder, "cpu"),
    "leaves": lambda encoder: apply_group_offloading(encoder, torch.device("cpu"), offload_type="leaf_level"),
}


@pytest.mark.parametrize("offload", OFFLOADING.values(), ids=OFFLOADING)
def test_others_offloading_takes_weights_in_8_bits(offload):
    pipe = tiny_wan_pipeline()
    patch = trp.patch_text_encoder(pipe, in_8_bits=True)
    expected = encoded(pipe, SHORT)
    offload(pipe.text_encoder)
    assert_same(encoded(pipe, SHORT, device=torch.device("cpu")), expected)
    with pytest.raises(trp.PatchError, match="offloaded or hooked"):
        patch.restore()


def test_offloaded_weights_are_not_stored_in_8_bits():
    pipe = tiny_wan_pipeline()
    encoder = pipe.text_encoder
    encoder.encoder.block[0].register_forward_hook(lambda *_: None)
    with pytest.raises(trp.PatchError, match="offloaded or hooked"):
        trp.patch_text_encoder(pipe, in_8_bits=True)
    trp.patch_text_encoder(pipe).restore()


def test_a_replaced_forward_is_not_dropped():
    pipe = tiny_wan_pipeline()
    patch = trp.patch_text_encoder(pipe)
    ours = pipe.text_encoder.forward
    pipe.text_encoder.forward = lambda *arguments, **options: ours(*arguments, **options)
    with pytest.raises(trp.PatchError, match="was replaced after the patch"):
        patch.restore()
    assert patch.active
