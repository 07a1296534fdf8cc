import pytest
import torch
from diffusers import DiffusionPipeline

import turbo_rcm_patch as trp
from turbo_rcm_patch import embedded


def small_video(pipe, prompt="a fox", seed=0):
    handle = trp.use_rcm(pipe)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    size = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 1.0}
    frames = pipe(prompt, generator=generator, output_type="pt", **size).frames
    handle.restore()
    return frames


def token_ids(pipe, prompt):
    return pipe.tokenizer(prompt).input_ids


def states(pipe):
    models = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {f"{name}.{key}": value for name, model in models.items() for key, value in model.state_dict().items()}


def test_weights_are_the_same_whatever_the_global_seed_which_stays():
    torch.manual_seed(1)
    first = trp.load_embedded_pipeline()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    second = trp.load_embedded_pipeline()
    assert all(torch.equal(value, states(second)[key]) for key, value in states(first).items())


def test_only_stock_classes_and_the_few_step_scheduler():
    pipe = trp.load_embedded_pipeline()
    modules = [m for part in pipe.components.values() if isinstance(part, torch.nn.Module) for m in part.modules()]
    homes = {type(module).__module__.split(".")[0] for module in modules}
    assert homes <= {"torch", "diffusers", "transformers"}
    assert type(pipe.scheduler) is trp.RCMScheduler
    assert not any(module.training for module in modules)
    assert pipe.transformer.config.attention_head_dim in (64, 128)


def test_every_script_has_its_own_tokens():
    pipe = trp.load_embedded_pipeline()
    assert token_ids(pipe, "狐") != token_ids(pipe, "猫")
    assert pipe.tokenizer.unk_token_id not in token_ids(pipe, "狐 é 🦊 a")
    assert pipe.tokenizer.decode(token_ids(pipe, "狐 é 🦊 a"), skip_special_tokens=True) == "狐 é 🦊 a"
    assert max(token_ids(pipe, "".join(map(chr, range(1, 3000))))) < pipe.text_encoder.config.vocab_size


def test_default_size_keeps_the_rules_of_real_wan():
    pipe = trp.load_embedded_pipeline()
    assert (pipe.vae_scale_factor_spatial, pipe.vae_scale_factor_temporal) == (8, 4)
    assert embedded.HEIGHT % 16 == embedded.WIDTH % 16 == 0
    assert embedded.FRAMES % 4 == 1


def test_prompt_seed_and_weights_all_show_in_the_video():
    pipe = trp.load_embedded_pipeline()
    base = small_video(pipe)
    assert base.shape == (1, 5, 3, 32, 48)
    assert torch.equal(small_video(pipe), base)
    assert (small_video(pipe, prompt="a 猫") - base).abs().mean() > 1e-3
    assert (small_video(pipe, seed=1) - base).abs().mean() > 1e-3
    assert base.std() > 0.02  # neither blank nor clipped
    assert ((base == 0) | (base == 1)).float().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_matches_what_from_pretrained_gives(tmp_path, dtype):
    trp.load_embedded_pipeline().save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path, dtype=dtype)
    built = trp.load_embedded_pipeline(dtype)
    for name in ("transformer", "vae"):
        expected = getattr(loaded, name).state_dict()
        assert {key: value.dtype for key, value in getattr(built, name).state_dict().items()} == {
            key: value.dtype for key, value in expected.items()
        }
    kept = [key for key, value in built.transformer.state_dict().items() if value.dtype == torch.float32]
    assert any("scale_shift_table" in key for key in kept)
    assert built.transformer.blocks[0].attn1.to_q.weight.dtype == dtype
    assert built.transformer.rope.freqs_cos.dtype == loaded.transformer.rope.freqs_cos.dtype == torch.float32


def test_saved_pipeline_loads_and_makes_the_same_video(tmp_path):
    pipe = trp.load_embedded_pipeline()
    pipe.save_pretrained(tmp_path)
    assert torch.equal(small_video(DiffusionPipeline.from_pretrained(tmp_path)), small_video(pipe))
