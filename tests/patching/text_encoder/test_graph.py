"""The encoder as CUDA graphs: a replay gives the result of the encoder as it is now."""

import copy

import pytest
import torch

import turbo_rcm_patch as trp
from tests.patching.text_encoder.test_forward import LONG, SHORT, assert_same, encoded
from tests.tiny_wan import tiny_wan_pipeline
from turbo_rcm_patch.memory.choose import AROUND
from turbo_rcm_patch.memory.stages import encoder_bytes
from turbo_rcm_patch.patching.text_encoder.forward import GRAPHS

LONGER = 3 * LONG


def graphs_of(pipe):
    return vars(pipe.text_encoder)[GRAPHS]._graphs


@pytest.fixture
def pipe(tape):
    return tiny_wan_pipeline()


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_prompts_of_a_length_share_a_graph(pipe, in_8_bits):
    prompts = [SHORT, "a dog", LONG, [SHORT, LONG], "in the sea", LONGER, LONGER]
    with trp.patch_text_encoder(pipe, in_8_bits=in_8_bits):
        expected = [encoded(pipe, prompt, max_sequence_length=256) for prompt in prompts]
    patch = trp.patch_text_encoder(pipe, in_8_bits=in_8_bits, cuda_graph=True)
    for prompt, result in zip(prompts, expected, strict=True):
        assert_same(encoded(pipe, prompt, max_sequence_length=256), result)
    assert graphs_of(pipe).replays == 4  # of 64 tokens three, of 192 one; the batch came once
    assert "CUDA graphs: 2 kept in 3 MiB; 4 calls replayed; run without: not recorded yet (3)" in str(patch)
    patch.restore()
    assert GRAPHS not in vars(pipe.text_encoder)


def recorded(pipe):
    trp.patch_text_encoder(pipe, cuda_graph=True)
    for _ in range(3):
        encoded(pipe, SHORT)
    assert graphs_of(pipe).replays == 2


def change_weights(pipe):
    with torch.no_grad():
        for parameter in pipe.text_encoder.parameters():
            parameter.mul_(1.5)


def add_hook(pipe):
    pipe.text_encoder.encoder.block[1].register_forward_hook(lambda module, args, output: output * 2)


def replace_weight(pipe):
    linear = pipe.text_encoder.encoder.block[0].layer[1].DenseReluDense.wo
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 3)


CHANGES = {
    "values": (change_weights, True),
    "dtype": (lambda pipe: pipe.text_encoder.double(), False),
    "hook": (add_hook, False),
    "weight": (replace_weight, True),
    "norm": (lambda pipe: setattr(pipe.text_encoder.encoder.final_layer_norm, "variance_epsilon", 0.5), True),
    "streaming": (lambda pipe: trp.fit(pipe, "10 GB", height=32, width=48, num_frames=5, device="cpu"), True),
}


@pytest.mark.parametrize(("change", "replayed"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_encoder_counts(pipe, change, replayed):
    recorded(pipe)
    change(pipe)
    before = graphs_of(pipe).replays
    found = [encoded(pipe, SHORT, dtype=torch.float32) for _ in range(3)]
    assert (graphs_of(pipe).replays > before) == replayed
    twin = copy.deepcopy(pipe.text_encoder)
    vars(twin)[GRAPHS] = None
    pipe.text_encoder = twin
    expected = encoded(pipe, SHORT, dtype=torch.float32)
    for each in found:
        assert_same(each, expected)


def test_under_autograd_nothing_is_recorded(pipe):
    recorded(pipe)
    pipe.encode_prompt(SHORT, max_sequence_length=96, do_classifier_free_guidance=False)[0].sum().backward()
    assert pipe.text_encoder.shared.weight.grad is not None
    assert graphs_of(pipe).eager["autograd"] == 1


def test_a_copy_has_graphs_of_its_own(pipe):
    recorded(pipe)
    twin = tiny_wan_pipeline()
    twin.text_encoder = copy.deepcopy(pipe.text_encoder)
    assert graphs_of(twin).kept == 0
    change_weights(twin)
    found = [encoded(twin, SHORT) for _ in range(3)]
    assert graphs_of(twin).replays == 2
    assert_same(found[2], found[0])
    assert (found[0][0] - encoded(pipe, SHORT)[0]).norm() > 1e-2


def test_the_plan_counts_the_memory_of_graphs(pipe):
    def peaks():
        plan = trp.fit(pipe, "10 GB", height=32, width=48, num_frames=5, device="cpu")
        plan.undo()
        return plan.peaks

    with trp.patch_text_encoder(pipe):
        before = peaks()
    trp.patch_text_encoder(pipe, cuda_graph=True)
    held = AROUND * encoder_bytes(pipe.text_encoder, 512)
    for stage, peak in peaks().items():
        assert peak - before[stage] == pytest.approx(held, abs=2)


@pytest.mark.gpu
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_on_a_gpu(in_8_bits):
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16).to("cuda")
    prompts = [SHORT, "a dog", [SHORT, LONG], LONGER, "in the sea", LONGER, [LONG, SHORT], SHORT]
    with trp.patch_text_encoder(pipe, in_8_bits=in_8_bits):
        expected = [encoded(pipe, prompt, max_sequence_length=512) for prompt in prompts]
    with trp.patch_text_encoder(pipe, in_8_bits=in_8_bits, cuda_graph=True):
        for prompt, (result,) in zip(prompts, expected, strict=True):
            (found,) = encoded(pipe, prompt, max_sequence_length=512)
            assert (found.float() - result.float()).norm() < 0.02 * result.float().norm()
        assert graphs_of(pipe).replays == 5
        assert graphs_of(pipe).failure is None
