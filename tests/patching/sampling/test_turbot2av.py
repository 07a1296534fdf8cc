"""TurboT2AV's sampler on LTX-2's pipelines: the published algorithm, written anew, and what pipelines do around it."""

import copy
import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file

import turbo_rcm_patch as trp
from tests import lora_files
from tests.oracle import relative_error
from tests.tiny_ltx2 import tiny_ltx2_call, tiny_ltx2_pipeline
from tests.tiny_wan import tiny_wan_pipeline, tiny_wan_transformer
from turbo_rcm_patch.recipes import RECIPES, Recipe
from turbo_rcm_patch.scheduler import scheduler_of

VIDEO, AUDIO = (1, 4, 3, 4, 6), (1, 2, 5, 2)  # latents
ANGLES = [math.pi / 2, 1.5, 1.4, 1.0]
GUIDANCE = ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")


def few_step_call(kind="text", seed=5, **overrides):
    """A call as users make it: without a word about guidance, and without a negative prompt."""
    call = tiny_ltx2_call(kind, generator=torch.Generator().manual_seed(seed), **overrides)
    without = (*GUIDANCE, "negative_prompt_embeds", "negative_prompt_attention_mask")
    return {name: value for name, value in call.items() if name not in without}


def calls_of(pipe):
    """The arguments of each call of a pipeline's transformer, and what it returns."""
    found = []

    def note(module, args, kwargs, output):
        found.append((kwargs, output))

    pipe.transformer.register_forward_hook(note, with_kwargs=True)
    return found


def normalised(pipe, video, audio):
    """The pipeline's latents as the transformer has them: [B, S, C] each."""
    video = pipe._normalize_latents(video, pipe.vae.latents_mean, pipe.vae.latents_std, pipe.vae.config.scaling_factor)
    audio = pipe._pack_audio_latents(audio)
    return pipe._pack_latents(video), pipe._normalize_audio_latents(
        audio, pipe.audio_vae.latents_mean, pipe.audio_vae.latents_std
    )


def published(backbone, video, audio, angles, noise):
    """TurboT2AV's algorithm: x_t = cos t · x0 + sin t · ε, both streams in one call of the backbone, which predicts
    the velocity of rectified flow at x_t / (cos t + sin t)."""
    states = [video.double(), audio.double()]  # sin(π/2) · noise
    for t, after in zip(angles, [*angles[1:], None], strict=True):
        total = math.cos(t) + math.sin(t)
        u = math.sin(t) / total
        scaled = [x / total for x in states]
        velocities = backbone(*(x.float() for x in scaled), bf16_timestep(t))
        clean = [x - u * v.double() for x, v in zip(scaled, velocities, strict=True)]
        if after is None:
            return clean
        states = [math.cos(after) * x + math.sin(after) * noise(x.shape).double() for x in clean]


def bf16_timestep(t):
    """The timestep that the authors' model gets for an angle: all of their inference is in bf16."""
    t = torch.tensor(t, dtype=torch.bfloat16)
    return 1000 * (t.sin() / (t.cos() + t.sin()))


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize(("patched", "steps"), [(True, 1), (True, 2), (False, 4)])
def test_both_streams_equal_the_published_algorithm(steps, seed, patched):
    pipe = tiny_ltx2_pipeline()
    if patched:
        trp.patch(pipe)
    trp.use_distilled(pipe, recipe="turbot2av")
    calls = calls_of(pipe)
    found = normalised(pipe, *pipe(**few_step_call(seed=seed, num_inference_steps=steps)))
    assert len(calls) == steps  # no guidance of any kind
    given = dict(calls[0][0])

    def backbone(video, audio, timestep):
        timestep = timestep.float().expand(1)
        own = {"hidden_states": video, "audio_hidden_states": audio, "timestep": timestep, "sigma": timestep}
        with torch.no_grad():
            return pipe.transformer(**{**given, **own})

    generator = torch.Generator().manual_seed(seed)
    video_noise = pipe._pack_latents(torch.randn(VIDEO, generator=generator))
    first = video_noise, pipe._pack_audio_latents(torch.randn(AUDIO, generator=generator))
    assert torch.equal(given["hidden_states"], first[0])
    assert torch.equal(given["audio_hidden_states"], first[1])

    def noise(shape):  # of the video, then of the sound, in each step
        return torch.randn(shape, generator=generator)

    expected = published(backbone, *first, ANGLES[:steps], noise)
    assert all(relative_error(*pair) <= 1e-4 for pair in zip(found, expected, strict=True))
    assert len(calls) == 2 * steps


def test_times_are_those_of_the_angles():
    scheduler = scheduler_of(RECIPES["turbot2av"])
    exact = [math.sin(t) / (math.cos(t) + math.sin(t)) for t in ANGLES]
    assert scheduler.sigmas.tolist() == pytest.approx([*exact, 0.0], abs=1e-15)
    assert scheduler.sigmas[0] == 1.0
    assert scheduler.timesteps.tolist() == [float(bf16_timestep(t)) for t in ANGLES]
    assert 1000 * scheduler.sigmas[:-1].float() == pytest.approx(scheduler.timesteps, rel=2**-7)


def test_the_first_frame_of_an_image_stays():
    pipe = tiny_ltx2_pipeline("image")
    trp.use_distilled(pipe, recipe="turbot2av")
    calls = calls_of(pipe)
    video, audio = pipe(**few_step_call("image", num_inference_steps=4))
    assert len(calls) == 4
    frame = slice(0, 24)  # 4 × 6 tokens
    first = calls[0][0]["hidden_states"][:, frame]
    for kwargs, _ in calls:
        assert torch.equal(kwargs["hidden_states"][:, frame], first)
        assert not kwargs["timestep"][:, frame].any()
        assert (kwargs["timestep"][:, 24:] == kwargs["audio_timestep"]).all()
    assert video.dtype == audio.dtype == torch.float32
    assert torch.equal(
        pipe._pack_latents(pipe._normalize_latents(video, pipe.vae.latents_mean, pipe.vae.latents_std))[:, frame], first
    )


def test_one_seed_is_one_video_and_pipelines_without_a_generator_work():
    pipe = tiny_ltx2_pipeline()
    trp.use_distilled(pipe, recipe="turbot2av")
    first, again = (pipe(**few_step_call(num_inference_steps=2)) for _ in range(2))
    assert all(map(torch.equal, first, again))
    torch.manual_seed(3)
    video, _ = pipe(**few_step_call(num_inference_steps=2) | {"generator": None})
    torch.manual_seed(3)
    assert torch.equal(pipe(**few_step_call(num_inference_steps=2) | {"generator": None})[0], video)
    twin = copy.deepcopy(pipe)
    assert torch.equal(twin(**few_step_call(num_inference_steps=2))[0], first[0])


def test_restore_brings_guidance_and_scheduler_back():
    pipe = tiny_ltx2_pipeline()
    expected, own = pipe(**tiny_ltx2_call()), pipe.scheduler
    handle = trp.use_distilled(pipe, recipe="turbot2av")
    assert "turbot2av" in str(handle)
    assert "timesteps 1000, 928, 852, 608" in str(handle)
    few = pipe(**few_step_call(num_inference_steps=4))
    assert torch.equal(pipe(**few_step_call(num_inference_steps=4) | {"guidance_scale": 9.0})[0], few[0])
    handle.restore()
    assert pipe.scheduler is own
    assert {"encode_prompt", "prepare_latents"}.isdisjoint(vars(pipe))
    assert all(map(torch.equal, pipe(**tiny_ltx2_call()), expected))


def test_guidance_on_request():
    pipe = tiny_ltx2_pipeline()
    trp.use_distilled(pipe, recipe="turbot2av", classifier_free_guidance=True)
    calls = calls_of(pipe)
    pipe(**tiny_ltx2_call(num_inference_steps=2))
    assert [len(kwargs["hidden_states"]) for kwargs, _ in calls] == [
        2,
        1,
        1,
        2,
        1,
        1,
    ]  # and STG, and without the other stream


def test_times_of_a_call():
    pipe = tiny_ltx2_pipeline()
    trp.use_distilled(pipe, recipe="turbot2av")
    calls = calls_of(pipe)
    pipe(**few_step_call(num_inference_steps=2, sigmas=[0.9, 0.4]))
    assert [float(kwargs["timestep"]) for kwargs, _ in calls] == pytest.approx([900, 400])
    with pytest.raises(ValueError, match="turbot2av takes 1 to 4 steps"):
        pipe(**few_step_call(num_inference_steps=5))


def test_an_own_recipe_and_euler():
    """diffusers' own scheduler at the same sigmas gives the same."""
    sigmas = (1.0, 0.75, 0.5)
    pipe, plain = tiny_ltx2_pipeline(), tiny_ltx2_pipeline()
    plain.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    trp.use_distilled(pipe, recipe=Recipe("own", "euler", sigmas=sigmas))
    off = dict.fromkeys(("guidance_scale", "audio_guidance_scale", "modality_scale", "audio_modality_scale"), 1.0)
    off |= {"audio_stg_scale": None, "stg_scale": 0.0, "guidance_rescale": 0.0, "audio_guidance_rescale": 0.0}
    expected = plain(**few_step_call(num_inference_steps=3, sigmas=list(sigmas)) | off)
    found = pipe(**few_step_call(num_inference_steps=3))
    assert all(relative_error(*pair) <= 1e-5 for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "turbot2av"])
def test_wans_recipes_are_refused(recipe):
    pipe = tiny_ltx2_pipeline()
    with pytest.raises(
        ValueError, match=f"recipe='{recipe}' is not for LTX2Pipeline; accepted are turbot2av, or a Recipe"
    ):
        trp.use_distilled(pipe, recipe=recipe)
    assert "prepare_latents" not in vars(pipe)


def test_refusals():
    pipe = tiny_ltx2_pipeline()
    with pytest.raises(ValueError, match=r"begins at sigma 0\.9, but LTX2Pipeline begins with noise alone"):
        trp.use_distilled(pipe, recipe=Recipe("own", "euler", sigmas=(0.9, 0.5)))
    with pytest.raises(ValueError, match=r"give .* recipe=, one of turbot2av"):
        trp.use_distilled(pipe)
    with pytest.raises(
        TypeError, match="use_rcm is for Wan, not for LTX2Pipeline; call use_distilled with recipe='tur"
    ):
        trp.use_rcm(pipe)
    with pytest.raises(TypeError, match="does not know LTX2ConditionPipeline"):
        trp.use_distilled(tiny_ltx2_pipeline("condition"), recipe="turbot2av")
    assert "prepare_latents" not in vars(pipe)


def test_wan_refuses_it():
    with pytest.raises(ValueError, match="recipe='turbot2av' is not for WanPipeline; accepted are rcm, turbowan, "):
        trp.use_distilled(tiny_wan_pipeline(), recipe="turbot2av")


def test_a_model_of_its_name_is_recognised():
    pipe = tiny_ltx2_pipeline()
    pipe.transformer.register_to_config(_name_or_path="luyu1021/TurboT2AV")
    assert "turbot2av (named TurboT2AV" in str(trp.use_distilled(pipe))


def lora_file(model, path, blocks=2):
    """A LoRA under the authors' names, and the weights that it adds to, by diffusers' names."""
    generator, tensors, added = torch.Generator().manual_seed(7), {}, {}
    places = [f"transformer_blocks.{i}.{part}" for i in range(blocks) for part in ("attn1.to_q", "audio_ff.net.2")]
    for name in ["time_embed.linear", *places]:
        rows, columns = model.get_submodule(name.replace(f".{blocks - 1}.", ".0.")).weight.shape
        down, up = (0.2 * torch.randn(size, generator=generator) for size in ((4, columns), (rows, 4)))
        official = f"diffusion_model.{name.replace('time_embed', 'adaln_single')}"
        tensors |= {f"{official}.lora_A.weight": down, f"{official}.lora_B.weight": up}
        added[f"{name}.weight"] = up @ down
    save_file(tensors, path)
    return added


def test_a_lora_in_the_authors_names(tmp_path):
    path = tmp_path / "lora.safetensors"
    pipe, merged = tiny_ltx2_pipeline(), tiny_ltx2_pipeline()
    with torch.no_grad():
        for name, change in lora_file(pipe.transformer, path).items():
            merged.transformer.get_parameter(name).add_(change)
    before = {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}
    with pytest.raises(ValueError, match=r"lora\.safetensors: cannot be recognised; give .* one of turbot2av\."):
        trp.use_distilled(pipe, path)
    trp.use_distilled(merged, recipe="turbot2av")
    with trp.use_distilled(pipe, path, "turbot2av") as handle:
        assert "5 linears of rank 4" in str(handle)
        found, expected = (each(**few_step_call(num_inference_steps=2)) for each in (pipe, merged))
    assert all(relative_error(*pair) <= 1e-4 for pair in zip(found, expected, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.transformer.state_dict().items())
    lora_file(pipe.transformer, path, blocks=3)
    with pytest.raises(ValueError, match="is for a block that the model lacks; it has 2"):
        trp.use_distilled(pipe, path, "turbot2av")
    lora_files.lightx2v(tiny_wan_transformer()).save(path)
    with pytest.raises(ValueError, match="none of its keys fit a LTX2Video"):
        trp.use_distilled(pipe, path, "turbot2av")


@pytest.mark.gpu
def test_gpu_a_generator_on_the_cpu_gives_the_video_of_the_cpu():
    pipe = tiny_ltx2_pipeline()
    trp.use_distilled(pipe, recipe="turbot2av")
    expected = pipe(**few_step_call(num_inference_steps=4))
    pipe.to("cuda")
    found = pipe(**few_step_call(num_inference_steps=4, device="cuda"))
    assert all(relative_error(ours.cpu(), theirs) <= 0.02 for ours, theirs in zip(found, expected, strict=True))
