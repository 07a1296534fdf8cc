"""use_distilled: recognising, installing, reporting, refusing and restoring."""

import copy
import dataclasses
import importlib.util
import json
import logging
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import save_file

import turbo_rcm_patch as trp
from tests import lora_files
from tests.patching.lora.test_load import assert_as_before, everything
from tests.tiny_wan import frames_of, tiny_wan_pipeline
from turbo_rcm_patch.patching.sampling.handle import HANDLE
from turbo_rcm_patch.recipes import recipes_for
from turbo_rcm_patch.scheduler import FewStepScheduler, RCMScheduler

CHECKPOINTS = Path(__file__).resolve().parents[3] / "docs/checkpoints.md"
TEXT_RECIPES = recipes_for(sound=False, image=False)
LIGHTX2V = "wan2.1_t2v_lora_rank64_lightx2v_4step.safetensors"


def videos(pipe, variant="t2v", **options):
    return frames_of(pipe, variant, num_inference_steps=4, **options, seed=1)


def state(pipe):
    models = [everything(model) for model in (pipe.transformer, getattr(pipe, "transformer_2", None)) if model]
    return pipe.scheduler, set(vars(pipe)), dict(pipe.config), models


def assert_untouched(pipe, before):
    scheduler, attributes, config, models = before
    assert pipe.scheduler is scheduler
    assert set(vars(pipe)) == attributes
    assert dict(pipe.config) == config
    for model, known in zip((pipe.transformer, getattr(pipe, "transformer_2", None)), models, strict=False):
        assert_as_before(model, known)


def save_lightning(pipe, folder, names=("high_noise_model", "low_noise_model")):
    """The two files of Wan2.2-Lightning, and what they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    models = pipe.transformer, pipe.transformer_2
    files = [lora_files.lightning(model, 64, (8.0, 64.0), seed) for seed, model in enumerate(models)]
    paths = [file.save(folder / f"{name}.safetensors") for file, name in zip(files, names, strict=True)]
    return files, paths


def with_merged(pipe, variant, files):
    """Another pipeline with the same models, and the LoRAs in their weights."""
    merged = tiny_wan_pipeline(variant)
    merged.transformer = files[0].merged()
    if len(files) == 2:
        merged.transformer_2 = files[1].merged()
    return merged


@pytest.mark.parametrize(("variant", "given"), [("wan22", "folder"), ("wan22_i2v", "pair")])
def test_both_experts_of_lightning(variant, given, tmp_path):
    pipe = tiny_wan_pipeline(variant)
    files, paths = save_lightning(pipe, tmp_path / "Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1")
    merged = with_merged(pipe, variant, files)
    trp.use_distilled(merged, recipe="lightning")
    with trp.use_distilled(pipe, recipe="lightning"):
        expected, plain = videos(merged, variant), videos(pipe, variant)
    before = state(pipe)
    handle = trp.use_distilled(pipe, tmp_path / paths[0].parent if given == "folder" else tuple(map(str, paths)))
    assert "lightning (named Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1)" in str(handle)
    torch.testing.assert_close(videos(pipe, variant), expected, rtol=2e-4, atol=2e-4)
    assert (expected - plain).abs().max() > 0.02
    for model in (pipe.transformer, pipe.transformer_2):
        assert "distilled_0" in model.peft_config
    handle.restore()
    assert_untouched(pipe, before)


def test_the_experts_have_their_own_files(tmp_path):
    pipe = tiny_wan_pipeline("wan22")
    _, (high, low) = save_lightning(pipe, tmp_path / "lightning")
    with trp.use_distilled(pipe, (high, low)) as handle:
        assert [line.split(",")[0] for line in str(handle).splitlines()[1:]] == [
            "transformer: high_noise_model.safetensors",
            "transformer_2: low_noise_model.safetensors",
        ]
        right = videos(pipe)
    with trp.use_distilled(pipe, (low, high)) as handle:
        assert "the order is (high, low)" in str(handle)
        assert (videos(pipe) - right).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("patch_first", "restore_first", "preset"),
    [
        (False, "patch", "exact"),
        (False, "lora", "quantized"),
        (True, "patch", "quantized"),
        (True, "lora", "exact"),
    ],
)
def test_with_a_patch_and_both_orders_of_restoring(preset, patch_first, restore_first, tmp_path):
    pipe = tiny_wan_pipeline()
    file = lora_files.lightx2v(pipe.transformer)
    merged = with_merged(pipe, "t2v", [file])
    trp.use_distilled(merged, recipe="lightx2v")
    expected, plain, before = videos(merged), videos(pipe), state(pipe)
    source = file.save(tmp_path / LIGHTX2V)
    if patch_first:
        patch = trp.patch(pipe, preset)
        handle = trp.use_distilled(pipe, source)
    else:
        handle = trp.use_distilled(pipe, source)
        patch = trp.patch(pipe, preset)
    assert "+ LoRA" in patch.summary()
    limit = 0.01 if preset == "exact" else 0.1  # the state is rounded to bf16
    assert (videos(pipe) - expected).norm() < limit * expected.norm()
    for undo in (patch.restore, handle.restore) if restore_first == "patch" else (handle.restore, patch.restore):
        undo()
    assert_untouched(pipe, before)
    assert torch.equal(videos(pipe), plain)


def test_what_it_tells(tmp_path, caplog):
    pipe = tiny_wan_pipeline()
    file = lora_files.lightx2v(pipe.transformer)
    source = file.save(tmp_path / LIGHTX2V)
    with caplog.at_level(logging.INFO, logger="turbo_rcm_patch"), trp.use_distilled(pipe, source, scale=0.5) as handle:
        first, second = str(handle).splitlines()
        assert handle.unused == {}
    assert first == (
        f"lightx2v (named {LIGHTX2V}): 4 steps (euler) at timesteps 1000, 937.5, 833.3, 625, guidance_scale 1"
    )
    assert (
        second
        == f"transformer: {LIGHTX2V}, 25 linears of rank 64, no alpha (alpha = rank assumed), 44 differences, scale 0.5"
    )
    assert [(record.levelname, record.message) for record in caplog.records] == [("INFO", f"use_distilled: {handle}")]
    caplog.clear()

    file.tensors["diffusion_model.img_emb.proj.1.lora_up.weight"] = torch.ones(2, 2)
    source = file.save(tmp_path / "Wan2.1_14b_lightx2v_rank32.safetensors")
    with trp.use_distilled(pipe, source) as handle:
        told = str(handle).splitlines()
    assert told[-1] == "  not used: diffusion_model.img_emb.proj.1.lora_up.weight (the model takes no image)"
    assert handle.unused == {
        "transformer": {"diffusion_model.img_emb.proj.1.lora_up.weight": "the model takes no image"}
    }
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", f"use_distilled: {handle}")
    ]


def test_a_file_told_by_its_contents_alone_is_warned_about(tmp_path, caplog):
    pipe = tiny_wan_pipeline()
    source = lora_files.lightx2v(pipe.transformer, 64).save(tmp_path / "lora.safetensors")
    with trp.use_distilled(pipe, source) as handle:
        assert "lightx2v (rank 64 without alphas" in str(handle)
    assert "if it is not lightx2v, name the recipe" in caplog.text


def test_an_unknown_file_lists_every_recipe_and_changes_nothing(tmp_path):
    pipe = tiny_wan_pipeline()
    before = state(pipe)
    source = lora_files.kohya(pipe.transformer).save(tmp_path / "style.safetensors")
    with pytest.raises(ValueError, match=r"style\.safetensors: cannot be recognised; give how it was") as error:
        trp.use_distilled(pipe, source)
    assert all(name in str(error.value) for name in TEXT_RECIPES)
    assert_untouched(pipe, before)
    with trp.use_distilled(pipe, source, "lightning") as handle:
        assert "lightning (as asked for)" in str(handle)


def test_a_folder_of_another_recipe_than_the_contents_decides_nothing(tmp_path, caplog):
    pipe = tiny_wan_pipeline()
    before = state(pipe)
    for name in ("turbo_rcm_patch", "rcm"):
        (tmp_path / name).mkdir()
    source = lora_files.kohya(pipe.transformer).save(tmp_path / "turbo_rcm_patch/style.safetensors")
    with pytest.raises(ValueError, match="cannot be recognised"):
        trp.use_distilled(pipe, source)
    source = lora_files.lightx2v(pipe.transformer, 64).save(tmp_path / "rcm/lora.safetensors")
    with pytest.raises(ValueError, match="look like lightx2v and rcm; give how it was distilled as recipe=, one of"):
        trp.use_distilled(pipe, source)
    assert_untouched(pipe, before)
    source = lora_files.kohya(pipe.transformer).save(tmp_path / "rcm/style.safetensors")
    with trp.use_distilled(pipe, source):
        assert "recognised only by a folder's name; if it is not rcm, name the recipe" in caplog.text


def test_a_loaded_model_whose_name_and_files_contradict_is_an_error(tmp_path):
    pipe = tiny_wan_pipeline()
    pipe.transformer.save_pretrained(tmp_path / "rcm")
    save_file({"blocks.0.to_gate_compress.weight": torch.ones(1)}, tmp_path / "rcm/more.safetensors")
    pipe.transformer.register_to_config(_name_or_path=str(tmp_path / "rcm"))
    with pytest.raises(ValueError, match=r"could be rcm \(named rcm\) or fastwan \(its files hold .*\); give how"):
        trp.use_distilled(pipe)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        ("none", {"recipe": "euler"}, ValueError, "recipe='euler' is unknown; accepted are rcm"),
        ("none", {"recipe": 4}, TypeError, "give a Recipe"),
        ("none", {}, ValueError, r"the loaded model \(it has no name\) tell how .*one of rcm, turbowan, "),
        ("none", {"recipe": "rcm", "scale": float("nan")}, ValueError, "scale=nan"),
        ("none", {"recipe": "rcm", "scale": "0.5"}, TypeError, "scale='0.5'; give a number"),
        ("number", {}, TypeError, r"source=5; give a path, .* or a pair \(high, low\)"),
        ("pipeline", {}, ValueError, "is a whole diffusers pipeline, not a LoRA; .* call use_distilled without source"),
        ("missing", {}, ValueError, "no such file or folder"),
        ("lightx2v", {}, ValueError, "For the recipe of this name give recipe='lightx2v' in place of it"),
        ("model", {}, ValueError, "is not a LoRA: it holds tensors such as .*. If it is a whole model, load it"),
        ("misfit", {}, ValueError, r"lightx2v\.safetensors: it does not fit the WanTransformer3DModel"),
        ("pair", {}, ValueError, "source has 2 entries, but the pipeline has one transformer; give one file"),
    ],
)
def test_errors_change_nothing(make, options, error, message, tmp_path):
    pipe = tiny_wan_pipeline()
    path = tmp_path / "lightx2v.safetensors"
    if make in ("model", "pair"):
        save_file(pipe.transformer.state_dict(), path)
    if make == "misfit":
        lora_files.lightx2v(tiny_wan_pipeline(heads=1).transformer).save(path)
    if make == "pipeline":
        (tmp_path / "model_index.json").touch()
    sources = {"none": None, "number": 5, "pair": (path, path), "pipeline": tmp_path, "lightx2v": "lightx2v"}
    source = sources.get(make, path)
    before = state(pipe)
    with pytest.raises(error, match=message) as raised:
        trp.use_distilled(pipe, source, **options)
    if error is ValueError and source is not None:
        assert all(name in str(raised.value) for name in TEXT_RECIPES)
    assert_untouched(pipe, before)


class Evil:
    def __reduce__(self):
        return print, ("evil",)


@pytest.mark.parametrize("kind", ["evil.pt", "broken.pt", "broken.safetensors", "numbers.pt"])
def test_a_file_that_is_no_lora_is_named_with_what_is_accepted_and_changes_nothing(kind, tmp_path, capsys):
    pipe = tiny_wan_pipeline()
    before, path = state(pipe), tmp_path / kind
    if kind == "evil.pt":
        torch.save({"x": Evil()}, path)
    elif kind == "numbers.pt":
        torch.save({"epoch": 1}, path)
    else:
        path.write_bytes(b"no file of tensors")
    with pytest.raises(ValueError, match=kind) as error:
        trp.use_distilled(pipe, path)
    message = str(error.value)
    assert all(name in message for name in TEXT_RECIPES)
    assert "Accepted are LoRA files (.safetensors, .pth, .pt, .bin, .ckpt)" in message
    assert len(message.splitlines()) == 1
    for word in ("weights_only", "torch.load", "issubclass", "github"):
        assert word not in message
    assert "evil" not in capsys.readouterr().out
    assert_untouched(pipe, before)


def test_without_peft_a_lora_is_a_clear_error_and_a_recipe_none(tmp_path, monkeypatch):
    pipe = tiny_wan_pipeline()
    before, source = state(pipe), lora_files.lightx2v(pipe.transformer).save(tmp_path / LIGHTX2V)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find_spec(name))
    with pytest.raises(ImportError, match=r"pip install 'turbo_rcm_patch\[lora\]'"):
        trp.use_distilled(pipe, source)
    assert_untouched(pipe, before)
    with trp.use_distilled(pipe, recipe="lightx2v"):
        assert len(pipe.scheduler.timesteps) == 4


def test_a_second_expert_that_does_not_fit_changes_neither(tmp_path):
    pipe = tiny_wan_pipeline("wan22")
    _, (high, _) = save_lightning(pipe, tmp_path / "lightning")
    low = lora_files.lightning(tiny_wan_pipeline(heads=1).transformer).save(tmp_path / "lightning/low.safetensors")
    before = state(pipe)
    with pytest.raises(ValueError, match=r"low\.safetensors: it does not fit"):
        trp.use_distilled(pipe, (high, low))
    assert_untouched(pipe, before)
    causvid = lora_files.lightning(pipe.transformer_2).save(tmp_path / "causvid.safetensors")
    with pytest.raises(ValueError, match="look like causvid and lightning"):
        trp.use_distilled(pipe, (high, causvid))
    with pytest.raises(ValueError, match=r"give source=\(high, low\)"):
        trp.use_distilled(pipe, high)
    assert_untouched(pipe, before)


def test_a_second_expert_that_fails_to_load_takes_the_first_off(tmp_path, monkeypatch):
    pipe = tiny_wan_pipeline("wan22")
    _, paths = save_lightning(pipe, tmp_path / "lightning")
    before, model, load = state(pipe), pipe.transformer_2, type(pipe.transformer).load_lora_adapter

    def fail(self, *arguments, **options):
        if self is model:
            raise MemoryError
        return load(self, *arguments, **options)

    monkeypatch.setattr(type(model), "load_lora_adapter", fail)
    with pytest.raises(MemoryError):
        trp.use_distilled(pipe, paths)
    assert_untouched(pipe, before)


def test_restore_refuses_where_something_was_replaced_and_changes_nothing(tmp_path):
    pipe = tiny_wan_pipeline()
    before = state(pipe)
    handle = trp.use_distilled(pipe, lora_files.lightx2v(pipe.transformer).save(tmp_path / LIGHTX2V))
    ours, pipe.scheduler = pipe.scheduler, before[0]
    with pytest.raises(RuntimeError, match="scheduler was replaced after use_distilled"):
        handle.restore()
    pipe.scheduler = ours
    with trp.patch(pipe) as patch:
        assert "+ LoRA" in patch.summary()
        pipe.fuse_lora()
        assert "+ LoRA" not in patch.summary()
    with pytest.raises(RuntimeError, match=r"pipe\.unfuse_lora\(\)"):
        handle.restore()
    assert pipe.scheduler is ours
    assert "distilled_0" in pipe.transformer.peft_config
    pipe.unfuse_lora()
    handle.restore()
    assert pipe.scheduler is before[0]
    with pytest.raises(RuntimeError, match="this use_distilled is restored already"):
        handle.restore()


@pytest.mark.parametrize(
    ("make", "told"),
    [(lora_files.lokr, "20 weights by a LoKr, "), (lora_files.loha, "20 weights by a LoHa, ")],
)
def test_a_lokr_or_loha_makes_the_video_of_merged_weights_and_comes_off(make, told, tmp_path):
    pipe, merged = tiny_wan_pipeline(), tiny_wan_pipeline()
    file, plain = make(pipe.transformer), videos(pipe)
    merged.transformer = file.merged(0.5)
    trp.use_distilled(merged, recipe="lightx2v")
    source = file.save(tmp_path / LIGHTX2V)
    with trp.use_distilled(pipe, source, scale=0.5) as handle:
        first, second = str(handle).splitlines()
        assert first.startswith(f"lightx2v (named {LIGHTX2V}): 4 steps")
        assert second == f"transformer: {LIGHTX2V}, {told}0 differences, scale 0.5"
        torch.testing.assert_close(videos(pipe), videos(merged), rtol=1e-4, atol=1e-4)
    assert torch.equal(videos(pipe), plain)


def test_a_style_s_lora_that_is_named_like_a_recipe_is_told_apart(tmp_path, caplog):
    pipe = tiny_wan_pipeline()
    source = lora_files.style(pipe.transformer).save(tmp_path / "lightning_storm_style.safetensors")
    with trp.use_distilled(pipe, source) as handle:
        assert "recognised only by its name (it has matrices for 2 of the blocks' 20 linears)" in str(handle)
    assert "if it is not lightning, name the recipe" in caplog.text


def test_a_style_s_lora_in_the_second_place_is_told_apart_too(tmp_path):
    pipe = tiny_wan_pipeline("wan22")
    high = lora_files.lightning(pipe.transformer).save(tmp_path / "lightning_high.safetensors")
    low = lora_files.style(pipe.transformer_2).save(tmp_path / "lightning_low.safetensors")
    with trp.use_distilled(pipe, (high, low)) as handle:
        assert "recognised only by its name (it has matrices for 2 of the blocks' 20 linears)" in str(handle)


def test_a_causvid_lora_has_times_of_its_own(tmp_path):
    pipe = tiny_wan_pipeline()
    name = "Wan21_CausVid_14B_T2V_lora_rank32.safetensors"
    source = lora_files.lightx2v(pipe.transformer, 32).save(tmp_path / name)
    for recipe in (None, "causvid"):
        with trp.use_distilled(pipe, source, recipe) as handle:
            assert str(handle).startswith("causvid-lora (")
            assert len(pipe.scheduler.timesteps) == 9


@pytest.mark.parametrize("recipe", ["lightx2v", "fastwan", "rcm"])
def test_a_saved_pipeline_keeps_its_sampler(recipe, tmp_path):
    pipe = tiny_wan_pipeline("wan22")
    with trp.use_distilled(pipe, recipe=recipe):
        steps = len(pipe.scheduler.timesteps)
        expected = frames_of(pipe, num_inference_steps=steps, seed=1)
        pipe.save_pretrained(tmp_path)
    library, _ = json.loads((tmp_path / "model_index.json").read_text())["scheduler"]
    # diffusers loads only from a module that is imported already.
    assert f"`import {library}`" in CHECKPOINTS.read_text()
    models = {name: pipe.components[name] for name in ("transformer", "transformer_2", "vae", "text_encoder")}
    loaded = WanPipeline.from_pretrained(tmp_path, **models)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded.scheduler) is (RCMScheduler if recipe == "rcm" else FewStepScheduler)
    from_disk = loaded.scheduler
    with trp.use_distilled(loaded) as handle:
        assert "(the pipeline's own)" in str(handle)
        found = frames_of(loaded, num_inference_steps=steps, seed=1)
        assert torch.equal(found, expected)
    assert loaded.scheduler is from_disk


@pytest.mark.parametrize("recipe", ["rcm-i2v", "turbowan-i2v", "lightx2v-flf2v", "lightx2v-nvfp4-i2v"])
def test_recipes_of_images_are_refused_where_no_image_is_taken(recipe):
    for variant in ("t2v", "wan22", "ti2v"):
        pipe = tiny_wan_pipeline(variant)
        with pytest.raises(ValueError, match=f"'{recipe}' is not for WanPipeline; accepted are rcm, turbowan, fastwan"):
            trp.use_distilled(pipe, recipe=recipe)
        assert "prepare_latents" not in vars(pipe)
    for variant in ("i2v", "ti2v_i2v", "v2v"):
        with trp.use_distilled(tiny_wan_pipeline(variant), recipe=recipe) as handle:
            assert str(handle).startswith(f"{recipe} (as asked for)")
    own = dataclasses.replace(trp.RECIPES[recipe], name="own")
    with trp.use_distilled(tiny_wan_pipeline(), recipe=own) as handle:
        assert str(handle).startswith("own (as asked for)")


def test_copies(tmp_path):
    pipe = tiny_wan_pipeline()
    plain, before = videos(pipe), state(pipe)
    handle = trp.use_distilled(pipe, lora_files.lightx2v(pipe.transformer).save(tmp_path / LIGHTX2V))
    expected = videos(pipe)
    twin = copy.deepcopy(pipe)
    handle.restore()
    assert_untouched(pipe, before)
    assert torch.equal(videos(twin), expected)
    vars(twin)[HANDLE].restore()
    assert torch.equal(videos(twin), plain)
    assert not torch.equal(plain, expected)
