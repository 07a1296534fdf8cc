"""use_distilled beside other changes, made before and after it: LoRAs fused, switched off or unloaded,
fused projections, layerwise casting."""

import re

import pytest
import torch

import turbo_rcm_patch as trp
from tests import lora_files
from tests.patching.sampling.test_use_distilled import LIGHTX2V, assert_untouched, state, videos
from tests.tiny_wan import tiny_wan_pipeline


@pytest.mark.parametrize("variant", ["t2v", "wan22"])
@pytest.mark.parametrize("patched", [False, True])
def test_restore_after_the_user_s_own_unloading_undoes_the_rest(variant, patched, tmp_path, caplog):
    pipe = tiny_wan_pipeline(variant)
    plain, before = videos(pipe), state(pipe)
    models = [pipe.transformer, pipe.transformer_2][: 2 if variant == "wan22" else 1]
    sources = [lora_files.lightx2v(model).save(tmp_path / f"{n}_{LIGHTX2V}") for n, model in enumerate(models)]
    handle = trp.use_distilled(pipe, sources)
    patch = trp.patch(pipe) if patched else None
    pipe.unload_lora_weights()
    caplog.clear()
    handle.restore()
    assert not caplog.records
    if patch is not None:
        patch.restore()
    assert_untouched(pipe, before)
    assert torch.equal(videos(pipe), plain)


def test_restore_after_fusing_and_unloading_says_what_stays(tmp_path, caplog):
    pipe = tiny_wan_pipeline()
    before, norm = state(pipe), pipe.transformer.blocks[0].norm2.weight.detach().clone()
    handle = trp.use_distilled(pipe, lora_files.lightx2v(pipe.transformer).save(tmp_path / LIGHTX2V))
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    caplog.clear()
    handle.restore()
    assert "'distilled_0' was fused, then unloaded: its matrices stay in the weights; load the model" in caplog.text
    assert pipe.scheduler is before[0]
    assert torch.equal(pipe.transformer.blocks[0].norm2.weight, norm)


def test_differences_that_do_not_follow_the_matrices_are_warned_of_once(tmp_path, caplog):
    pipe = tiny_wan_pipeline()
    handle = trp.use_distilled(pipe, lora_files.lightx2v(pipe.transformer).save(tmp_path / LIGHTX2V))
    count = re.search(r"(\d+) differences", str(handle))[1]
    caplog.clear()
    videos(pipe)
    assert "differences" not in caplog.text
    pipe.disable_lora()
    videos(pipe)
    videos(pipe)
    assert caplog.text.count("differences of biases, norms and the like stay in the model") == 1
    assert f"transformer: the LoRA was switched off or given another weight, but its {count} differences" in caplog.text


def test_a_lora_without_differences_may_be_switched_off_without_a_word(tmp_path, caplog):
    pipe = tiny_wan_pipeline()
    trp.use_distilled(pipe, lora_files.lightning(pipe.transformer).save(tmp_path / "lightning.safetensors"))
    pipe.disable_lora()
    caplog.clear()
    videos(pipe)
    assert "stay in the model" not in caplog.text


@pytest.mark.parametrize("file", [lora_files.lightx2v, lora_files.lightning])
def test_a_style_s_lora_that_is_loaded_later_and_alone_is_active_is_warned_of_once(file, tmp_path, caplog):
    pipe = tiny_wan_pipeline()
    handle = trp.use_distilled(pipe, file(pipe.transformer).save(tmp_path / "4steps-lora.safetensors"), "lightning")
    pipe.load_lora_weights(lora_files.diffusers(pipe.transformer, ranks=(4,)).tensors, adapter_name="style")
    caplog.clear()
    videos(pipe)
    videos(pipe)
    advice = "pipe.set_adapters(['style', 'distilled_0'])"
    warning = "transformer: the LoRA distilled_0 is not active beside style, so the few steps run without its matrices"
    assert [record.message for record in caplog.records if "distilled_0" in record.message] == [
        f"{warning}; call {advice}."
    ]
    caplog.clear()
    eval(advice)
    videos(pipe)
    pipe.fuse_lora()
    videos(pipe)
    assert "not active" not in caplog.text
    pipe.unfuse_lora()
    handle.restore()


@pytest.mark.parametrize("change", ["fuse_lora", "disable_lora"])
def test_refused_beside_a_lora_that_is_fused_or_off_and_nothing_changes(change, tmp_path):
    pipe = tiny_wan_pipeline()
    pipe.transformer.load_lora_adapter(lora_files.style(pipe.transformer).tensors, prefix=None, adapter_name="style")
    getattr(pipe, change)()
    before = state(pipe)
    with pytest.raises(RuntimeError, match="fused LoRA, style" if change == "fuse_lora" else "switched off"):
        trp.use_distilled(pipe, lora_files.lightx2v(pipe.transformer).save(tmp_path / LIGHTX2V))
    assert_untouched(pipe, before)


def only_differences(transformer):
    file = lora_files.lightx2v(transformer)
    file.tensors = {key: x for key, x in file.tensors.items() if ".diff" in key}
    return file


@pytest.mark.parametrize("file", [lora_files.lightx2v, lora_files.lightning, only_differences])
def test_on_fused_projections_which_no_lora_reaches_it_is_refused_and_nothing_changes(file, tmp_path):
    pipe = tiny_wan_pipeline()
    source = file(pipe.transformer).save(tmp_path / "4steps-lora.safetensors")
    pipe.transformer.fuse_qkv_projections()
    before = state(pipe)
    with pytest.raises(RuntimeError, match=r"^transformer has fused .* call unfuse_qkv_projections\(\) and"):
        trp.use_distilled(pipe, source, "lightx2v")
    assert_untouched(pipe, before)
    pipe.transformer.unfuse_qkv_projections()
    trp.use_distilled(pipe, source, "lightx2v").restore()


def test_projections_fused_after_it_are_unfused_before_restoring(tmp_path):
    pipe = tiny_wan_pipeline()
    plain, scheduler = videos(pipe), pipe.scheduler
    handle = trp.use_distilled(pipe, lora_files.lightx2v(pipe.transformer).save(tmp_path / LIGHTX2V))
    pipe.transformer.fuse_qkv_projections()
    with pytest.raises(RuntimeError, match=r"call unfuse_qkv_projections\(\) first, then restore"):
        handle.restore()
    pipe.transformer.unfuse_qkv_projections()
    handle.restore()
    assert pipe.scheduler is scheduler
    assert torch.equal(videos(pipe), plain)


def test_under_layerwise_casting_it_is_refused_and_nothing_changes(tmp_path):
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16)
    pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    before = state(pipe)
    with pytest.raises(RuntimeError, match=r"transformer\.blocks\.0\..* is stored as float8_e4m3fn, and PEFT cannot"):
        trp.use_distilled(pipe, lora_files.lightning(pipe.transformer).save(tmp_path / "lightning.safetensors"))
    assert_untouched(pipe, before)


def test_casting_after_it_works(tmp_path):
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16)
    handle = trp.use_distilled(pipe, lora_files.lightning(pipe.transformer).save(tmp_path / "lightning.safetensors"))
    expected = videos(pipe).float()
    pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    assert (videos(pipe).float() - expected).norm() < 0.1 * expected.norm()  # of weights with three bits
    handle.restore()
