"""TurboT2AV's weights in an LTX-2 model: naming, wrappers, sparse attention without a linear part, and misfits."""

import pickle
from contextlib import nullcontext

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.loaders.single_file_utils import convert_ltx2_transformer_to_diffusers
from safetensors import safe_open
from safetensors.torch import save_file

import turbo_rcm_patch as trp
from tests.official_ltx2 import LTX2_3, ltx2_state_dict
from tests.oracle import relative_error, same_tensors
from tests.tiny_families import tiny_family_inputs, tiny_family_transformer
from tests.tiny_ltx2 import tiny_ltx2_call, tiny_ltx2_pipeline
from turbo_rcm_patch.patching.families.ltx2.names import LTX2_NAMES
from turbo_rcm_patch.patching.weights.load import FILE
from turbo_rcm_patch.patching.weights.store import convert_model
from turbo_rcm_patch.tiers import QUANTIZED

WRAPPED = [
    ("generator", ""),
    ("model", "model."),
    ("state_dict", "velocity_model."),
    (None, "model.velocity_model."),
    ("generator", "model._fsdp_wrapped_module."),
]


def student(family="ltx2", seed=9, **options):
    """A model with other weights than the one that they are loaded into."""
    model = tiny_family_transformer(family, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def outputs(model, family="ltx2"):
    with torch.no_grad():
        return model(**tiny_family_inputs(family, model))


def same(ours, theirs, limit=1e-5):
    return all(relative_error(*pair) <= limit for pair in zip(ours, theirs, strict=True))


def with_proj_l(weights, prefix="", *, size=64, zero=False, layers=2):
    """The same with SLA's projections, as TurboT2AV's modules name them."""
    for number in range(layers):
        name = f"{prefix}transformer_blocks.{number}.attn1.attention_function.local_attn.proj_l"
        weights[f"{name}.weight"] = torch.zeros(size, size) if zero else torch.eye(size)
        weights[f"{name}.bias"] = torch.zeros(size) if zero else torch.ones(size)
    return weights


@pytest.mark.parametrize("family", ["ltx2", "ltx2.3"])
def test_our_names_are_those_that_diffusers_converts(family):
    model = tiny_family_transformer(family)
    written = ltx2_state_dict(model)
    assert {LTX2_NAMES.official_parameter(name) for name in model.state_dict()} == set(written)
    converted = convert_ltx2_transformer_to_diffusers(dict(written))
    unknown = {name for name in converted if name.split(".")[0] in LTX2_3}  # diffusers 0.42.1 leaves 2.3's as they are
    renamed = {".".join([LTX2_3[name.split(".")[0]], *name.split(".")[1:]]) for name in unknown}
    assert (set(converted) - unknown) | renamed == set(model.state_dict())


@pytest.mark.parametrize(("wrapper", "prefix"), WRAPPED)
def test_every_value_comes_to_its_place(saved, prefix, wrapper):
    model, other = tiny_family_transformer("ltx2", layers=1), student(layers=1)
    weights = ltx2_state_dict(other, prefix=prefix)
    path = saved({wrapper: weights, "step": 3} if wrapper else weights, "model.pth")
    patch = trp.load_turbodiffusion(path, model, "exact")
    assert same(outputs(model), outputs(other))
    patch.restore()
    assert model.state_dict().keys() == other.state_dict().keys()
    assert same_tensors(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("beside", ["model", "state_dict"])
def test_the_generator_of_a_file_with_more_models_is_taken(saved, beside):
    """TurboT2AV's own loader takes it too."""
    model, other = tiny_family_transformer("ltx2", layers=1), student(layers=1)
    path = saved({beside: ltx2_state_dict(student(layers=1, seed=4)), "generator": ltx2_state_dict(other)})
    trp.load_turbodiffusion(path, model, "exact")
    assert same(outputs(model), outputs(other))


def test_a_file_with_two_models_and_no_generator_is_refused(saved):
    weights = ltx2_state_dict(student(layers=1))
    with pytest.raises(trp.PatchError, match=r"holds model, state_dict; accepted is a dictionary of tensors"):
        trp.load_turbodiffusion(saved({"model": weights, "state_dict": weights}), tiny_family_transformer("ltx2"))


def test_the_connectors_of_a_whole_file_are_left_out(saved):
    model, other = tiny_family_transformer("ltx2"), student()
    weights = ltx2_state_dict(other, prefix="model.diffusion_model.")
    weights["model.diffusion_model.video_embeddings_connector.learnable_registers"] = torch.zeros(2)
    trp.load_turbodiffusion(saved(weights), model, "exact")
    assert same(outputs(model), outputs(other))


def test_ltx_2_3_with_its_own_parts(saved):
    model, other = tiny_family_transformer("ltx2.3"), student("ltx2.3")
    trp.load_turbodiffusion(saved(ltx2_state_dict(other)), model, "exact")
    assert same(outputs(model, "ltx2.3"), outputs(other, "ltx2.3"))


@pytest.mark.parametrize("load", [trp.load_turbodiffusion, trp.load_converted])
def test_ltx_2_3_is_refused_in_the_sparse_tier(saved, tmp_path, load):
    """Sparse attention would ignore its perturbation mask."""
    model, other = tiny_family_transformer("ltx2.3"), student("ltx2.3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = saved(ltx2_state_dict(other))
    if load is trp.load_converted:
        other.save_pretrained(tmp_path / "model")
        with pytest.raises(ValueError, match="cannot have sparse-linear attention"):
            convert_model(tmp_path / "model", tmp_path / "out", trp.Sparse())
        convert_model(tmp_path / "model", path := tmp_path / "out", trp.Quantized(), dtype=torch.float32)
    with pytest.raises(trp.PatchError, match="cannot have sparse-linear attention"):
        load(path, model, "sparse")
    assert same_tensors(model.state_dict(), before)
    assert "forward" not in vars(model.transformer_blocks[0])


@pytest.mark.parametrize("zero", [False, True])
def test_by_default_attention_is_sparse_without_a_linear_part(saved, zero):
    model, other = tiny_family_transformer("ltx2"), student()
    weights = ltx2_state_dict(other, prefix="model.")
    patch = trp.load_turbodiffusion(saved(with_proj_l(weights, "model.", zero=True) if zero else weights), model)
    assert isinstance(patch.config, trp.Sparse)
    assert {block.attn1.processor.topk for block in model.transformer_blocks} == {0.3}
    assert not any("proj_l" in name for name in model.state_dict())
    first = outputs(model)
    assert "no linear part" in patch.summary()
    patch.restore()
    assert same(first, outputs(other), 0.2)
    dense = outputs(model)
    trp.patch(model, trp.Sparse(topk=1.0, quantize=()))
    assert same(outputs(model), dense)


def test_projections_that_are_not_zero_count(saved):
    model, other = tiny_family_transformer("ltx2"), student()
    path = saved(with_proj_l(ltx2_state_dict(other)))
    with pytest.raises(trp.PatchError, match="were trained with sparse-linear attention"):
        trp.load_turbodiffusion(path, model, "quantized")
    patch = trp.load_turbodiffusion(path, model, attention="sla", topk=1.0)
    assert not same(outputs(model), outputs(other), 0.01)
    assert "no linear part" not in patch.summary()


@pytest.mark.parametrize("tier", ["quantized", trp.BlockSparse(quantize=(), mass=1.0, blocks=(8, 8), min_tokens=1)])
def test_other_tiers(saved, tier):
    model, other = tiny_family_transformer("ltx2"), student()
    trp.load_turbodiffusion(saved(ltx2_state_dict(other)), model, tier)
    assert same(outputs(model), outputs(other), QUANTIZED.limits.step)


def test_a_pipeline(saved):
    pipe, expected = tiny_ltx2_pipeline(), tiny_ltx2_pipeline()
    with torch.no_grad():
        expected.transformer.proj_in.weight.mul_(2)
    trp.load_turbodiffusion(saved(ltx2_state_dict(expected.transformer)), pipe, attention="sla", topk=1.0)
    assert same(pipe(**tiny_ltx2_call()), expected(**tiny_ltx2_call()), 1e-4)


def test_weights_stored_in_8_bits(saved, tmp_path):
    model, other = (tiny_family_transformer("ltx2", layers=1) for _ in range(2))
    other.save_pretrained(tmp_path / "model")
    for tier in ("sparse", "quantized"):
        convert_model(tmp_path / "model", tmp_path / tier, trp.PRESETS[tier], dtype=torch.float32)
        patch = trp.load_converted(tmp_path / tier, model, tier)
        outputs(model)
        assert ("no linear part" in patch.summary()) == (tier == "sparse")
        expected = trp.patch(other, tier)
        assert same(outputs(model), outputs(other))
        expected.restore()
        model = tiny_family_transformer("ltx2", layers=1)


HEADS = {  # as the published models have, which a file does not tell
    **{f"{stream}num_attention_heads": 32 for stream in ("", "audio_")},
    **{"attention_head_dim": 4, "cross_attention_dim": 128, "audio_attention_head_dim": 2},
    **{"audio_cross_attention_dim": 64, "rope_type": "split"},
}


@pytest.mark.parametrize("zero", [False, True])
def test_only_projections_that_are_not_zero_keep_a_file_from_the_other_tiers(saved, tmp_path, zero):
    weights = ltx2_state_dict(tiny_family_transformer("ltx2", **HEADS))
    path = saved(with_proj_l(weights, size=HEADS["attention_head_dim"], zero=zero))
    with nullcontext() if zero else pytest.raises(ValueError, match="were trained with sparse-linear attention"):
        convert_model(path, tmp_path / "out", trp.Quantized())


def add_zero_projections(file):
    with safe_open(file, "pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    zeros = {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}
    tensors |= {f"transformer_blocks.0.attn1.proj_l.{part}": tensor for part, tensor in zeros.items()}
    save_file(tensors, file, metadata)


def test_zero_projections_in_a_folder_do_not_matter(tmp_path):
    """Neither in diffusers' files nor in those that were converted."""
    other = tiny_family_transformer("ltx2", **HEADS, seed=5)  # saving one changes its config
    other.save_pretrained(tmp_path / "model")
    add_zero_projections(tmp_path / "model/diffusion_pytorch_model.safetensors")
    convert_model(tmp_path / "model", tmp_path / "out", trp.Quantized(), dtype=torch.float32)
    add_zero_projections(tmp_path / "out" / FILE)
    model = tiny_family_transformer("ltx2", **HEADS, seed=4)
    trp.load_converted(tmp_path / "out", model, "quantized")
    trp.patch(other, "quantized")
    assert same(outputs(model), outputs(other))


@pytest.mark.parametrize("tier", ["exact", "quantized", "sparse"])
def test_a_file_is_stored(saved, tmp_path, tier):
    other = tiny_family_transformer("ltx2", **HEADS)
    path = saved({"generator": ltx2_state_dict(other, prefix="model.")})
    convert_model(path, tmp_path / "out", trp.PRESETS[tier], dtype=torch.float32)
    if tier == "exact":
        model = LTX2VideoTransformer3DModel.from_pretrained(tmp_path / "out")
        assert dict(model.config).keys() >= dict(other.config).keys()
        assert same_tensors(other.state_dict(), model.state_dict())
        return
    model = tiny_family_transformer("ltx2", **HEADS, seed=4)
    trp.load_converted(tmp_path / "out", model, tier)
    trp.patch(other, tier)
    assert same(outputs(model), outputs(other))


def test_files_that_tell_no_config(saved, tmp_path):
    later = ltx2_state_dict(tiny_family_transformer("ltx2.3"))
    with pytest.raises(
        ValueError, match=r"holds LTX-2\.3 or later \(it has .*\), whose config is not known from a file"
    ):
        convert_model(saved(later), tmp_path / "out", trp.Exact())
    part = {name: tensor for name, tensor in ltx2_state_dict(student()).items() if "patchify" not in name}
    with pytest.raises(ValueError, match=r"holds no LTX-2 transformer: it has no patchify_proj\.weight or proj_in\.we"):
        convert_model(saved(part), tmp_path / "out", trp.Exact())
    packed = {
        name.replace("attn2.to_k.weight", "attn2.to_k.qweight"): w for name, w in ltx2_state_dict(student()).items()
    }
    with pytest.raises(
        ValueError, match=r"attn2\.to_k\.qweight in place of \S+: its weights are quantised in a format"
    ):
        convert_model(saved(packed), tmp_path / "out", trp.Exact())
    assert not (tmp_path / "out").exists()


REFUSED = {
    "a missing layer": (
        lambda weights: [weights.pop(name) for name in list(weights) if "transformer_blocks.1." in name],
        r"of another size than this LTX2VideoTransformer3DModel: it has 1 block, the model 2\. Give a file",
    ),
    "a missing norm": (
        lambda weights: weights.pop("model.velocity_model.transformer_blocks.0.audio_attn1.q_norm.weight"),
        r"transformer_blocks\.0\.audio_attn1\.q_norm\.weight is missing",
    ),
    "an unknown part": (
        lambda weights: weights.update({"model.velocity_model.memory.weight": torch.ones(2)}),
        r"model\.velocity_model\.memory\.weight is unexpected",
    ),
    "a later LTX-2": (
        lambda weights: weights.update(
            ltx2_state_dict(tiny_family_transformer("ltx2.3"), prefix="model.velocity_model.")
        ),
        r"to_gate_logits\.weight is unexpected.*scale_shift_table is \[9, \d+\], not \[6, \d+\]",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(saved, change):
    alter, message = REFUSED[change]
    model = tiny_family_transformer("ltx2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = ltx2_state_dict(student(), prefix="model.velocity_model.")
    alter(weights)
    with pytest.raises(trp.PatchError, match=message):
        trp.load_turbodiffusion(saved({"generator": weights}), model)
    assert before.keys() == model.state_dict().keys()
    assert same_tensors(model.state_dict(), before)
    assert "forward" not in vars(model.transformer_blocks[0])


class Code:
    """Pickles as a call, which unpickling would make."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_code_in_a_file_does_not_run(tmp_path):
    for name, write in (
        ("zip.pth", torch.save),
        ("old.pth", lambda content, path: path.write_bytes(pickle.dumps(content))),
    ):
        write({"generator": ltx2_state_dict(student()), "more": Code(tmp_path / "ran")}, tmp_path / name)
        with pytest.raises(trp.PatchError, match="without running code in it"):
            trp.load_turbodiffusion(tmp_path / name, tiny_family_transformer("ltx2"))
    assert not (tmp_path / "ran").exists()
