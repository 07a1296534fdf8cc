"""The quantized tier's summary against what it launches on GPUs that are not there: kernels, their formats, reasons."""

import copy
from collections import Counter

import pytest
import torch
from peft import LoraConfig

import turbo_rcm_patch as trp
from scripts.tools import compile_without_gpu
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer
from tests.tiny_wan import moved, tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.kernels import FP8, INT8
from turbo_rcm_patch.kernels.dispatch import meta_is_gpu
from turbo_rcm_patch.patching.weights import quantize_linears as quantized_weights
from turbo_rcm_patch.tiers import QUANTIZED

FORMATS = {"int8": INT8, "e4m3": FP8, "fp16": torch.float16}
GLUON_GEMM, GLUON_QKV = "gemm_kernel", "gemm_of_three_kernel"
QUANTIZE_QKV = ("_quantize_q_kernel", "_summarize_kv_kernel", "_reduce_summaries_kernel", "_quantize_kv_kernel")
# By step: the portable kernel and Gluon's of a fused step.
KERNELS = {
    "QKV projection": ("_linear_kernel", GLUON_QKV),
    "Q projection": ("_linear_kernel", GLUON_GEMM),
    "K and V projections": ("_linear_kernel", GLUON_GEMM),
    "image K and V projections": ("_linear_kernel", GLUON_GEMM),
    "projection + skip": ("_linear_skip_kernel", GLUON_GEMM),
    "linear + GELU": ("_linear_gelu_kernel", GLUON_GEMM),
    "linear + skip": ("_linear_skip_kernel", GLUON_GEMM),
}
APART = "quantised in a pass of its own"
DORA = "LoRA layer: DoraLinearVariant"
JOIN = "_join_kernel"  # of an attention whose keys were split among programs
LARGE = {"frames": 13, "height": 60, "width": 80}  # 15600 tokens a sample: Gluon's GEMMs have enough tiles


@pytest.fixture
def converted_for(monkeypatch):
    return lambda capability: monkeypatch.setattr(quantized_weights, "capability_of", lambda device: capability)


def expected_launches(rows):
    """Kernels by name with the formats that they multiply, where the summary names one."""
    launches = Counter()
    for row in rows:
        for kernel in of_step(row):
            launches[kernel] += row.count
    return launches


def of_step(row):
    gluon = row.kernel.startswith("sm_90 Gluon")
    if row.kernel in ("PyTorch module", "PyTorch linear") or row.kernel.startswith("PyTorch SDPA"):
        return []
    if row.step in ("norm", "norm + modulation"):
        return ["_layer_norm_modulate_kernel"]
    if row.step == "QK-norm + RoPE + 8 bits":
        return QUANTIZE_QKV
    if row.step.startswith("QK-norm"):
        return ["_rms_norm_rope_kernel"] * 2
    if row.step in ("attention", "image attention"):
        *_, key, value = row.kernel.replace(",", "").split()
        if key in FORMATS:
            return [("attention_8bit_kernel" if gluon else "_attention_8bit_kernel", FORMATS[key], FORMATS[value])]
        more = ["_rms_norm_rope_kernel", "_skip_kernel"] if row.step == "image attention" else []
        return ["attention_kernel" if gluon else "_attention_kernel", *more]
    if row.kernel.startswith("PyTorch module"):
        return ["_skip_kernel"]
    name, of_gluon = KERNELS[row.step]
    format = FORMATS.get(row.kernel.split()[-1])
    count = 3 if row.step == "QKV projection" and not gluon else 2 if row.step.endswith("K and V projections") else 1
    launched = [of_gluon if gluon else name]
    launched = [(launched[0], format)] if format is not None else launched
    return launched * count + (["_quantize_rows_kernel"] if APART in row.reasons else [])


def launched(launch):
    """Return a kernel's name, with the formats if it multiplies in 8 bits."""
    arguments = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.options
    name = launch.kernel.fn.__name__
    dtype = lambda argument: getattr(arguments[argument], "base", arguments[argument]).dtype  # noqa: E731
    if name in ("attention_8bit_kernel", "_attention_8bit_kernel"):
        return name, dtype("k"), dtype("v")
    multiplies = "a" in arguments and dtype("a") in (INT8, FP8)
    return (name, dtype("a")) if multiplies else name


def check(model, patch, inputs, capability):
    """Compare the launches of a forward on a GPU with the summary after it; returns the rows by sub-layer and step."""
    model.to("meta")
    inputs = moved(inputs, "meta")
    with torch.no_grad(), meta_is_gpu(capability, compile_without_gpu.MULTIPROCESSORS):
        launches = compile_without_gpu.record_launches(lambda: model(**inputs), capability)
        rows = patch.rows()
        assert "portable Triton" in patch.summary() or "sm_90 Gluon" in patch.summary()
    found = Counter(map(launched, launches))
    found.pop(JOIN, None)
    assert found == expected_launches(rows)
    return {(row.sub_layer, row.step): row for row in rows}


def wan(dtype=torch.bfloat16, **options):
    return tiny_wan_transformer(dtype=dtype, heads=4, head_dim=128, ffn_dim=256, rope_max_seq_len=64, **options)


def large(inputs, model, batch=2):
    """The same on meta with the latents, and timesteps per token, of a large video."""
    frames, height, width = LARGE.values()
    inputs["hidden_states"] = torch.empty(
        batch, model.config.in_channels, frames, height, width, dtype=model.dtype, device="meta"
    )
    if inputs["timestep"].ndim == 2:
        inputs["timestep"] = torch.empty(batch, frames * height * width // 4, device="meta")
    return inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_what_is_launched_is_what_the_summary_says(capability, dtype, converted_for):
    converted_for(capability)
    model = wan(dtype)
    patch = trp.patch(model, trp.Quantized())
    rows = check(model, patch, tiny_transformer_inputs(model), capability)
    fp8 = capability >= (8, 9)
    assert rows["self_attention", "attention"].kernel.endswith("int8, e4m3" if fp8 else "int8, fp16")
    assert rows["feed_forward", "linear + skip"].kernel.endswith("e4m3" if fp8 else "int8")
    assert not rows["feed_forward", "linear + GELU"].reasons
    # Nothing is quantised apart if the producer knows each row's largest value, or a bound of it.
    apart = {key for key, row in rows.items() if APART in row.reasons}
    assert ("cross_attention", "K and V projections") in apart
    assert len(apart) == (1 if fp8 else 4)
    assert rows["cross_attention", "attention"].kernel.endswith("e4m3") == fp8


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("converted", [(8, 0), (9, 0)])
def test_large_videos_on_sm_90(converted, dtype, per_token, converted_for):
    """Converted elsewhere all is int8, and a GELU cannot quantise its result."""
    converted_for(converted)
    model = wan(dtype)
    patch = trp.patch(model, trp.Quantized())
    inputs = tiny_transformer_inputs(model)
    if per_token:
        inputs["timestep"] = torch.zeros(2, 18)
    rows = check(model, patch, large(inputs, model), (9, 0))
    gluon = {key for key, row in rows.items() if row.kernel.startswith("sm_90 Gluon ")}
    if dtype == torch.float32:
        fed = {("self_attention", "attention"), ("feed_forward", "linear + GELU")} if converted == (9, 0) else set()
        assert gluon == fed  # what gives e4m3
        assert "float32 result" in rows["feed_forward", "linear + skip"].kernel
    else:
        without = {("self_attention", "projection + skip"), ("feed_forward", "linear + skip")} if per_token else set()
        few_tokens = {("cross_attention", "K and V projections")}
        assert gluon | without | few_tokens >= {(sub_layer, step) for sub_layer, step in rows if step in KERNELS}
        assert not gluon & without


def test_weights_in_a_format_that_the_gpu_lacks_are_dequantised(converted_for):
    """A model that was converted for another GPU has such weights."""
    converted_for((9, 0))
    model = wan()
    patch = trp.patch(model, trp.Quantized())
    rows = check(model, patch, tiny_transformer_inputs(model), (8, 0))
    for step in (("self_attention", "projection + skip"), ("feed_forward", "linear + skip")):
        assert rows[step].reasons == {"fp8 on a GPU older than sm_89": 2}
        assert rows[step].kernel == "PyTorch module, Triton skip"
    assert rows["self_attention", "QKV projection"].kernel == "portable Triton int8"


@pytest.mark.parametrize("options", [{"quantize": ["attention"]}, {"quantize": ["linears"]}])
def test_one_part_alone(options, converted_for):
    converted_for((9, 0))
    model = wan()
    patch = trp.patch(model, trp.Quantized(**options))
    model.to("meta")
    inputs = moved(tiny_transformer_inputs(model), "meta")
    with torch.no_grad(), meta_is_gpu((8, 9), compile_without_gpu.MULTIPROCESSORS):
        launches = compile_without_gpu.record_launches(lambda: model(**inputs), (8, 9))
        rows = {(row.sub_layer, row.step): row for row in patch.rows()}
    names = Counter(launch.kernel.fn.__name__ for launch in launches)
    attention = rows["self_attention", "attention"]
    if options["quantize"] == ["attention"]:
        assert names["_attention_8bit_kernel"] == 2
        assert not any(
            isinstance(launched(launch), tuple) for launch in launches if "linear" in launch.kernel.fn.__name__
        )
        assert not attention.reasons
    else:
        assert names["_attention_8bit_kernel"] == 0
        assert names["_attention_kernel"] == 4
        assert attention.reasons == {"not in quantize": 2}
        assert attention.kernel == "portable Triton"
        # The exact attention gives no 8 bits.
        assert rows["self_attention", "projection + skip"].reasons == {APART: 2}


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_what_another_attention_gives_is_quantised_apart(capability, converted_for):
    """docs/tiers.md says so: always K and V of the prompt, and the cross-attention's result if it is PyTorch's."""
    converted_for(capability)
    model = wan()
    patch = trp.patch(model, trp.Quantized(attention="sdpa"))
    rows = check(model, patch, tiny_transformer_inputs(model), capability)
    apart = {step for step, row in rows.items() if APART in row.reasons}
    assert apart == {("cross_attention", "K and V projections"), ("cross_attention", "projection + skip")}


@pytest.mark.parametrize("name", ["vace", "skyreels", "animate"])
def test_other_families(name, converted_for):
    converted_for((8, 9))
    model = tiny_family_transformer(name, torch.bfloat16)
    patch = trp.patch(model, trp.Quantized())
    model.to("meta")
    inputs = moved(tiny_family_inputs(name, model), "meta")
    with torch.no_grad(), meta_is_gpu((8, 9), compile_without_gpu.MULTIPROCESSORS):
        launches = compile_without_gpu.record_launches(lambda: model(**inputs), (8, 9))
        rows = patch.rows()
    assert Counter(map(launched, launches)) == expected_launches(rows)


def test_lora_and_a_hook_on_some(converted_for):
    converted_for((8, 9))
    model = wan()
    patch = trp.patch(model, trp.Quantized())
    targets = r"blocks\.0\.(attn1\.to_out\.0|ffn\.net\.0\.proj)"
    model.add_adapter(LoraConfig(r=4, target_modules=targets, use_dora=True))
    model.blocks[1].attn1.to_q.register_forward_hook(lambda module, args, output: output)
    model.blocks[1].attn1.norm_k.register_forward_hook(lambda module, args, output: output)
    model.to("meta")
    inputs = moved(tiny_transformer_inputs(model), "meta")
    with torch.no_grad(), meta_is_gpu((8, 9), compile_without_gpu.MULTIPROCESSORS):
        names = Counter(
            launch.kernel.fn.__name__ for launch in compile_without_gpu.record_launches(lambda: model(**inputs), (8, 9))
        )
        rows = {(row.sub_layer, row.step): row for row in patch.rows()}
    assert rows["self_attention", "projection + skip"].reasons == {DORA: 1, APART: 1}
    assert rows["feed_forward", "linear + GELU"].reasons == {DORA: 1}
    assert rows["self_attention", "QKV projection"].reasons == {"torch hook": 1}
    assert rows["self_attention", "attention"].reasons == {"torch hook": 1}
    assert names["_attention_8bit_kernel"] == 1
    assert names["_linear_gelu_kernel"] == 1


@pytest.mark.parametrize("residual", ["fp16", "same"])
def test_lora_beside_a_gate_on_sm_90(residual, converted_for):
    """There the kernel does not take fp16 residuals, so that a block whose gated linears have a LoRA keeps none."""
    converted_for((9, 0))
    model = wan()
    patch = trp.patch(model, trp.Quantized(residual=residual))
    model.add_adapter(LoraConfig(r=4, target_modules=r"blocks\.0\.(attn1\.to_out\.0|ffn\.net\.2)"))
    model.to("meta")
    inputs = moved(tiny_transformer_inputs(model), "meta")
    for switch in (model.enable_lora, model.disable_lora, model.enable_lora):
        switch()
        with torch.no_grad(), meta_is_gpu((9, 0), compile_without_gpu.MULTIPROCESSORS):
            launches = compile_without_gpu.record_launches(lambda: model(**large(inputs, model)), (9, 0))
            rows = {(row.sub_layer, row.step): row.kernel for row in patch.rows()}
            summary = patch.summary()
        assert not any(launch.kernel.fn.__name__ == "_linear_skip_kernel" for launch in launches)
        with_lora = "" if switch == model.disable_lora else "sm_90 Gluon e4m3 + LoRA; "
        for step in (("self_attention", "projection + skip"), ("feed_forward", "linear + skip")):
            assert rows[step] == f"{with_lora}sm_90 Gluon e4m3"
        assert rows["cross_attention", "projection + skip"] == "sm_90 Gluon e4m3"
        held, lora = "float16, divided by 32", "bfloat16 (for LoRA's kernel on sm_90)"
        stored = "bfloat16" if residual == "same" else f"{lora}; {held}" if with_lora else held
        assert f"residual between a block's skips: {stored}\n" in summary


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)])
def test_a_residual_in_fp16_where_a_lora_loses_nothing_by_it(capability, converted_for):
    """This is so where no kernel for sm_90 exists, or where it does not take so few tokens."""
    converted_for(capability)
    model = wan(layers=1)
    patch = trp.patch(model, trp.Quantized())
    model.add_adapter(LoraConfig(r=4, target_modules=["to_out.0", "ffn.net.2"]))
    model.to("meta")
    inputs = moved(tiny_transformer_inputs(model), "meta")
    with torch.no_grad(), meta_is_gpu(capability, compile_without_gpu.MULTIPROCESSORS):
        compile_without_gpu.record_launches(lambda: model(**inputs), capability)
        assert "residual between a block's skips: float16, divided by 32\n" in patch.summary()


def test_a_linear_without_a_bias_beside_others():
    """Its projections run one by one."""
    model = tiny_wan_transformer()
    plain = copy.deepcopy(model)
    patch = trp.patch(model, trp.Quantized(quantize=["linears"]))
    for each in (model, plain):
        each.blocks[0].attn1.to_v.bias = None
    with torch.no_grad():
        ours, theirs = (each(**tiny_transformer_inputs(each))[0] for each in (model, plain))
    assert (ours - theirs).norm() <= QUANTIZED.limits.step * theirs.norm()
    row = next(row for row in patch.rows() if row.step == "QKV projection")
    assert row.reasons == {"unequal projections": 1, "cpu tensors": 1}
