"""The patched encoder against transformers' own, on the CPU in fp32."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils._python_dispatch import TorchDispatchMode

import turbo_rcm_patch as trp
from tests.tiny_wan import tiny_wan_pipeline
from tests.umt5 import random_encoder
from turbo_rcm_patch.patching.text_encoder import forward
from turbo_rcm_patch.patching.text_encoder.forward import lengths_of, why_not_lean

SHORT, LONG = "a fox", "a red fox runs through deep snow at dawn, seen from far away"


def encoded(pipe, prompt, negative=None, **options):
    options = {"max_sequence_length": 96, "do_classifier_free_guidance": negative is not None, **options}
    with torch.no_grad():
        return [e for e in pipe.encode_prompt(prompt, negative, **options) if isinstance(e, torch.Tensor)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def lean(monkeypatch):
    """The numbers of tokens of the batches that run without transformers' layers."""
    seen, run = [], forward._attend

    def attend(attention, x, mask, buckets):
        seen.append((x.shape[1], mask is not None))
        return run(attention, x, mask, buckets)

    monkeypatch.setattr(forward, "_attend", attend)
    return seen


@pytest.mark.parametrize("prompts", [(SHORT, ""), ([SHORT, LONG], ["", "ugly"]), (LONG, None)], ids=str)
def test_the_pipeline_gets_the_same_embeddings(prompts, lean):
    pipe = tiny_wan_pipeline()
    expected = encoded(pipe, *prompts, num_videos_per_prompt=2)
    assert not lean
    with trp.patch_text_encoder(pipe):
        assert_same(encoded(pipe, *prompts, num_videos_per_prompt=2), expected)
    assert lean
    assert all(tokens < 96 for tokens, _ in lean)
    assert any(masked for _, masked in lean) == isinstance(prompts[0], list)


def test_lengths_are_found_with_another_default_device():
    ids, mask = torch.zeros(2, 3), torch.tensor([[1, 0, 0], [1, 1, 0]])
    with torch.device("meta"):
        assert lengths_of(ids, mask) == [1, 2]


@pytest.mark.parametrize("variant", ["i2v", "v2v", "wan22", "ti2v"])
def test_every_pipeline_gets_the_same_embeddings(variant, lean):
    pipe = tiny_wan_pipeline(variant)
    expected = encoded(pipe, SHORT, "ugly")
    with trp.patch_text_encoder(pipe):
        assert_same(encoded(pipe, SHORT, "ugly"), expected)
    assert lean


def test_a_prompt_that_fills_all_tokens(lean):
    pipe = tiny_wan_pipeline()
    expected = encoded(pipe, LONG, max_sequence_length=8)
    with trp.patch_text_encoder(pipe):
        assert_same(encoded(pipe, LONG, max_sequence_length=8), expected)
    assert lean == [(8, False)] * 2


def test_results_at_padding_are_0():
    pipe = tiny_wan_pipeline()
    tokens = torch.randint(3, 200, (2, 9))
    mask = (torch.arange(9) < torch.tensor([[4], [7]])).long()
    with torch.no_grad():
        expected = pipe.text_encoder(tokens, mask).last_hidden_state
        with trp.patch_text_encoder(pipe):
            found = pipe.text_encoder(tokens, mask).last_hidden_state
    torch.testing.assert_close(found, expected * mask[..., None], rtol=1e-4, atol=1e-5)


MASKS = {"before": [[0, 0, 1, 1, 1]], "between": [[1, 0, 1, 1, 0]], "nothing": [[0, 0, 0, 0, 0]]}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_other_padding_is_left_to_transformers(mask):
    encoder = tiny_wan_pipeline().text_encoder
    tokens, mask = torch.randint(3, 200, (1, 5)), torch.tensor(mask)
    with torch.no_grad():
        expected = encoder(tokens, mask).last_hidden_state
        with trp.patch_text_encoder(encoder):
            torch.testing.assert_close(encoder(tokens, mask).last_hidden_state, expected, rtol=1e-4, atol=1e-5)


def add_hook(encoder):
    encoder.encoder.block[0].layer[1].DenseReluDense.register_forward_hook(lambda module, args, output: output * 2)


def replace_norm(encoder):
    encoder.encoder.final_layer_norm.forward = lambda x: x


def ask_for_hidden_states(encoder):
    encoder.encoder.config = copy.copy(encoder.encoder.config)  # other tests' encoders share it
    encoder.encoder.config.output_hidden_states = True


CHANGES = {
    "training": lambda encoder: encoder.train(),
    "fp16": lambda encoder: encoder.half(),
    "a hook": add_hook,
    "a replaced norm": replace_norm,
    "all hidden states": ask_for_hidden_states,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_encoder_with_other_parts_runs_as_transformers_runs_it(change, lean):
    encoder = tiny_wan_pipeline().text_encoder
    tokens = torch.randint(3, 200, (1, 9))
    mask = (torch.arange(9) < 5).long()[None]
    trp.patch_text_encoder(encoder)
    assert why_not_lean(encoder.encoder) is None
    change(encoder)
    assert why_not_lean(encoder.encoder) is not None
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)  # of the dropout in training
        found = encoder(tokens, mask).last_hidden_state
        torch.manual_seed(0)
        expected = type(encoder).forward(encoder, tokens, mask).last_hidden_state
    assert not lean
    torch.testing.assert_close(found[:, :5], expected[:, :5], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_linears_that_transformers_keeps_in_fp32(in_8_bits, lean):
    encoder = tiny_wan_pipeline(dtype=torch.bfloat16).text_encoder
    for block in encoder.encoder.block:
        block.layer[1].DenseReluDense.wo.float()
    tokens, mask = torch.randint(3, 200, (1, 9)), torch.ones(1, 9, dtype=torch.long)
    with torch.no_grad():
        expected = encoder(tokens, mask).last_hidden_state
        patch = trp.patch_text_encoder(encoder, in_8_bits=in_8_bits)
        found = encoder(tokens, mask).last_hidden_state
    assert not lean
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() <= (0.05 * expected.norm() if in_8_bits else 0)
    assert "its layers run as transformers runs them: weights of several dtypes" in str(patch)
    patch.restore()
    encoder.bfloat16()
    assert "as transformers runs them" not in str(trp.patch_text_encoder(encoder))


class Int8Linear(torch.nn.Module):
    """A linear of another library."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().amax() / 127
        self.weight = torch.nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight * self.scale)


class PackedLinear(torch.nn.Module):
    """A linear whose weight is a method, as PyTorch's dynamic quantisation has it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def weight(self):
        return self.linear.weight

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("linear", [Int8Linear, PackedLinear])
def test_linears_of_others(linear, lean):
    encoder = tiny_wan_pipeline().text_encoder
    for block in encoder.encoder.block:
        block.layer[1].DenseReluDense.wo = linear(block.layer[1].DenseReluDense.wo)
    tokens, mask = torch.randint(3, 200, (1, 9)), torch.ones(1, 9, dtype=torch.long)
    with torch.no_grad():
        expected = encoder(tokens, mask).last_hidden_state
        trp.patch_text_encoder(encoder)
        torch.testing.assert_close(encoder(tokens, mask).last_hidden_state, expected, rtol=1e-4, atol=1e-5)
    assert lean


def test_other_outputs_and_tuples(lean):
    encoder = tiny_wan_pipeline().text_encoder
    tokens, mask = torch.randint(3, 200, (1, 5)), torch.ones(1, 5, dtype=torch.long)
    trp.patch_text_encoder(encoder)
    with torch.no_grad():
        assert len(encoder(tokens, mask, output_hidden_states=True).hidden_states) == 3
        encoder.config.output_hidden_states = encoder.encoder.config.output_hidden_states = True
        assert len(encoder(tokens, mask).hidden_states) == 3
        encoder.config.output_hidden_states = encoder.encoder.config.output_hidden_states = False
        assert not lean
        assert isinstance(encoder(tokens, mask, return_dict=False), tuple)
        given = encoder(inputs_embeds=encoder.shared(tokens), attention_mask=mask).last_hidden_state
        torch.testing.assert_close(given, encoder(tokens, mask).last_hidden_state, rtol=1e-4, atol=1e-5)


def test_derivatives_reach_the_weights():
    encoder = tiny_wan_pipeline().text_encoder
    tokens, mask = torch.randint(3, 200, (1, 5)), torch.ones(1, 5, dtype=torch.long)
    weight = encoder.encoder.block[0].layer[0].SelfAttention.q.weight
    gradients = []
    for count in (0, 1):
        if count:
            patch = trp.patch_text_encoder(encoder, keep_prompts=2)
        encoder(tokens, mask).last_hidden_state.square().sum().backward()
        gradients.append(weight.grad)
        weight.grad = None
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    assert patch.kept_prompts == 0  # results with a derivative are not kept


def test_pytorch_tries_memory_efficient_attention_first(monkeypatch):
    pipe, first = tiny_wan_pipeline(), set()
    run = forward._attend

    def attend(*arguments):
        first.add(_cur_sdpa_kernel_backends(with_priority=True)[0])
        return run(*arguments)

    monkeypatch.setattr(forward, "_attend", attend)
    with trp.patch_text_encoder(pipe):
        encoded(pipe, SHORT)
    assert first == {SDPBackend.EFFICIENT_ATTENTION}


class Launches(TorchDispatchMode):
    """Counts the ops that compute something."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        makes_views = op.name().endswith("view") or any(result.alias_info for result in op._schema.returns)
        self.count += not makes_views
        return op(*args, **(kwargs or {}))


def test_launches_are_half_of_transformers():
    """On a GPU they are a third, because an RMSNorm is one kernel there."""
    encoder = random_encoder(64, 12).bfloat16()
    tokens, mask, counts = torch.randint(3, 200, (1, 9)), (torch.arange(9) < 5).long()[None], []
    for patched in (False, True):
        if patched:
            trp.patch_text_encoder(encoder)
        with torch.no_grad(), Launches() as launches:
            encoder.encoder(tokens, mask)
        counts.append(launches.count)
    assert counts[1] < 0.6 * counts[0]


@pytest.mark.gpu
def test_launches_are_a_third_of_transformers_on_a_gpu():
    encoder = random_encoder(256, 24).bfloat16().cuda()
    tokens, counts = torch.randint(3, 200, (1, 512), device="cuda"), []
    mask = (torch.arange(512, device="cuda") < 80).long()[None]
    for patched in (False, True):
        if patched:
            trp.patch_text_encoder(encoder)
        with torch.no_grad():
            encoder(tokens, mask)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                encoder(tokens, mask)
                torch.cuda.synchronize()
        counts.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()))
    print(counts)
    assert 100 < counts[1] < 0.4 * counts[0]


@pytest.mark.gpu
@pytest.mark.parametrize("in_8_bits", [False, True])
def test_on_a_gpu(in_8_bits, lean):
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16).to("cuda")
    expected = [e.float() for e in encoded(pipe, [SHORT, LONG], ["", "ugly"])]
    with trp.patch_text_encoder(pipe, in_8_bits=in_8_bits):
        found = encoded(pipe, [SHORT, LONG], ["", "ugly"])
    assert lean
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs).norm() < (0.05 if in_8_bits else 0.02) * theirs.norm()
