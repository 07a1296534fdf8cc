"""Files in 8 bits with scales, in the naming of ComfyUI and Kijai: their values run as they are."""

import json

import pytest
import torch
from safetensors.torch import save_file

import turbo_rcm_patch as trp
from tests.official_names import as_bytes, official_state_dict, with_scales, without_scales
from tests.oracle import relative_error
from tests.patching.quantized_models import ERROR, add_lora
from tests.patching.turbowan import literal, run
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import output_of, tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.patching.families.wan.names import WAN_NAMES
from turbo_rcm_patch.patching.weights import turbodiffusion
from turbo_rcm_patch.patching.weights.linear_8bit import AT_ONCE
from turbo_rcm_patch.patching.weights.quantize_linears import quantized_linears
from turbo_rcm_patch.patching.weights.store import convert_model
from turbo_rcm_patch.tiers import QUANTIZED

SIZE = {"heads": 4, "ffn_dim": 256}
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
COMFY = {"scale": "weight_scale"}
Q, FFN = "blocks.0.self_attn.q", "blocks.1.ffn.2"


def scaled(model=None, **options):
    model = tiny_wan_transformer(seed=9, **SIZE) if model is None else model
    return with_scales(official_state_dict(model), **options)


@pytest.fixture
def file(tmp_path):
    def save(weights, name="wan_fp8_scaled.safetensors", **metadata):
        save_file({key: tensor.contiguous() for key, tensor in weights.items()}, tmp_path / name, metadata)
        return tmp_path / name

    return save


def assert_as_in_the_file(model, weights, plain, layers=20):
    """The linears have the file's values, and the model errs by less than the tier may."""
    linears = quantized_linears(model)
    assert len(linears) == layers
    assert {linear.quantized().format for linear in linears} == {weights[f"{FFN}.weight"].dtype}
    of_file, linear = plain[f"{FFN}.weight"], model.blocks[1].ffn.net[2]
    assert torch.equal(linear.quantized().dequantize(), of_file)
    assert torch.isclose(linear.weight_norm[0], of_file.norm(dim=1).max(), rtol=1e-6)
    assert relative_error(run(model), literal(plain, model, sla=None)) < QUANTIZED.limits.block


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(
    ("dtype", "scale", "prefix"),
    [
        (E4M3, "scale_weight", ""),
        (E4M3, "weight_scale", "model.diffusion_model."),
        (INT8, "scale_weight", "model.diffusion_model."),
        (INT8, "weight_scale", ""),
    ],
)
def test_the_values_run_as_they_are(file, prefix, scale, by_row, dtype):
    model, weights = tiny_wan_transformer(**SIZE), scaled(dtype=dtype, scale=scale, by_row=by_row)
    path = file({prefix + name: tensor for name, tensor in weights.items()})
    patch = trp.load_turbodiffusion(path, model, "quantized")
    assert_as_in_the_file(model, weights, without_scales(weights))
    assert "20 linears with the file's own 8-bit values" in patch.summary()
    assert "adds a relative error" not in patch.summary()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_load_converted_takes_them_too(file, dtype):
    """The weights are in 8 bits, without originals, as after loading a folder of `convert`."""
    weights = scaled(dtype=dtype)
    path = file(weights)
    for source in (path, str(path.parent)):
        model = tiny_wan_transformer(**SIZE)
        patch = trp.load_converted(source, model)
        assert relative_error(run(model), literal(without_scales(weights), model, sla=None)) < QUANTIZED.limits.block
        with pytest.raises(trp.PatchError, match="weights of 20 linears were freed"):
            patch.restore()
    if dtype == E4M3:
        assert_as_in_the_file(model, weights, without_scales(weights))


def test_other_spellings_of_the_same(file):
    """A format in the file's metadata, one without any, as LightX2V writes it, and unscaled values."""
    weights = scaled(by_row=True, **COMFY)
    bare = {name: tensor for name, tensor in weights.items() if not name.endswith("comfy_quant")}
    layers = {name.removesuffix(".weight"): {"format": "float8_e4m3fn"} for name in bare if weights[name].dtype == E4M3}
    files = [file(bare, "lightx2v.safetensors")]
    files.append(file(bare, "comfy.safetensors", _quantization_metadata=json.dumps({"layers": layers})))
    unscaled = {name: (tensor.to(E4M3) if f"{name}_scale" in bare else tensor) for name, tensor in weights.items()}
    unscaled = {name: tensor for name, tensor in unscaled.items() if name.endswith(("weight", "bias", "modulation"))}
    expected = [*2 * [weights], unscaled]
    for path, own in zip([*files, file(unscaled, "e4m3.safetensors")], expected, strict=True):
        model = tiny_wan_transformer(**SIZE)
        trp.load_turbodiffusion(path, model, "quantized")
        assert_as_in_the_file(model, own, without_scales(own))


def test_a_file_of_comfyui_with_the_other_models_of_a_pipeline(file):
    model, weights = tiny_wan_transformer(**SIZE), scaled()
    whole = {f"model.diffusion_model.{name}": tensor for name, tensor in weights.items()}
    encoder = "text_encoders.umt5xxl.transformer"
    others = ("vae.decoder.conv1.weight", "vocoder.act.alpha", f"{encoder}.shared.weight", f"{encoder}.scaled_fp8")
    for name in others:
        whole[name] = torch.ones(4, 4).to(E4M3)
    whole[f"{encoder}.shared.scale_weight"] = torch.ones(1)
    trp.load_turbodiffusion(file(whole), model, "quantized")
    assert_as_in_the_file(model, weights, without_scales(weights))


def test_layers_that_the_file_has_in_16_bits_stay_so(file):
    model, wide = tiny_wan_transformer(**SIZE), (Q, "blocks.0.cross_attn.k", "blocks.1.ffn.0", "blocks.1.self_attn.o")
    weights = scaled(keep=wide)
    weights[f"{Q}.scale_weight"] = torch.ones(())  # older files have a scale of 1 beside such layers
    trp.load_turbodiffusion(file(weights), model, "quantized")
    assert_as_in_the_file(model, weights, without_scales(weights), layers=16)
    assert torch.equal(model.blocks[0].attn1.to_q.weight, weights[f"{Q}.weight"])


def test_a_layer_outside_of_the_blocks_and_kept_ones_are_multiplied_by_their_scale(file):
    model, weights = tiny_wan_transformer(**SIZE), scaled()
    name = "text_embedding.0"
    weights[f"{name}.scale_weight"] = weights[f"{name}.weight"].abs().max() / 448
    weights[f"{name}.weight"] = (weights[f"{name}.weight"] / weights[f"{name}.scale_weight"]).to(E4M3)
    plain = without_scales(weights)
    trp.load_turbodiffusion(file(weights), model, trp.Quantized(keep=["blocks.0"]))
    assert_as_in_the_file(model, weights, plain, layers=10)
    assert torch.equal(model.condition_embedder.text_embedder.linear_1.weight, plain[f"{name}.weight"])
    assert torch.equal(model.blocks[0].attn1.to_q.weight, plain[f"{Q}.weight"])


@pytest.mark.parametrize("options", [{"config": "exact"}, {"attention": "dense"}])
def test_the_exact_tier_computes_with_the_weights_of_the_file(file, options):
    model, weights = tiny_wan_transformer(**SIZE), scaled()
    trp.load_turbodiffusion(file(weights), model, **options).restore()
    assert relative_error(run(model), literal(without_scales(weights), model, sla=None)) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "capability", "where"), [(E4M3, (8, 6), "cpu"), (E4M3, (8, 6), "meta"), (E5M2, None, "cpu")]
)
def test_values_that_cannot_stay_are_converted_and_the_error_is_told(file, monkeypatch, dtype, capability, where):
    """e4m3 on a GPU without it, and e5m2. The originals then are the weights of the file."""
    for module in ("turbodiffusion", "quantize_linears"):
        name = f"turbo_rcm_patch.patching.weights.{module}.capability_of"
        monkeypatch.setattr(name, lambda device: capability if device.type == "cpu" else None)
    model, weights = tiny_wan_transformer(**SIZE).to(where), scaled(dtype=dtype)
    patch, plain = trp.load_turbodiffusion(file(weights), model, "quantized"), without_scales(weights)
    assert {linear.quantized().format for linear in quantized_linears(model)} == (
        {INT8} if capability else {INT8, E4M3}
    )
    assert "to the weights of 20 linears" in patch.summary()
    assert "own 8-bit values" not in patch.summary()
    assert relative_error(run(model), literal(plain, model, sla=None)) < QUANTIZED.limits.block
    patch.restore()
    assert torch.equal(model.blocks[1].ffn.net[2].weight, plain[f"{FFN}.weight"])


@pytest.mark.parametrize("load", [trp.load_turbodiffusion, trp.load_converted])
def test_two_experts_in_a_pipeline(file, load):
    pipe = tiny_wan_pipeline("wan22")
    models = pipe.transformer, pipe.transformer_2
    weights = [
        scaled(model, scale=scale) for model, scale in zip(models, ("scale_weight", "weight_scale"), strict=True)
    ]
    paths = [file(each, f"{name}.safetensors") for name, each in zip(("high", "low"), weights, strict=True)]
    load(paths, pipe, "quantized")
    for model, each in zip(models, weights, strict=True):
        assert_as_in_the_file(model, each, without_scales(each))


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora(file, when):
    model, plain, weights = tiny_wan_transformer(**SIZE), tiny_wan_transformer(**SIZE), scaled()
    for each in (model, plain) if when == "before" else ():
        add_lora(each)
    trp.load_turbodiffusion(file(weights), model, "quantized")
    trp.load_turbodiffusion(file(weights, "again.safetensors"), plain, "exact")
    for each in (model, plain) if when == "after" else ():
        add_lora(each)
    assert relative_error(run(model), run(plain)) <= ERROR


@pytest.mark.parametrize("family", ["vace", "animate"])
def test_other_families(file, family):
    model, weights = tiny_family_transformer(family), {}
    for name, tensor in tiny_family_transformer(family).state_dict().items():
        part = name.rpartition(".")[2]
        official = WAN_NAMES.official_parameter(name)
        in_8_bits = tensor.dim() == 2 and part == "weight" and official.split(".")[-3] in ("self_attn", "cross_attn")
        weights[official] = (tensor / 0.01).to(E4M3) if in_8_bits else tensor
        weights |= {f"{official}_scale": torch.tensor(0.01)} if in_8_bits else {}
    trp.load_turbodiffusion(file(weights), model, "quantized")
    linear = model.blocks[0].attn2.to_q
    assert len(quantized_linears(model)) == sum(name.endswith("weight_scale") for name in weights)
    assert torch.equal(linear.weight_8bit.float(), weights["blocks.0.cross_attn.q.weight"].float())


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.parametrize("first", [False, True])
def test_group_offload(file, kind, first):
    model, weights = tiny_wan_transformer(**SIZE), scaled()
    offload = {"onload_device": torch.device("cpu"), "offload_type": kind, "num_blocks_per_group": 1}
    if first:
        model.enable_group_offload(**offload)
    trp.load_turbodiffusion(file(weights), model, "quantized")
    if not first:
        model.enable_group_offload(**offload)
    assert_as_in_the_file(model, weights, without_scales(weights))


def test_a_model_on_the_meta_device(file):
    with torch.device("meta"):
        model = tiny_wan_transformer(dtype=torch.bfloat16, **SIZE)
    weights = scaled()
    trp.load_turbodiffusion(file(weights), model, "quantized")
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert relative_error(run(model), literal(without_scales(weights), model, sla=None)) < QUANTIZED.limits.step


STEPS = {"QKV projection", "Q projection", "K and V projections", "projection + skip", "linear + GELU", "linear + skip"}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "format"), [(E4M3, "e4m3"), (INT8, "int8")])
def test_every_linear_runs_in_the_files_format_on_a_gpu(file, dtype, format):
    if dtype == E4M3 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with e4m3")
    large = {"heads": 8, "head_dim": 128, "ffn_dim": 4096, "layers": 4}
    path = file(scaled(tiny_wan_transformer(seed=9, **large), dtype=dtype, by_row=True))
    model, plain = tiny_wan_transformer(dtype=torch.bfloat16, **large).cuda(), tiny_wan_transformer(**large).cuda()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    patch = trp.load_turbodiffusion(path, model, "quantized")
    assert torch.cuda.max_memory_allocated() - before <= 5 * 4 * AT_ONCE  # never the weights in 16 and in 8 bits
    trp.load_turbodiffusion(path, plain, "exact").restore()
    out, expected = (output_of(each, "cuda") for each in (model, plain))
    rows = [row for row in patch.rows() if row.step in STEPS]
    assert {row.step for row in rows} == STEPS
    assert [row for row in rows if format not in row.kernel] == []
    assert relative_error(out, expected) <= QUANTIZED.limits.step


# Stored by convert

STORED = {"head_dim": 128, "rope_max_seq_len": 1024}


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_convert_keeps_the_values_and_what_is_in_16_bits(file, tmp_path, dtype):
    one, other = (tiny_wan_transformer(seed=seed, **STORED) for seed in (1, 2))
    weights = scaled(tiny_wan_transformer(seed=9, **STORED), dtype=dtype, keep=[Q])
    path, lines = file(weights), []
    convert_model(path, tmp_path / "out", trp.Quantized(), dtype=torch.float32, report=lines.append)
    trp.load_converted(tmp_path / "out", one)
    trp.load_turbodiffusion(path, other, "quantized")
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)
    assert "19 linears in 8 bits" in lines[0]
    assert "19 linears with the file's own 8-bit values" in lines[0]
    assert "adds a relative error" not in lines[0]


def test_convert_to_other_formats(file, tmp_path):
    weights, lines = scaled(tiny_wan_transformer(seed=9, **STORED)), []
    path, model = file(weights), tiny_wan_transformer(**STORED)
    for name, config, capability in (("int8", trp.Quantized(), (8, 0)), ("exact", trp.Exact(), None)):
        convert_model(path, tmp_path / name, config, capability=capability, dtype=torch.float32, report=lines.append)
    trp.load_converted(tmp_path / "int8", model)
    assert {linear.quantized().format for linear in quantized_linears(model)} == {INT8}
    assert "to the weights of 20 linears" in lines[0]
    again = type(model).from_pretrained(tmp_path / "exact")
    assert relative_error(run(again), literal(without_scales(weights), again, sla=None)) < 1e-5


# Refused


def described(**description):
    return lambda w: [w.update({name: as_bytes(description)}) for name in list(w) if name.endswith("comfy_quant")]


def of_scale(change):
    return lambda w: w.update({f"{FFN}.weight_scale": change(w[f"{FFN}.weight_scale"])})


def without_any_scale(weights):
    for name in list(weights):
        if name.rpartition(".")[2] not in ("weight", "bias", "modulation"):
            del weights[name]
    weights[f"{Q}.weight"] = weights[f"{Q}.weight"].view(INT8)


def another_model(weights):
    weights.clear()
    weights["encoder.block.0.layer.0.SelfAttention.q.weight"] = torch.ones(4, 4)


NAMED = r"\S+safetensors is quantised as {}, which is not supported \(\S+comfy_quant says so\)\. Give"
DAMAGED = r"weight_scale has values that are not positive and finite"
REFUSED = {
    "unknown": (described(format="nvfp4"), NAMED.format("nvfp4")),
    "of blocks": (described(format="int8_blockwise", group_size=128), NAMED.format("int8_blockwise with group_size")),
    "rotated": (
        described(format="float8_e4m3fn", convrot=True, convrot_groupsize=64),
        NAMED.format("float8_e4m3fn with convrot, convrot_groupsize"),
    ),
    "another dtype": (described(format="int8_tensorwise"), r"says int8_tensorwise, but \S+ is float8_e4m3fn"),
    "no JSON": (lambda w: w.update({f"{Q}.comfy_quant": torch.zeros(3, dtype=torch.uint8)}), "names no format"),
    "missing": (lambda w: w.pop(f"{FFN}.weight_scale"), rf"{FFN}\.weight_scale is missing"),
    "alone": (lambda w: w.pop(f"{FFN}.weight"), r"blocks\.1\.ffn\.2\.weight is missing"),
    "nan": (of_scale(lambda scale: scale * float("nan")), DAMAGED),
    "zero": (of_scale(lambda scale: scale * 0), DAMAGED),
    "negative": (of_scale(lambda scale: -scale), DAMAGED),
    "inf": (of_scale(lambda scale: scale / 0), DAMAGED),
    "shape": (
        of_scale(lambda scale: torch.ones(2, 2)),
        r"weight_scale of shape \[2, 2\] beside \S+ of shape \[256, 256\]",
    ),
    "dtype": (
        of_scale(lambda scale: torch.ones((), dtype=torch.uint8)),
        "weight_scale in uint8, which is not supported",
    ),
    "companion": (
        lambda w: w.update({f"{FFN}.smooth": torch.ones(4)}),
        "smooth beside .* in a format that is not known",
    ),
    "weight": (lambda w: w.update({f"{FFN}.weight": w[f"{FFN}.weight"][:, :8]}), r"is \[256, 8\], not \[256, 256\]"),
    "packed": (
        lambda w: w.update({f"{FFN}.qweight": w.pop(f"{FFN}.weight").view(torch.uint8)}),
        rf"{FFN}\.qweight in place of {FFN}\.weight: its weights are quantised in a format that is not known",
    ),
    "integers": (without_any_scale, rf"{Q}\.weight holds integers, but the file has no scales for them\. Give"),
    "another model": (another_model, "holds no transformer, but the WanTransformer3DModel takes weights of Wan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_one_sentence_and_leaves_the_model_as_it_was(file, case):
    change, message = REFUSED[case]
    model, weights = tiny_wan_transformer(**SIZE), scaled(**COMFY)
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    change(weights)
    with pytest.raises(trp.PatchError, match=message) as error:
        trp.load_turbodiffusion(file(weights), model, "quantized")
    assert str(error.value).count("comfy_quant") <= 1
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(*before[name])
    assert "forward" not in vars(model.blocks[0])


def test_a_file_named_as_rotated_is_refused(file):
    path = file(scaled(dtype=INT8), "Wan_Int8Convrot.safetensors")
    with pytest.raises(trp.PatchError, match="is named as a file of rotated weights, which are not supported"):
        trp.load_turbodiffusion(path, tiny_wan_transformer(**SIZE), "quantized")


def test_a_failure_half_way_brings_the_weights_back(file, monkeypatch):
    model, weights, put = tiny_wan_transformer(**SIZE), scaled(), turbodiffusion.from_values
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("halfway")
        return put(*arguments)

    monkeypatch.setattr(turbodiffusion, "from_values", failing)
    with pytest.raises(torch.OutOfMemoryError):
        trp.load_turbodiffusion(file(weights), model, "quantized")
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(*before[name])


def test_bad_options(file):
    model, path = tiny_wan_transformer(**SIZE), file(scaled())
    with pytest.raises(ValueError, match=r"device='cuda' is for a converted folder; leave it out"):
        trp.load_converted(path, model, device="cuda")
    with pytest.raises(ValueError, match=r"stored in 8 bits, but the config is of the exact tier"):
        trp.load_converted(path, model, "exact")
    assert not quantized_linears(model)
    with pytest.raises(ValueError, match="either a config or attention, topk and blocks, not both"):
        trp.load_turbodiffusion(path, model, "quantized", attention="dense")
    for options in ({}, {"config": "sparse"}):
        with pytest.raises(trp.PatchError, match=r"without sparse-linear attention .*; give another preset"):
            trp.load_turbodiffusion(path, model, **options)
