"""Loading and merging TurboDiffusion's weights: refusals, which change nothing."""

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig

import turbo_rcm_patch as trp
from tests import lora_files
from tests.official_ltx2 import ltx2_state_dict
from tests.official_names import official_state_dict
from tests.oracle import same_tensors
from tests.patching.pairs import output_of
from tests.patching.turbowan import SAGE, SLA, turbo_weights
from tests.tiny_families import tiny_family_transformer
from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.patching.weights import turbodiffusion


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda w: w.pop("blocks.1.ffn.0.bias"), SLA, "blocks.1.ffn.0.bias is missing"),
        (lambda w: w.update(odd=torch.zeros(1)), SLA, "odd is unexpected"),
        (lambda w: None, {"attention": "dense"}, "were trained with sparse-linear attention"),
        (
            lambda w: [w.pop(name) for name in list(w) if "proj_l" in name],
            SLA,
            "were trained without sparse-linear attention .*; give another preset",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(saved, change, options, message):
    model = tiny_wan_transformer()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = turbo_weights(model)
    change(weights)
    with pytest.raises(trp.PatchError, match=message):
        trp.load_turbodiffusion(saved(weights), model, **options)
    assert before.keys() == model.state_dict().keys()
    assert same_tensors(model.state_dict(), before)
    assert "forward" not in vars(model.blocks[0])


def test_a_lora_is_no_whole_model(saved):
    model = tiny_wan_transformer()
    with pytest.raises(trp.PatchError, match="is a LoRA, not a whole model; load it with use_distilled"):
        trp.load_turbodiffusion(saved(lora_files.lightx2v(model).tensors), model, attention="dense")


def test_no_path_at_all():
    with pytest.raises(TypeError, match="path=None; give the path of a file or a folder"):
        trp.load_turbodiffusion(None, tiny_wan_transformer())


def test_a_file_of_another_family_is_refused_and_nothing_is_changed(saved):
    model = tiny_family_transformer("ltx2")
    expected = output_of("ltx2", model)
    path = saved(official_state_dict(tiny_wan_transformer()))
    message = r"holds weights of Wan, but the LTX2Video\w+ takes weights of LTX-2; give a file with these"
    with pytest.raises(trp.PatchError, match=f"cannot load: .*{message}"):
        trp.load_turbodiffusion(path, model, attention="dense")
    with pytest.raises(trp.PatchError, match=f"cannot merge: .*{message}"):
        trp.merge_turbodiffusion(path, path, model)
    assert torch.equal(output_of("ltx2", model), expected)
    assert "forward" not in vars(model.transformer_blocks[0])


def test_an_ltx_2_file_does_not_fit_wan(saved):
    model = tiny_wan_transformer()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = saved(ltx2_state_dict(tiny_family_transformer("ltx2"), prefix="model.velocity_model."))
    for attention in ("dense", "sagesla"):
        with pytest.raises(
            trp.PatchError, match=r"holds weights of LTX-2, but the Wan\w+ takes weights of Wan; give a file with these"
        ):
            trp.load_turbodiffusion(path, model, attention=attention)
    assert same_tensors(model.state_dict(), before)
    assert "forward" not in vars(model.blocks[0])


def test_bad_options(saved):
    model = tiny_wan_transformer()
    path = saved(turbo_weights(model))
    for options, message in (
        ({"attention": "sage"}, "attention='sage' is unknown; accepted are sagesla, sla, dense"),
        ({"topk": 0.0}, r"topk=0.0; give a share"),
        ({"blocks": (64,)}, r"blocks=\(64,\); give \(queries, keys\)"),
    ):
        with pytest.raises(ValueError, match=message):
            trp.load_turbodiffusion(path, model, **options)
    with pytest.raises(trp.PatchError, match="no such file"):
        trp.load_turbodiffusion(path.with_name("nothing.pth"), model)


def test_the_preset_alone_names_what_it_needs():
    model = tiny_wan_transformer()
    with pytest.raises(trp.PatchError, match=r"has no proj_l, .* load them with trp\.load_turbodiffusion"):
        trp.patch(model, "sparse")
    assert "forward" not in vars(model.blocks[0])


def test_a_failure_with_the_second_expert_leaves_both_as_they_were(saved, monkeypatch):
    pipe = tiny_wan_pipeline("wan22")
    models = pipe.transformer, pipe.transformer_2
    before = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    paths = saved(turbo_weights(models[0], seed=21), "high.pth"), saved(turbo_weights(models[1], seed=22), "low.pth")
    replace, calls = turbodiffusion.replace_computation, []

    def failing(journal, model, config):
        calls.append(model)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("halfway")
        replace(journal, model, config)

    monkeypatch.setattr(turbodiffusion, "replace_computation", failing)
    with pytest.raises(torch.OutOfMemoryError):
        trp.load_turbodiffusion(paths, pipe, **SAGE)
    for model, expected in zip(models, before, strict=True):
        assert model.state_dict().keys() == expected.keys()
        assert same_tensors(model.state_dict(), expected)
        assert "forward" not in vars(model.blocks[0])


def test_models_that_cannot_be_written_to_are_refused(saved, tmp_path):
    model = tiny_wan_transformer()
    path = saved(turbo_weights(model))
    offloaded = tiny_wan_transformer()
    apply_group_offloading(
        offloaded,
        onload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        offload_to_disk_path=str(tmp_path / "offloaded"),
    )
    fused = tiny_wan_transformer()
    fused.add_adapter(LoraConfig(r=4, target_modules=["to_q"]))
    fused.fuse_lora()
    joint = tiny_wan_transformer()
    joint.fuse_qkv_projections()  # its attention reads copies, which files have nothing for
    for refused, reason in ((offloaded, "disk"), (fused, "unfuse_lora"), (joint, r"unfuse_qkv_projections\(\) first")):
        with pytest.raises(trp.PatchError, match=reason):
            trp.load_turbodiffusion(path, refused, **SLA)
        with pytest.raises(trp.PatchError, match=reason):
            trp.merge_turbodiffusion(path, path, refused)
    with pytest.raises(trp.PatchError, match="on the meta device"):
        trp.merge_turbodiffusion(path, path, tiny_wan_transformer().to("meta"))


def test_options_of_sla_are_refused_for_dense_weights(saved):
    model = tiny_wan_transformer()
    path = saved(official_state_dict(model))
    for options in ({"topk": 0.5}, {"blocks": (64, 64)}):
        with pytest.raises(
            ValueError,
            match=r"attention='dense' does not take (topk|blocks), an option of .*; leave it out",
        ):
            trp.load_turbodiffusion(path, model, attention="dense", **options)


def test_wan_animate_has_another_processor_of_the_same_name(saved):
    """The error names the possible presets at once, not a missing proj_l, which the model could not use."""
    model = tiny_family_transformer("animate")
    message = r"self-attentions have a \S+_wan_animate\.WanAttnProcessor\. Take another preset: .* or 'block_sparse'"
    with pytest.raises(trp.PatchError, match=message) as error:
        trp.patch(model, "sparse")
    assert "load_turbodiffusion" not in str(error.value)
    wan = tiny_wan_transformer(head_dim=model.config.attention_head_dim, layers=model.config.num_layers)
    paths = saved(turbo_weights(wan)), saved(official_state_dict(wan), "Wan.pth")
    with pytest.raises(trp.PatchError, match=message):
        trp.merge_turbodiffusion(*paths, model)
