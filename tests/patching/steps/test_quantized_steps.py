"""exact_steps: the op that ran, and the outputs, tell in which steps the self-attention ran exactly."""

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttention

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.patching.launches import around_launches
from tests.patching.tape import graphs_of
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import frames_of, tiny_wan_pipeline
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
from turbo_rcm_patch.patching import use_rcm
from turbo_rcm_patch.patching.families.wan.block import WanCall, decide
from turbo_rcm_patch.patching.families.wan.forward import wan_block
from turbo_rcm_patch.patching.families.wan.sub_layers import QuantizedSelfAttention
from turbo_rcm_patch.patching.steps import attention as layers
from turbo_rcm_patch.patching.steps.plan import Call, Stream, active_backend, state_of

BLOCKS = 2
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SCHEDULERS = {
    "UniPC": lambda: diffusers.UniPCMultistepScheduler(**FLOW),
    "DPM++": lambda: diffusers.DPMSolverMultistepScheduler(**FLOW),
    "Euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
}


def config(exact_steps, **options):
    return trp.Quantized(exact_steps=exact_steps, **options)


@pytest.fixture
def in_8_bits(monkeypatch):
    """Record for each call of a block, in order, whether its self-attention ran in 8 bits."""
    calls = []

    def watch(name, is_quantized):
        def around(launch):
            def counted(q, k, *others):
                # Cross-attention has other numbers of keys and queries. The VAE's attention has one head.
                if is_quantized or (q.shape[1] == k.shape[1] and q.shape[2] > 1):
                    calls.append(is_quantized)
                return launch(q, k, *others)

            return counted

        around_launches(monkeypatch, name, around)

    watch("QUANTIZE_QKV", True)
    watch("ATTENTION", False)
    return calls


def by_step(calls, guided):
    """One answer a step; all blocks and both halves of guidance agree."""
    per_step = BLOCKS * (2 if guided else 1)
    steps = [calls[i : i + per_step] for i in range(0, len(calls), per_step)]
    assert all(len(set(step)) == 1 and len(step) == per_step for step in steps)
    return [step[0] for step in steps]


def generate(pipe, variant="t2v", steps=4, **options):
    return frames_of(pipe, variant, num_inference_steps=steps, **options)


def pipeline(variant="t2v", scheduler=None):
    pipe = tiny_wan_pipeline(variant)
    if scheduler is not None:
        pipe.scheduler = SCHEDULERS[scheduler]()
    return pipe


@pytest.mark.parametrize(
    ("scheduler", "exact_steps", "expected"),
    [
        ("UniPC", (1, 1), [False, True, True, False]),
        ("DPM++", (2, 0), [False, False, True, True]),
        ("Euler", (1, 1), [False, True, True, False]),
        ("Euler", (0, 0), [True] * 4),
    ],
)
def test_the_first_and_last_steps_of_every_generation(scheduler, exact_steps, expected, in_8_bits):
    pipe = pipeline(scheduler=scheduler)
    with trp.patch(pipe, config(exact_steps)):
        for _ in range(2):
            in_8_bits.clear()
            generate(pipe, guidance_scale=4.0)
            assert by_step(in_8_bits, guided=True) == expected


@pytest.mark.parametrize("variant", ["i2v", "ti2v", "wan22"])
def test_other_pipelines(variant, in_8_bits):
    pipe = pipeline(variant)
    with trp.patch(pipe, config((1, 1))):
        generate(pipe, variant, guidance_scale=1.0)
        assert by_step(in_8_bits, guided=False) == [False, True, True, False]


def test_rcm(in_8_bits):
    pipe = pipeline()
    with use_rcm(pipe), trp.patch(pipe, config((0, 1))):
        generate(pipe)
        assert by_step(in_8_bits, guided=False) == [True, True, True, False]


def test_a_generation_from_a_video_that_begins_at_a_later_step(in_8_bits):
    pipe = pipeline("v2v")
    with trp.patch(pipe, config((2, 1))):
        generate(pipe, "v2v", steps=8, strength=0.5, guidance_scale=1.0)
        assert by_step(in_8_bits, guided=False) == [False, False, True, False]


def test_more_exact_steps_than_there_are(in_8_bits):
    pipe = pipeline()
    with trp.patch(pipe, config((9, 9))):
        generate(pipe, guidance_scale=1.0)
        assert by_step(in_8_bits, guided=False) == [False] * 4


def test_a_scheduler_that_is_exchanged(in_8_bits):
    pipe = pipeline()
    with trp.patch(pipe, config((1, 0))):
        for scheduler in SCHEDULERS:
            pipe.scheduler = SCHEDULERS[scheduler]()
            in_8_bits.clear()
            generate(pipe, guidance_scale=1.0, steps=2)
            assert by_step(in_8_bits, guided=False) == [False, True]


def test_outputs_of_exact_steps_are_those_without_8_bit_attention():
    """All steps are exact, or none is."""
    pipe = pipeline()
    outputs = {}
    for name, options in {
        "all exact": {"exact_steps": (4, 0)},
        "linears alone": {"exact_steps": None, "quantize": ("linears",)},
        "none exact": {"exact_steps": (0, 0)},
        "no option": {"exact_steps": None},
        "some exact": {"exact_steps": (1, 1)},
    }.items():
        with trp.patch(pipe, config(**options)):
            outputs[name] = generate(pipe)
    assert torch.equal(outputs["all exact"], outputs["linears alone"])
    assert torch.equal(outputs["none exact"], outputs["no option"])
    assert not torch.equal(outputs["some exact"], outputs["none exact"])
    assert not torch.equal(outputs["some exact"], outputs["all exact"])


def test_exact_steps_with_the_attention_alone_are_exact():
    pipe = pipeline()
    expected = generate(pipe)
    errors = []
    for exact_steps in ((4, 0), (3, 0), (0, 0)):
        with trp.patch(pipe, config(exact_steps, quantize=("attention",))):
            errors.append(relative_error(generate(pipe), expected))
    assert errors[0] <= 1e-5 < errors[1] < errors[2]


@pytest.mark.parametrize(("attention", "kernel"), [("sdpa", "PyTorch SDPA"), ("triton", "portable Triton")])
def test_exact_steps_run_the_attention_that_was_asked_for(attention, kernel):
    """The plan is made for a GPU that is not there."""
    pipe = pipeline()
    trp.patch(pipe, config((1, 0), attention=attention))
    first = pipe.transformer.blocks[0]
    call = Call(
        *(state_of(first).shared.config, torch.device("meta"), torch.bfloat16, None),
        active_backend(),
    )
    pipe.transformer.to("meta")
    with meta_is_gpu((8, 9), 100):
        exact, others = (
            decide(
                wan_block(WanAttention), first, WanCall(call._replace(exactly=exactly), Stream(1, 12), 1, 7)
            ).self_attention
            for exactly in ("exact_steps=(1, 0)", None)
        )
    assert exact.attention.kernel.startswith(kernel)
    assert exact.attention.reason == "exact_steps=(1, 0)"
    assert isinstance(others, QuantizedSelfAttention)
    assert (others.attention.kernel, others.attention.reason) == ("portable Triton int8, e4m3", None)


def test_the_summary_says_which_steps_and_what_the_others_do():
    pipe = pipeline()
    with trp.patch(pipe, config((1, 1))) as patch:
        generate(pipe)
        summary = patch.summary()
        assert "self-attention in the model's dtype in the first 1 and last 1 steps" in summary
        assert "QK-norm + RoPE + 8 bits" in summary
    with trp.patch(pipe, config((0, 0))) as patch:
        assert "in the first" not in patch.summary()


def test_a_scheduler_that_counts_no_steps_makes_all_exact_and_the_summary_says_so(in_8_bits):
    pipe = pipeline()
    call = {}
    pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: call.update(kwargs), with_kwargs=True)
    generate(pipe, guidance_scale=1.0, steps=1)
    pipe.transformer._forward_pre_hooks.clear()
    pipe.scheduler = None
    with trp.patch(pipe, config((0, 0))) as patch, torch.no_grad():
        in_8_bits.clear()
        pipe.transformer(**call)
        assert in_8_bits == [False] * BLOCKS
        assert f"a scheduler that counts no steps ({BLOCKS})" in patch.summary()


def test_a_bare_transformer_is_refused():
    model = tiny_wan_pipeline().transformer
    with pytest.raises(trp.PatchError, match="exact_steps needs a pipeline"):
        trp.patch(model, config((1, 1)))
    assert "forward" not in vars(model.blocks[0])


def test_a_pipeline_whose_frames_are_in_different_steps_is_refused():
    base = tiny_wan_pipeline()
    pipe = diffusers.SkyReelsV2DiffusionForcingPipeline(
        tokenizer=base.tokenizer,
        text_encoder=base.text_encoder,
        transformer=tiny_family_transformer("skyreels"),
        vae=base.vae,
        scheduler=base.scheduler,
    )
    with pytest.raises(trp.PatchError, match="exact_steps does not work with a SkyReelsV2DiffusionForcingPipeline"):
        trp.patch(pipe, config((1, 1)))
    assert not trp.patch(pipe, config(None)).restore()


def test_torch_compile_does_not_see_the_steps_and_runs_all_exactly():
    torch._dynamo.reset()
    pipe = pipeline()
    with trp.patch(pipe, config((2, 0), quantize=("attention",))):
        expected = generate(pipe, guidance_scale=1.0, steps=2)
    with trp.patch(pipe, config((1, 0), quantize=("attention",))):
        pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
        assert relative_error(generate(pipe, guidance_scale=1.0, steps=2), expected) <= 1e-5
        for block in pipe.transformer.blocks:
            block._compiled_call_impl = None


def test_a_graph_for_each_kind_of_step(tape):
    """Tapes stand for CUDA graphs on the CPU. A replay of the wrong kind would give another result."""
    pipe = pipeline()
    with trp.patch(pipe, config((1, 1), cuda_graph="off")):
        expected = generate(pipe, guidance_scale=4.0, steps=6)
    with trp.patch(pipe, config((1, 1), cuda_graph="auto")):
        for _ in range(3):
            assert torch.equal(generate(pipe, guidance_scale=4.0, steps=6), expected)
        graphs = graphs_of(pipe.transformer)
        assert graphs.kept == 2
        assert graphs.replays == 3 * 6 * 2 - 2


def test_a_cross_attention_in_e4m3_over_one_prompt_for_all_samples():
    q, context = torch.randn(2, 5, 2, 64), torch.randn(1, 7, 2, 64)
    result = layers._attention_to_e4m3(kernels.ATTENTION_TO_E4M3.named("torch reference").launch, q, context, context)
    expected = kernels.attention(q, *[context.expand(2, -1, -1, -1)] * 2).flatten(2)
    assert (result.values.shape, result.scale.shape) == ((2, 5, 128), (2, 5))
    assert relative_error(result.dequantize(), expected) < 0.04


def test_a_cross_attention_in_e4m3_over_no_tokens():
    q, context = torch.randn(2, 5, 2, 64), torch.randn(1, 0, 2, 64)
    result = layers._attention_to_e4m3(kernels.ATTENTION_TO_E4M3.named("torch reference").launch, q, context, context)
    assert (result.values.shape, result.scale.shape) == ((2, 5, 128), (2, 5))
    assert not result.dequantize().any()
