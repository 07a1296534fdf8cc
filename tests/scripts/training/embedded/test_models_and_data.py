import torch
from diffusers import WanTransformer3DModel
from transformers import PreTrainedTokenizerFast

from scripts.training.embedded import data
from scripts.training.embedded.data import LatentPool, VideoPool, draw_videos, encode, is_foreground, token_ids
from scripts.training.embedded.models import (
    MAX_TEXT_TOKENS,
    TextToVideoAttention,
    build_pipeline,
    build_text_encoder,
    build_transformer,
    build_vae,
    channels_last,
    train_tokenizer,
)
from scripts.training.embedded.progress import Run
from scripts.training.embedded.text import embed
from tests.tiny_wan import PIPELINE_TEXT_TOKENS
from turbo_rcm_patch.embedded import WEIGHTS
from turbo_rcm_patch.shapes import render
from turbo_rcm_patch.shapes.grammar import BACKGROUNDS, is_held_out, parse_caption

CPU = torch.device("cpu")


def test_the_tokenizer_is_the_one_that_ships():
    shipped = PreTrainedTokenizerFast.from_pretrained(WEIGHTS / "tokenizer")
    assert train_tokenizer().get_vocab() == shipped.get_vocab()
    caption = "A Red circle, moves up; quickly on WHITE!"
    assert train_tokenizer()(caption).input_ids == shipped(caption).input_ids


def test_videos_are_seeded_and_show_no_held_out_triple(monkeypatch):
    monkeypatch.setattr(render, "HEIGHT", 32)
    monkeypatch.setattr(render, "WIDTH", 48)
    captions, video = draw_videos(20, 3, CPU)
    again, same = draw_videos(20, 3, CPU)
    assert captions == again
    assert torch.equal(video, same)
    assert video.shape == (20, 3, render.FRAMES, 32, 48)
    assert (video.min(), video.max()) == (-1, 1)
    objects = [part for caption in captions for part in parse_caption(caption).objects]
    assert not any(is_held_out(part.colour, part.shape, part.direction) for part in objects)


def test_foreground_is_what_differs_from_the_background():
    video = torch.full((1, 3, 2, 8, 8), 0.4)
    video[:, 1, 0, 2:4, 2:5] = -0.2
    foreground = is_foreground(video, torch.full((1, 3, 1, 1, 1), 0.4))
    assert foreground.shape == (1, 1, 2, 8, 8)
    assert foreground[0, 0, 0, 2:4, 2:5].all()
    assert foreground.sum() == 6


def test_the_video_pool_draws_whole_videos_and_squares_around_objects(monkeypatch, tmp_path):
    monkeypatch.setattr(render, "HEIGHT", 96)
    monkeypatch.setattr(render, "WIDTH", 128)
    monkeypatch.setattr(render, "FRAMES", 5)
    monkeypatch.setattr(data, "_AT_ONCE", 8)
    run = Run(tmp_path, seed=0)
    pool = VideoPool(run, 9)
    videos = torch.cat([draw_videos(8, run.seed_of("videos", index), CPU)[1] for index in (0, 8)])
    torch.manual_seed(0)
    clips, backgrounds = pool.draw(3)
    assert clips.shape == (3, 3, render.FRAMES, render.HEIGHT, render.WIDTH)
    for clip, background in zip(clips, backgrounds, strict=True):
        errors = (videos - clip).abs().amax(dim=(1, 2, 3, 4))
        assert errors.min() < 1 / 127  # it is one of the drawn videos, rounded to bytes
        palette = 2 * torch.tensor([render.RGB[name] for name in BACKGROUNDS]) - 1
        assert (palette - background.flatten()).abs().amax(dim=1).min() < 1e-6
    torch.manual_seed(0)
    squares, backgrounds = pool.draw(16, side=48)
    assert squares.shape == (16, 3, render.FRAMES, 48, 48)
    seen = is_foreground(squares, backgrounds).any(dim=2)
    assert seen[..., 12:-12, 12:-12].flatten(1).any(dim=1).float().mean() > 0.9  # those at a border lie elsewhere


def test_embeddings_are_what_the_pipeline_gives_the_transformer():
    tokenizer = train_tokenizer()
    transformer = WanTransformer3DModel(num_attention_heads=1, attention_head_dim=16, num_layers=1, ffn_dim=8)
    pipe = build_pipeline(build_vae(), transformer, build_text_encoder(tokenizer), tokenizer, flow_shift=3.0)
    assert PIPELINE_TEXT_TOKENS == MAX_TEXT_TOKENS
    captions = ["a red circle moves up", "a small blue cross moves left slowly, on black", ""]
    with torch.no_grad():
        expected = pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=MAX_TEXT_TOKENS)[
            0
        ]
        actual = embed(pipe.text_encoder, token_ids(tokenizer, captions))
    torch.testing.assert_close(actual, expected)


def test_the_pool_holds_normalised_latents_in_the_order_of_their_captions(monkeypatch, tmp_path):
    monkeypatch.setattr(render, "HEIGHT", 32)
    monkeypatch.setattr(render, "WIDTH", 32)
    monkeypatch.setattr(render, "FRAMES", 5)
    vae, tokenizer = build_vae(), train_tokenizer()
    vae.register_to_config(latents_mean=[0.5] * 16, latents_std=[0.25] * 16)
    run = Run(tmp_path, seed=0)
    monkeypatch.setattr(data, "_AT_ONCE", 2)
    pool = LatentPool(run, vae, tokenizer, 4)
    parts = [draw_videos(2, run.seed_of("pool", index), CPU) for index in (0, 2)]
    captions, video = [caption for part, _ in parts for caption in part], torch.cat([part for _, part in parts])
    assert pool.latents.shape == (4, 16, 2, 4, 4)
    assert torch.equal(pool.token_ids, token_ids(tokenizer, captions))
    expected = (encode(vae, video[1:3]) - 0.5) / 0.25
    error = (pool.latents[1:3].float() - expected).norm() / expected.norm()
    assert error < 0.03  # a bf16 encoder
    latents, ids = pool.draw(7)
    assert latents.dtype == torch.float32
    found = [(pool.latents.float() == one).flatten(1).all(dim=1) for one in latents]
    assert all(torch.equal(pool.token_ids[mask][0], one) for mask, one in zip(found, ids, strict=True))


def test_attention_for_training_computes_what_stock_attention_does():
    transformer = build_transformer()
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    inputs = torch.randn(2, 16, 2, 6, 8), torch.tensor([300.0, 700.0]), torch.randn(2, 7, 128)
    with torch.no_grad():
        expected = transformer(*inputs, return_dict=False)[0]
        transformer.set_attn_processor(TextToVideoAttention())
        torch.testing.assert_close(transformer(*inputs, return_dict=False)[0], expected, rtol=1e-4, atol=1e-4)


def test_the_layout_of_weights_changes_no_result():
    vae, video = build_vae(), torch.randn(1, 3, 5, 16, 16)
    with torch.no_grad():
        expected = vae(video).sample
        channels_last(vae)
        torch.testing.assert_close(vae(video).sample, expected, rtol=1e-4, atol=1e-5)
    assert vae.encoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert vae.encoder.mid_block.attentions[0].to_qkv.weight.is_contiguous(memory_format=torch.channels_last)


def test_every_caption_fits_its_token_ids():
    longest = "a large yellow triangle moves right quickly while a small purple square moves left slowly, on white"
    assert parse_caption(longest) is not None
    assert len(train_tokenizer()(longest).input_ids) <= data.MAX_CAPTION_TOKENS
