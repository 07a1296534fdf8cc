"""The embedded model's parts: stock diffusers and transformers classes at sizes whose fp16 weights fit in 16 MiB."""

from __future__ import annotations

import random

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from turbo_rcm_patch.shapes.grammar import draw_scene

TEXT_DIM = 128
MAX_TEXT_TOKENS = 512  # WanPipeline pads every prompt to this many


def build_vae() -> AutoencoderKLWan:
    """Return Wan 2.1's video autoencoder (8x8 in space, 4 in time, 16 channels) with a sixth of its width."""
    return AutoencoderKLWan(base_dim=16, dim_mult=[1, 2, 2, 3], num_res_blocks=1)


def build_transformer() -> WanTransformer3DModel:
    """Return a Wan 2.1 text-to-video transformer of 6 blocks, 4 heads of 64 channels."""
    return WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=64,
        num_layers=6,
        ffn_dim=768,
        text_dim=TEXT_DIM,
        rope_max_seq_len=256,
    )


def build_text_encoder(tokenizer: PreTrainedTokenizerFast) -> UMT5EncoderModel:
    """Return a UMT5 encoder of 3 layers over the tokenizer's vocabulary."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer), d_model=TEXT_DIM, d_kv=32, d_ff=2 * TEXT_DIM, num_layers=3, num_heads=4,
            dropout_rate=0.0,
        )
    )  # fmt: skip


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per word of the grammar, trained on captions, without case and punctuation."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex(r"[^\w\s]"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    generator = random.Random(0)
    captions = [str(draw_scene(generator, held_out=False)) for _ in range(4000)]
    trainer = trainers.WordLevelTrainer(special_tokens=["<pad>", "</s>", "<unk>"])
    tokenizer.train_from_iterator(captions, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=MAX_TEXT_TOKENS,
    )


def build_pipeline(vae, transformer, text_encoder, tokenizer, flow_shift: float) -> WanPipeline:
    """Return a WanPipeline with the multistep sampler that Wan itself ships."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=flow_shift
    )
    return WanPipeline(
        vae=vae, transformer=transformer, text_encoder=text_encoder, tokenizer=tokenizer, scheduler=scheduler
    )


def compile_norms(vae: torch.nn.Module) -> None:
    """Fuse each normalisation of an autoencoder into one kernel: they are more than half of all its launches."""
    if next(vae.parameters()).is_cuda:
        for module in vae.modules():
            if isinstance(module, WanRMS_norm):
                module.compile(dynamic=True)


def compile_blocks(transformer: WanTransformer3DModel) -> None:
    """Compile a transformer's blocks if there is a GPU."""
    if next(transformer.parameters()).is_cuda:
        transformer.set_attn_processor(TextToVideoAttention())
        transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)


def channels_last(vae: torch.nn.Module) -> None:
    """Lay out the convolutions' weights as cuDNN uses them; otherwise it transposes around each convolution."""
    formats = {torch.nn.Conv2d: torch.channels_last, torch.nn.Conv3d: torch.channels_last_3d}
    for module in vae.modules():
        for kind, memory_format in formats.items():
            if isinstance(module, kind):
                module.weight.data = module.weight.data.contiguous(memory_format=memory_format)


class TextToVideoAttention:
    """WanAttnProcessor's arithmetic without its image branch, with RoPE in a form that compiles well.

    WanAttnProcessor writes RoPE into slices of an empty tensor, which takes a quarter of a training step.
    """

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(context)), attn.to_v(context)
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
        if rotary_emb is not None:
            query, key = _rotate(query, *rotary_emb), _rotate(key, *rotary_emb)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return attn.to_out[0](attended.transpose(1, 2).flatten(2, 3))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [B, N, heads, head_dim] by diffusers' RoPE tables [1, N, 1, head_dim], which hold every angle twice."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).type_as(x)
