import inspect
import random

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from embedded_training import data
from embedded_training.data import LatentPool, draw_videos, encode, token_ids
from embedded_training.models import MAX_TEXT_TOKENS, build_pipeline, build_text_encoder, build_vae, train_tokenizer
from embedded_training.progress import Run
from embedded_training.text import embed
from transformers import PreTrainedTokenizerFast

from turbo_rcm_patch.embedded import WEIGHTS
from turbo_rcm_patch.shapes import render
from turbo_rcm_patch.shapes.grammar import draw_scene, is_held_out, parse_caption

CPU = torch.device("cpu")


def test_the_tokenizer_is_the_one_that_ships():
    shipped = PreTrainedTokenizerFast.from_pretrained(WEIGHTS / "tokenizer")
    assert train_tokenizer().get_vocab() == shipped.get_vocab()
    caption = "A Red circle, moves up; quickly on WHITE!"
    assert train_tokenizer()(caption).input_ids == shipped(caption).input_ids


def test_the_tokenizer_knows_held_out_captions_and_ignores_case_and_punctuation():
    tokenizer, generator = train_tokenizer(), random.Random(1)
    for _ in range(50):
        caption = str(draw_scene(generator, held_out=True))
        assert tokenizer.unk_token_id not in tokenizer(caption).input_ids
        assert tokenizer(f"{caption.upper()}!").input_ids == tokenizer(caption.replace(",", "")).input_ids
    assert tokenizer.unk_token_id in tokenizer("a red fox").input_ids


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


def test_embeddings_are_what_the_pipeline_gives_the_transformer():
    torch.manual_seed(0)
    tokenizer = train_tokenizer()
    transformer = WanTransformer3DModel(num_attention_heads=1, attention_head_dim=16, num_layers=1, ffn_dim=8)
    pipe = build_pipeline(build_vae(), transformer, build_text_encoder(tokenizer), tokenizer, flow_shift=3.0)
    assert inspect.signature(WanPipeline.__call__).parameters["max_sequence_length"].default == MAX_TEXT_TOKENS
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
    torch.manual_seed(0)
    vae, tokenizer = build_vae(), train_tokenizer()
    vae.register_to_config(latents_mean=[0.5] * 16, latents_std=[0.25] * 16)
    run = Run(tmp_path, seed=0)
    pool = LatentPool(run, vae, tokenizer, 64)
    captions, video = draw_videos(64, run.seed_of("pool", 0), CPU)
    assert pool.latents.shape == (64, 16, 2, 4, 4)
    assert torch.equal(pool.token_ids, token_ids(tokenizer, captions))
    expected = (encode(vae, video[:2]) - 0.5) / 0.25
    error = (pool.latents[:2].float() - expected).norm() / expected.norm()
    assert error < 0.03  # a bf16 encoder
    latents, ids = pool.draw(7)
    assert latents.dtype == torch.float32
    found = [(pool.latents.float() == one).flatten(1).all(dim=1) for one in latents]
    assert all(torch.equal(pool.token_ids[mask][0], one) for mask, one in zip(found, ids, strict=True))


def test_every_caption_fits_its_token_ids():
    longest = "a large yellow triangle moves right quickly while a small purple square moves left slowly, on white"
    assert parse_caption(longest) is not None
    assert len(train_tokenizer()(longest).input_ids) <= data.MAX_CAPTION_TOKENS
