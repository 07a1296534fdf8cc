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
    """Wan 2.1's video autoencoder (8x8 in space, 4 in time, 16 channels) with a sixth of its width."""
    return AutoencoderKLWan(base_dim=16, dim_mult=[1, 2, 2, 3], num_res_blocks=1)


def build_transformer() -> WanTransformer3DModel:
    """A Wan 2.1 text-to-video transformer of 6 blocks, 4 heads of 64 channels."""
    return WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=64,
        num_layers=6,
        ffn_dim=768,
        text_dim=TEXT_DIM,
        rope_max_seq_len=256,
    )


def build_text_encoder(tokenizer: PreTrainedTokenizerFast) -> UMT5EncoderModel:
    """A UMT5 encoder of 3 layers over the tokenizer's vocabulary."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer), d_model=TEXT_DIM, d_kv=32, d_ff=2 * TEXT_DIM, num_layers=3, num_heads=4,
            dropout_rate=0.0,
        )
    )  # fmt: skip


def train_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the grammar, learned from captions; case and punctuation do not count."""
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
    """A WanPipeline with the multistep sampler that Wan itself ships."""
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
    """Compile a transformer's blocks where there is a GPU."""
    if next(transformer.parameters()).is_cuda:
        transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
