"""LTX-2: kinds of calls and variants of the model, masks, what the summary says, and its pipelines."""

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoAttnProcessor
from peft import LoraConfig

import turbo_rcm_patch as trp
from scripts.tools.compile_without_gpu import MULTIPROCESSORS, record_launches
from tests.oracle import relative_error
from tests.patching.pairs import output_of
from tests.tiny_families import BATCH, tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import moved
from turbo_rcm_patch.config import FUSION_GROUPS
from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
from turbo_rcm_patch.patching.families.ltx2.sub_layers import SUB_LAYERS
from turbo_rcm_patch.patching.steps.layers import FEW_TOKENS
from turbo_rcm_patch.patching.steps.plan import STATE
from turbo_rcm_patch.patching.weights import quantize_linears
from turbo_rcm_patch.tiers import EXACT, QUANTIZED

SUB_LAYER_NAMES = [f"{stream} {group}" for _, stream, group in SUB_LAYERS]
BETWEEN = ("audio-to-video cross_attention", "video-to-audio cross_attention")
HIDES_SOME = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
HIDES_THREE = torch.tensor([[0, 0, 1, 1, 0, 1, 1]]).repeat(BATCH, 1)
HIDES_NOTHING = torch.ones(BATCH, 7, dtype=torch.long)
WHOLE_STEPS = ("QKV projection", "QK-norm + RoPE", "attention", "projection + skip")

# name: (the model, its options, arguments of the call, what is not fused: {(sub-layer, step): reason})
CALLS = {
    "interleaved RoPE by token": ("ltx2, a timestep per token", {"rope_type": "interleaved"}, {}, {}),
    "gates of two kinds": ("ltx2, a timestep per token", {}, {"use_cross_timestep": True}, {}),
    "streams apart": ("ltx2", {}, {"isolate_modalities": True}, {}),
    "norms with a weight": ("ltx2", {"norm_elementwise_affine": True}, {}, {}),
    "masks that hide nothing": (
        "ltx2",
        {},
        {"encoder_attention_mask": HIDES_NOTHING, "audio_encoder_attention_mask": HIDES_NOTHING},
        {},
    ),
    "masks": (
        "ltx2",
        {},
        {"encoder_attention_mask": HIDES_SOME, "audio_encoder_attention_mask": HIDES_NOTHING},
        {("video-text cross_attention", "attention"): "attention mask"},
    ),
    "masks that hide the same tokens of all samples": (
        "ltx2",
        {},
        {"encoder_attention_mask": HIDES_THREE, "audio_encoder_attention_mask": HIDES_THREE.flip(1)},
        {},
    ),
    "a mask of the video": (
        "ltx2",
        {},
        {"video_self_attention_mask": (torch.arange(18) < 12).float().expand(BATCH, 18, 18)},
        {("video self_attention", "attention"): "attention mask"},
    ),
    "STG of some samples": (
        "ltx2.3",
        {},
        {"spatio_temporal_guidance_blocks": [0, 1, 2], "perturbation_mask": torch.tensor([0.0, 1.0])},
        {(f"{s} self_attention", step): "perturbation mask" for s in ("video", "audio") for step in WHOLE_STEPS},
    ),
    "STG": (
        "ltx2.3",
        {},
        {"spatio_temporal_guidance_blocks": [0, 1, 2]},
        {(f"{s} self_attention", step): "perturbation mask" for s in ("video", "audio") for step in WHOLE_STEPS},
    ),
    "modulation of the video's prompt only": (
        "ltx2.3",
        {"audio_cross_attn_mod": False, "audio_gated_attn": False},
        {},
        {("video-text cross_attention", "prompt modulation"): FEW_TOKENS},
    ),
    "LTX-2.5": (
        "ltx2.3",
        {"ff_bias": False, "use_prompt_adaln_single": False},
        {},
        {("video self_attention", "gates of heads"): "no kernel for gates of heads"},
    ),
    "LTX-2.5's keyframes": (
        "ltx2.3",
        {"ff_bias": False, "use_prompt_adaln_single": False, "use_keyframes_abs_pos_embedding": True},
        {"video_keyframes_mask": (torch.arange(18) < 6).float()[:, None].expand(BATCH, 18, 1)},
        {},
    ),
}


# The kernels are given something else in these than in test_families.py.
WITH_KERNELS = (
    "interleaved RoPE by token",
    "gates of two kinds",
    "norms with a weight",
    "modulation of the video's prompt only",
    "LTX-2.5",
)


@pytest.mark.parametrize(
    ("name", "implementation"), [(name, "triton" if name in WITH_KERNELS else "torch") for name in CALLS]
)
def test_every_kind_of_call_matches_unpatched(name, implementation):
    family, options, given, not_fused = CALLS[name]
    layers = 1 if implementation == "triton" else 2
    model = tiny_family_transformer(family, layers=layers, **options)
    expected = output_of(family, model, **given)
    if given and "nothing" not in name:
        assert relative_error(output_of(family, model), expected) > 1e-4
    with trp.patch(model, trp.Exact(implementation=implementation)) as patch:
        assert relative_error(output_of(family, model, **given), expected) <= EXACT.limits.fp32
        rows = {(row.sub_layer, row.step): row.reasons for row in patch.rows()}
    for step, reason in not_fused.items():
        assert rows[step] == {reason: len(model.transformer_blocks)}
    if implementation == "triton":
        unfused = {step for step, reasons in rows.items() if reasons and "no GPU of sm_90" not in reasons}
        unfused -= {step for step in unfused if "nothing to fuse" in rows[step]}
        expected_by_variant = {"gates of heads", "prompt modulation"} if family == "ltx2.3" else set()
        assert {step for step in unfused if step[1] not in expected_by_variant} == {
            step for step in not_fused if step[1] not in expected_by_variant
        }
    shown = {sub_layer for sub_layer, _ in rows}
    assert shown == set(SUB_LAYER_NAMES) - (set(BETWEEN) if name == "streams apart" else set())


@pytest.mark.parametrize("fuse", [(), *((group,) for group in FUSION_GROUPS)])
@pytest.mark.parametrize("family", ["ltx2", "ltx2.3"])
def test_sub_layers_that_are_not_fused_run_diffusers_code(family, fuse):
    model = tiny_family_transformer(family, layers=2)
    expected = output_of(family, model)
    with trp.patch(model, trp.Exact(fuse=fuse)) as patch:
        assert relative_error(output_of(family, model), expected) <= EXACT.limits.fp32
        asked = {row.sub_layer for row in patch.rows() if "not in fuse" in row.reasons}
    assert asked == {name for name in SUB_LAYER_NAMES if name.split()[-1] not in fuse}


def test_a_mask_is_read_once_until_it_is_written_to(monkeypatch):
    model, mask = tiny_family_transformer("ltx2"), HIDES_NOTHING.clone()
    given = {"encoder_attention_mask": mask, "audio_encoder_attention_mask": mask}
    read, torch_all = [], torch.Tensor.all
    with trp.patch(model) as patch:
        with monkeypatch.context() as watched:
            watched.setattr(torch.Tensor, "all", lambda x, *a: read.append(x.shape) or torch_all(x, *a))
            for _ in range(2):
                output_of("ltx2", model, **given)
            assert read == [mask.shape]
            with torch.inference_mode():
                model(**{**tiny_family_inputs("ltx2", model), "encoder_attention_mask": HIDES_NOTHING.clone()})
            assert read == [mask.shape] * 2
        assert "attention mask" not in patch.summary()
        mask[0, 3:] = 0
        hidden = output_of("ltx2", model, **given)
        assert "attention mask" in patch.summary()
    assert relative_error(hidden, output_of("ltx2", model, **given)) <= EXACT.limits.fp32


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        (HIDES_THREE, [2, 3, 5, 6]),
        (HIDES_NOTHING, list(range(7))),
        (HIDES_SOME, None),  # the samples differ
        (0.5 * HIDES_NOTHING, None),  # neither kept nor hidden
        (0 * HIDES_NOTHING, None),  # attends to all tokens alike
    ],
)
def test_hidden_tokens_never_reach_the_blocks(mask, kept):
    model, seen = tiny_family_transformer("ltx2"), []
    model.transformer_blocks[0].register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    given = {"encoder_attention_mask": mask, "audio_encoder_attention_mask": HIDES_NOTHING}
    expected = output_of("ltx2", model, **given)
    with trp.patch(model):
        assert relative_error(output_of("ltx2", model, **given), expected) <= EXACT.limits.fp32
    whole, ours = seen
    assert whole["encoder_attention_mask"] is not None
    assert (ours["encoder_attention_mask"] is None) == (kept is not None)
    tokens = whole["encoder_hidden_states"]
    assert torch.equal(ours["encoder_hidden_states"], tokens if kept is None else tokens[:, kept])


def test_a_norm_with_a_hook_is_called_once():
    """The attentions between the streams share their norms, whose modulation alone differs."""
    models = [tiny_family_transformer("ltx2") for _ in range(2)]
    outputs, calls = [], []
    for model in models:
        seen = []
        for name in ("audio_to_video_norm", "video_to_audio_norm"):
            module = model.transformer_blocks[0].get_submodule(name)
            module.register_forward_hook(lambda _, args, output, name=name, seen=seen: seen.append(name) or -output)
        patch = trp.patch(model) if model is models[0] else None
        outputs.append(output_of("ltx2", model))
        calls.append(seen)
        if patch is not None:
            summary = patch.summary()
    assert relative_error(*outputs) <= EXACT.limits.fp32
    assert calls[0] == calls[1] == ["audio_to_video_norm", "video_to_audio_norm"]
    assert "torch hook (1)" in summary


class OtherProcessor(LTX2AudioVideoAttnProcessor):
    def __call__(self, *args, **kwargs):
        return -super().__call__(*args, **kwargs)


@pytest.mark.parametrize("path", ["attn1", "audio_attn2", "video_to_audio_attn"])
def test_another_processor_runs(path):
    model = tiny_family_transformer("ltx2")
    model.transformer_blocks[1].get_submodule(path).set_processor(OtherProcessor())
    expected = output_of("ltx2", model)
    assert relative_error(output_of("ltx2", tiny_family_transformer("ltx2")), expected) > 1e-3
    with trp.patch(model) as patch:
        assert relative_error(output_of("ltx2", model), expected) <= EXACT.limits.fp32
        assert "processor OtherProcessor (1)" in patch.summary()


@pytest.mark.parametrize("preset", ["exact", "quantized"])
def test_a_lora_on_both_streams(preset):
    """The linears of a LoRA are read, not called; its scale comes with a call."""
    targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "audio_ff.net.0.proj", "audio_ff.net.2"]
    patched, plain = (tiny_family_transformer("ltx2.3", layers=1) for _ in range(2))
    base = output_of("ltx2.3", plain)
    for model in (patched, plain):
        torch.manual_seed(5)
        model.add_adapter(LoraConfig(r=4, lora_alpha=2, init_lora_weights=False, target_modules=targets))
    with trp.patch(patched, preset) as patch:
        limit = EXACT.limits.fp32 if preset == "exact" else QUANTIZED.limits.step
        for options in ({}, {"attention_kwargs": {"scale": 0.3}}):
            expected = output_of("ltx2.3", plain, **options)
            assert relative_error(expected, base) > 0.01
            assert relative_error(output_of("ltx2.3", patched, **options), expected) <= limit
        fused = {row.sub_layer for row in patch.rows() if "+ LoRA" in row.kernel}
    assert fused == set(SUB_LAYER_NAMES)
    assert STATE not in vars(patched.transformer_blocks[0])


@pytest.mark.parametrize("fuse", [FUSION_GROUPS, ()])
@pytest.mark.parametrize("has_projections", [False, True])
def test_sparse_attention_with_gates_of_heads_and_no_masks(fuse, has_projections):
    options = {"gated_attn": True}
    model = tiny_family_transformer("ltx2", **options)
    expected = output_of("ltx2", model)
    for block in model.transformer_blocks if has_projections else ():
        block.attn1.proj_l = torch.nn.Linear(64, 64)
        torch.nn.init.zeros_(block.attn1.proj_l.weight)
        torch.nn.init.zeros_(block.attn1.proj_l.bias)
    with trp.patch(model, trp.Sparse(topk=1.0, blocks=(16, 8), quantize=(), fuse=fuse)):
        assert relative_error(output_of("ltx2", model), expected) <= 1e-5
        with pytest.raises(ValueError, match="without a mask; for such a call patch with"):
            output_of("ltx2", model, **CALLS["a mask of the video"][2])


def test_only_an_attention_with_more_queries_than_keys_gives_e4m3(monkeypatch):
    """Its values are scaled in passes of their own, which the sound's few queries of the video do not repay."""
    monkeypatch.setattr(quantize_linears, "capability_of", lambda device: (9, 0))
    model = tiny_family_transformer("ltx2", dtype=torch.bfloat16)
    inputs = moved(tiny_family_inputs("ltx2", model), "meta")
    patch = trp.patch(model, trp.Quantized())
    model.to("meta")
    with torch.no_grad(), meta_is_gpu((9, 0), MULTIPROCESSORS):
        record_launches(lambda: model(**inputs), (9, 0))
        rows = {row.sub_layer: row.reasons for row in patch.rows() if row.step == "projection + skip"}
    assert not rows["audio-to-video cross_attention"]
    assert set(rows["video-to-audio cross_attention"]) == {"quantised in a pass of its own"}
