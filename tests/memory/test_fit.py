"""`fit` on tiny pipelines: results stay, everything goes back, bad input changes nothing."""

import re
from contextlib import nullcontext
from unittest import mock

import numpy
import pytest
import torch

import turbo_rcm_patch as trp
from tests.tiny_wan import FRAMES, HEIGHT, WIDTH, tiny_wan_pipeline
from turbo_rcm_patch.memory import host as host_module
from turbo_rcm_patch.memory import plan as plan_module
from turbo_rcm_patch.memory.checks import is_hooked, models_of
from turbo_rcm_patch.memory.choose import Placement
from turbo_rcm_patch.memory.components import components_of
from turbo_rcm_patch.memory.empty_models import empty_models
from turbo_rcm_patch.memory.stages import Patched, Video, unpatched_stages
from turbo_rcm_patch.memory.streaming import stop_streaming, stream
from turbo_rcm_patch.patching.families.vae.chunks import unpatched_decoding_bytes, unpatched_encoding_bytes

SIZE = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES}
VRAM = "10 GB"


def fit_on_the_cpu(pipe, vram=VRAM, **options):
    return trp.fit(pipe, vram, **{**SIZE, "device": "cpu", **options})


def video_of(pipe):
    generator = torch.Generator().manual_seed(0)
    return pipe("a fox", **SIZE, num_inference_steps=2, output_type="np", generator=generator).frames


def hooks_of(pipe):
    models = (m for m in pipe.components.values() if isinstance(m, torch.nn.Module))
    return [module for model in models for module in model.modules() if is_hooked(module)]


@pytest.mark.parametrize(
    ("variant", "tier", "first"),
    [("ti2v", None, "fit"), ("t2v", "exact", "patch"), ("wan22", "quantized", "fit"), ("t2v", "quantized", "patch")],
)
def test_streaming_changes_no_result_and_is_undone(everything_streams, variant, tier, first):
    pipe = tiny_wan_pipeline(variant)
    expected = video_of(pipe) if tier is None else None
    if tier is not None:
        with trp.patch(pipe, tier):
            expected = video_of(pipe)
    names = list(pipe.transformer.state_dict())
    if first == "patch":
        trp.patch(pipe, tier)
    plan = fit_on_the_cpu(pipe)
    if first == "fit" and tier is not None:
        trp.patch(pipe, tier)
    assert plan.placement.streaming >= {"text_encoder", "transformer"}
    assert len(hooks_of(pipe)) > len(pipe.transformer.blocks)
    assert abs(video_of(pipe) - expected).max() < 1e-6
    plan.undo()
    assert not hooks_of(pipe)
    assert not pipe.vae.use_tiling
    assert not any("forward" in vars(module) for module in pipe.text_encoder.modules())
    assert abs(video_of(pipe) - expected).max() < 1e-6
    assert list(pipe.transformer.state_dict()) == names
    plan.undo()  # nothing is left


def test_every_module_with_the_token_embeddings_reads_them_on_the_host(everything_streams):
    pipe = tiny_wan_pipeline()
    fit_on_the_cpu(pipe)
    encoder, hooked = pipe.text_encoder, hooks_of(pipe)
    assert encoder.shared in hooked
    assert encoder.encoder.embed_tokens in hooked  # another module with the same weight


def test_a_decoder_with_few_frames_gets_its_limit_until_undo(monkeypatch):
    monkeypatch.setattr(plan_module, "choose", lambda *_: Placement(frozenset(), tiles=False, decoding=2 * 10**9))
    pipe = tiny_wan_pipeline()
    plan = fit_on_the_cpu(pipe)
    assert vars(pipe.vae)[plan_module.LIMIT] == 2 * 10**9
    assert "on whole frames, as many at a time as 2.00 GB hold" in str(plan)
    plan.undo()
    assert plan_module.LIMIT not in vars(pipe.vae)


def test_a_limit_that_cannot_be_set_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(plan_module, "choose", lambda *_: Placement(frozenset(), tiles=False, decoding=2 * 10**9))
    pipe = tiny_wan_pipeline()

    def fail(self, name, value):
        raise MemoryError(name)

    with mock.patch.object(type(pipe.vae), "__setattr__", fail), pytest.raises(MemoryError):
        fit_on_the_cpu(pipe)
    fit_on_the_cpu(pipe).undo()  # no model is in the plan that failed


def test_the_plan_says_where_everything_is(everything_streams):
    text = str(fit_on_the_cpu(tiny_wan_pipeline("i2v")))
    for words in (
        "in all",
        "text_encoder",
        "token embeddings stay on the host",
        "transformer",
        "its blocks stream",
        "in tiles",
    ):
        assert words in text
    for stage in ("text encoding", "image encoding", "VAE encoding", "denoising", "decoding"):
        assert stage in text


def test_weights_in_8_bits_count_half():
    exact, quantized = (
        fit_on_the_cpu(tiny_wan_pipeline(dtype=torch.bfloat16), config=config)
        for config in ("exact", trp.Quantized(restorable=False))
    )
    of = {plan: next(c for c in plan.components if c.name == "transformer") for plan in (exact, quantized)}
    assert of[quantized].blocks < 0.6 * of[exact].blocks
    assert of[quantized].originals == 0
    kept = fit_on_the_cpu(tiny_wan_pipeline(dtype=torch.bfloat16), config="quantized")
    assert next(c for c in kept.components if c.name == "transformer").originals > 0


@pytest.mark.parametrize("tier", ["quantized", "exact"])
def test_a_plan_before_the_patch_counts_the_patched_weights(tier):
    before, after = (tiny_wan_pipeline(dtype=torch.bfloat16) for _ in range(2))
    trp.patch(after, tier)
    plans = fit_on_the_cpu(before, config=tier), fit_on_the_cpu(after)
    assert plans[0].components == plans[1].components
    assert plans[0].peaks == plans[1].peaks


def test_weights_that_move_before_the_patch_stores_8_bits_have_to_fit():
    models = empty_models("wan2.1-14b")
    patched, video = Patched(models, trp.Quantized()), Video(480, 832, 81)
    budget = plan_module.budget_of("24 GB")
    assert "transformer" not in plan_module.plan_for(patched, video, budget).placement.streaming
    as_they_are = components_of(models, trp.Exact())
    placement = plan_module.plan_for(patched, video, budget, as_they_are).placement
    assert "transformer" in placement.streaming
    assert sum(map(placement.on_gpu, as_they_are)) < budget


@pytest.mark.parametrize("fits", [False, True])
def test_what_streams_before_the_patch_stores_8_bits_has_to_fit_into_the_host(everything_streams, monkeypatch, fits):
    pipe = tiny_wan_pipeline(dtype=torch.bfloat16)
    pinned = sum(c.blocks for c in components_of(models_of(pipe), trp.Exact()))
    monkeypatch.setattr(
        host_module.psutil, "virtual_memory", lambda: mock.Mock(available=pinned if fits else pinned - 1)
    )
    with nullcontext() if fits else pytest.raises(trp.DoesNotFit, match="must stream from there"):
        fit_on_the_cpu(pipe, config=trp.Quantized(restorable=False))


@pytest.mark.parametrize("how", ["vae=False", "the transformer alone", "a replaced decoder"])
@pytest.mark.parametrize("variant", ["t2v", "i2v"])
def test_a_vae_that_is_not_patched_takes_more(how, variant):
    size = {"height": 480, "width": 832, "num_frames": 81}
    pipe, other = tiny_wan_pipeline(variant), tiny_wan_pipeline(variant)
    config = trp.Exact(vae=how != "vae=False")
    if how == "the transformer alone":
        trp.patch(pipe.transformer, config)
    if how == "a replaced decoder":
        pipe.vae._decode = pipe.vae._decode
    plan, usual = fit_on_the_cpu(pipe, config=config, **size), fit_on_the_cpu(other, **size)
    (decoding,) = (stage for stage in plan.stages if stage.name == "decoding")
    assert decoding.computing == unpatched_decoding_bytes(pipe.vae, 480, 832, 81)
    assert decoding.within is None  # diffusers takes a latent frame at a time
    if variant == "i2v":
        (encoding,) = (stage for stage in plan.stages if stage.name == "VAE encoding")
        assert encoding.computing == unpatched_encoding_bytes(pipe.vae, 480, 832, 81)
    assert plan.peaks["denoising"] == usual.peaks["denoising"]


def test_tiles_that_the_user_chose_count_and_stay():
    pipe = tiny_wan_pipeline()
    pipe.vae.enable_tiling()
    plan = fit_on_the_cpu(pipe, height=480, width=832, num_frames=81)
    assert "the VAE works in tiles" in str(plan)
    assert (
        plan.peaks["decoding"]
        < fit_on_the_cpu(tiny_wan_pipeline(), height=480, width=832, num_frames=81).peaks["decoding"]
    )
    plan.undo()
    assert pipe.vae.use_tiling


def test_a_video_within_a_tile_keeps_few_frames_at_a_time(monkeypatch):
    monkeypatch.setattr(plan_module, "choose", lambda *_: Placement(frozenset(), tiles=False, decoding=2 * 10**9))
    monkeypatch.setattr(Placement, "largest_room", lambda placement, *_: 10**12 * placement.tiles)
    pipe = tiny_wan_pipeline()
    pipe.vae.enable_tiling()
    assert fit_on_the_cpu(pipe).placement.decoding == 2 * 10**9


def test_the_text_encoder_in_8_bits_is_named_where_it_fits():
    patched, video = Patched(empty_models("wan2.1-1.3b"), trp.Quantized(restorable=False)), Video(256, 256, 17)
    for gigabytes, expected in (
        (2, r"It fits with the text encoder in 8 bits \(trp\.patch"),
        (1.5, "Not even one frame"),
    ):
        with pytest.raises(trp.DoesNotFit, match=rf"\(text encoding, .* {expected}"):
            plan_module.plan_for(patched, video, plan_module.budget_of(f"{gigabytes} GB"))


def test_free_memory_is_that_of_one_gpu(monkeypatch):
    monkeypatch.setattr(plan_module, "free_memory", lambda device: 100)
    weights = [mock.Mock(device=torch.device(name), nbytes=size) for name, size in (("cuda:0", 20), ("cuda:1", 4000))]
    model = mock.Mock(parameters=lambda: weights, buffers=list)
    assert plan_module._free({"transformer": model}, torch.device("cuda:0")) == round(0.95 * 120)


def test_too_little_names_what_is_missing_and_what_fits():
    pipe = tiny_wan_pipeline()
    with pytest.raises(
        trp.DoesNotFit, match=r"take at least \d+\.\d\d GB .*0\.61 GB are given\. Not even one frame of 48x32 fits\."
    ):
        fit_on_the_cpu(pipe, "610 MB")
    with pytest.raises(trp.DoesNotFit, match=r"It fits with num_frames="):
        fit_on_the_cpu(pipe, "1.2 GB", height=480, width=832, num_frames=201)
    assert not hooks_of(pipe)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vram": "8 TB"}, "no amount of memory"),
        ({"vram": None}, "free on a GPU"),
        ({"height": 33}, "height=33; give a multiple of 16, such as 32"),
        ({"width": 0}, "width=0; give a multiple of 16, such as 16"),
        ({"width": 48.0}, "width=48.0; give a multiple of 16, such as 48"),
        ({"num_frames": 80}, "num_frames=80; give 4k[+]1, such as 81"),
        ({"num_frames": None}, "num_frames=None; give 4k[+]1, such as 81"),
        ({"num_frames": True}, "num_frames=True; give 4k[+]1, such as 81"),
        ({"device": "meta"}, "device='meta'; give a GPU"),
        ({"device": None}, "device=None; give a GPU"),
        ({"config": "fast"}, "fast"),
    ],
)
def test_bad_input(options, message):
    pipe = tiny_wan_pipeline()
    with pytest.raises(ValueError, match=message):
        fit_on_the_cpu(pipe, **options)
    assert not hooks_of(pipe)


def test_sizes_as_numpys_integers():
    sizes = (numpy.int64(SIZE[name]) for name in SIZE)
    plan = fit_on_the_cpu(tiny_wan_pipeline(), numpy.int64(10**10), **dict(zip(SIZE, sizes, strict=True)))
    assert list(map(type, plan.video)) == [int] * 3
    assert type(plan.budget) is int


def test_the_nearest_setting_may_differ_in_all_that_counts():
    patched = Patched(empty_models("wan2.1-14b"), trp.Exact())
    for video, gigabytes, nearest in (
        (Video(720, 1280, 81), 8, "It fits with the preset 'quantized'."),
        (Video(1280, 720, 81), 6, "It fits with height=832, width=480."),
        (Video(480, 832, 10**6 + 1), 8, "It fits with num_frames=161."),
        (Video(8192, 8192, 401), 5, "It fits with height=480, width=832 and num_frames="),
    ):
        with pytest.raises(trp.DoesNotFit) as caught:
            plan_module.plan_for(patched, video, gigabytes * 10**9 - plan_module.CONTEXT)
        assert nearest in str(caught.value)


def test_the_least_that_an_error_names_is_enough():
    patched = Patched(empty_models("wan2.1-1.3b"), trp.Exact())
    for frames in (5, 33, 81):
        with pytest.raises(trp.DoesNotFit) as caught:
            plan_module.plan_for(patched, Video(480, 832, frames), 0)
        (named,) = re.findall(r"take at least (\S+ GB)", str(caught.value))
        plan_module.plan_for(patched, Video(480, 832, frames), plan_module.budget_of(named))


def test_a_tier_that_fit_refuses_is_not_named():
    """On a GPU without kernels of this package."""
    patched = Patched(empty_models("wan2.1-14b"), trp.Exact(), capability=(0, 0))
    with pytest.raises(trp.DoesNotFit, match=r"8\.00 GB are given\. It fits with num_frames=29\."):
        plan_module.plan_for(patched, Video(720, 1280, 81), plan_module.budget_of("8 GB"))


def test_undo_goes_on_where_it_failed(everything_streams):
    pipe = tiny_wan_pipeline()
    failing = [torch.OutOfMemoryError("the card is full"), None]
    with mock.patch.object(pipe.text_encoder, "to", side_effect=failing) as back:
        plan = fit_on_the_cpu(pipe)
        with pytest.raises(torch.OutOfMemoryError):
            plan.undo()
        with pytest.raises(ValueError, match="is in a plan of fit already"):
            fit_on_the_cpu(pipe)
        plan.undo()
    assert back.call_count == 2
    assert not hooks_of(pipe)
    fit_on_the_cpu(pipe)


def test_more_memory_than_the_card_has(monkeypatch):
    card = mock.Mock(total_memory=25_757_220_864)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    pipe = tiny_wan_pipeline()
    with pytest.raises(ValueError, match=r"vram='24 GiB', but cuda has 25\.76 GB; give at most that, or None"):
        trp.fit(pipe, "24 GiB", **SIZE, device="cuda")
    assert all(parameter.device.type == "cpu" for parameter in pipe.transformer.parameters())


@pytest.mark.parametrize("gpu", ["cuda:7", "cuda"])
def test_a_gpu_that_is_not_there(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=f"device='{gpu}', but PyTorch finds 0 CUDA GPUs; check the driver"):
        fit_on_the_cpu(tiny_wan_pipeline(), device=gpu)


OFFLOADED = {
    "model": lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(device="cpu"),
}


@pytest.mark.parametrize("kind", OFFLOADED)
def test_a_pipeline_that_is_offloaded_otherwise_can_be_planned_after_that_is_undone(kind):
    pipe = tiny_wan_pipeline()
    OFFLOADED[kind](pipe)
    with pytest.raises(ValueError, match=r"is offloaded or hooked already; undo that, .* pipe\.remove_all_hooks\(\)"):
        fit_on_the_cpu(pipe)
    pipe.remove_all_hooks()
    expected = video_of(tiny_wan_pipeline())
    fit_on_the_cpu(pipe)
    assert abs(video_of(pipe) - expected).max() == 0


def test_components_that_are_none_or_have_two_names():
    pipe = tiny_wan_pipeline("wan22")
    pipe.transformer_2, pipe.text_encoder = pipe.transformer, None
    assert models_of(pipe).keys() == {"transformer", "vae"}
    pipe.vae, vae = None, pipe.vae
    with pytest.raises(ValueError, match="has no VAE; load it with its VAE"):
        fit_on_the_cpu(pipe)
    pipe.vae, pipe.transformer, pipe.transformer_2 = vae, None, None
    with pytest.raises(ValueError, match="has no transformer; load it with its transformer"):
        fit_on_the_cpu(pipe)


def test_what_cannot_be_planned():
    pipe = tiny_wan_pipeline()
    with pytest.raises(ValueError, match="no diffusers pipeline"):
        fit_on_the_cpu(pipe.transformer)
    with pytest.raises(ValueError, match="Mock is no diffusers pipeline"):
        fit_on_the_cpu(mock.Mock(spec=["components"], components=pipe.components))
    pipe.transformer.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    with pytest.raises(ValueError, match="transformer is offloaded"):
        fit_on_the_cpu(pipe)
    pipe = tiny_wan_pipeline()
    pipe.vae.to("meta")
    with pytest.raises(ValueError, match="vae has weights on the meta device, without values; load them first"):
        fit_on_the_cpu(pipe)
    pipe = tiny_wan_pipeline()
    pipe.text_encoder = torch.compile(pipe.text_encoder)
    with pytest.raises(ValueError, match=r"text_encoder is compiled; set pipe\.text_encoder to .*\._orig_mod"):
        fit_on_the_cpu(pipe)
    pipe = tiny_wan_pipeline()
    with trp.patch(pipe), pytest.raises(ValueError, match="leave config out"):
        fit_on_the_cpu(pipe, config="quantized")


@pytest.mark.parametrize("shared", ["transformer", "text_encoder"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_model_is_in_one_plan_at_a_time(shared, streams, request):
    if streams:
        request.getfixturevalue("everything_streams")
    pipe, other = tiny_wan_pipeline(), tiny_wan_pipeline()
    setattr(other, shared, getattr(pipe, shared))
    plan = fit_on_the_cpu(pipe)
    with pytest.raises(ValueError, match=rf"{shared} is in a plan of fit already; call undo\(\) of that plan first"):
        fit_on_the_cpu(other)
    plan.undo()
    fit_on_the_cpu(other).undo()
    fit_on_the_cpu(pipe)


def test_a_failure_in_the_middle_puts_everything_back(everything_streams):
    pipe = tiny_wan_pipeline("wan22")
    expected = video_of(pipe)

    def fail_at_the_second(model, device):
        if model is pipe.transformer_2:
            stream(model, device)
            raise torch.OutOfMemoryError("no more")
        stream(model, device)

    with mock.patch.object(plan_module, "stream", fail_at_the_second), pytest.raises(torch.OutOfMemoryError):
        fit_on_the_cpu(pipe)
    assert not hooks_of(pipe)
    assert not pipe.vae.use_tiling
    assert abs(video_of(pipe) - expected).max() == 0
    fit_on_the_cpu(pipe)  # no model is in the plan that failed


def test_a_host_that_is_too_small(everything_streams, monkeypatch):
    monkeypatch.setattr(host_module.psutil, "virtual_memory", lambda: mock.Mock(available=1))
    pipe = tiny_wan_pipeline()
    message = (
        r"this takes (\d+\.\d\d GB) more of the host's memory, because text_encoder and transformer must stream from "
        r"there, and 0\.00 GB are free; .* offload to disk instead of fit \(enable_group_offload with "
        r"offload_to_disk_path\)"
    )
    with pytest.raises(trp.DoesNotFit, match=message) as caught:
        fit_on_the_cpu(pipe)
    assert not hooks_of(pipe)
    enough = plan_module.parse_amount(re.search(message, str(caught.value))[1])
    monkeypatch.setattr(host_module.psutil, "virtual_memory", lambda: mock.Mock(available=enough))
    fit_on_the_cpu(pipe)


def test_guidance_makes_no_step_of_wan_larger():
    """Wan's pipelines compute the two samples one after the other."""
    pipe, video, peaks = tiny_wan_pipeline(), Video(HEIGHT, WIDTH, FRAMES), []
    for install in (nullcontext, trp.use_rcm):
        with install(pipe):
            plan = plan_module.fit_with(pipe, VRAM, video, None, "cpu", unpatched_stages)
            peaks.append(plan.peaks)
            plan.undo()
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(("version", "prefix"), [(0, ""), (1, "total_")])
def test_a_containers_limit_counts(version, prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(host_module, "CGROUP", tmp_path)
    free = 10**12
    monkeypatch.setattr(host_module.psutil, "virtual_memory", lambda: mock.Mock(available=free))
    assert host_module.free_memory() == free
    limit, used, statistics, _ = (tmp_path / name for name in host_module.CONTAINERS[version])
    limit.parent.mkdir(exist_ok=True)
    used.write_text("9000000\n")
    statistics.write_text(f"cache 5\n{prefix}active_file 3000000\n{prefix}inactive_file 1000000\n")
    for given, expected in (("max\n", free), ("20000000\n", 15_000_000), (f"{2 * free}\n", free)):
        limit.write_text(given)
        assert host_module.free_memory() == expected


def test_weights_of_a_mapped_file_take_memory_when_they_are_pinned(everything_streams, monkeypatch):
    pipe = tiny_wan_pipeline()
    pinned = sum(component.blocks for component in fit_on_the_cpu(pipe).components)
    free = 1.5 * pinned
    monkeypatch.setattr(host_module.psutil, "virtual_memory", lambda: mock.Mock(available=free))
    for ordinary, fits in ((0, False), (pinned, True)):
        monkeypatch.setattr(host_module, "_ordinary_memory", lambda size=ordinary: size)
        with nullcontext() if fits else pytest.raises(trp.DoesNotFit, match="of the host's memory"):
            fit_on_the_cpu(tiny_wan_pipeline())


def test_streaming_leaves_hooks_of_others(everything_streams):
    """A cache or another hook on a block is not ours to remove."""
    from diffusers.hooks import HookRegistry, ModelHook

    pipe = tiny_wan_pipeline()
    stream(pipe.transformer, torch.device("cpu"))
    block = pipe.transformer.blocks[0]
    HookRegistry.check_if_exists_or_initialize(block).register_hook(ModelHook(), "somebody's")
    stop_streaming(pipe.transformer)
    assert list(block._diffusers_hook.hooks) == ["somebody's"]
