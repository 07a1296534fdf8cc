"""A tiny Wan text-to-video pipeline that needs no download: what the command line and the examples run by default."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan, ModelMixin, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from .scheduler import RCMScheduler

# A size that a CPU generates in seconds; frames are 4k+1, height and width multiples of 16, as for every Wan 2.1 model.
HEIGHT, WIDTH, FRAMES = 96, 160, 17

_SEED = 2510  # of the weights; any constant
_TEXT_DIM = 64
_SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")


def load_embedded_pipeline(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> WanPipeline:
    """A WanPipeline of stock diffusers and transformers classes with this package's few-step scheduler.

    The weights are random but the same on every call, whatever the global seed, which is left alone; videos are
    therefore abstract patterns. Modules that Wan keeps in fp32 stay so in a lower dtype, as after ``from_pretrained``.
    The default size of a generation is HEIGHT x WIDTH x FRAMES.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SEED)  # torch.manual_seed would also seed the GPUs
        components = {"text_encoder": _text_encoder(), "transformer": _transformer(), "vae": _vae()}
    for model in components.values():
        cast_as_loaded(model.eval(), dtype)
    pipe = WanPipeline(tokenizer=_tokenizer(), scheduler=RCMScheduler(), **components)
    return pipe.to(device)


def cast_as_loaded(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast in place as diffusers' ``from_pretrained(dtype=...)`` does: what its models keep in fp32 stays fp32."""
    kept = (model._keep_in_fp32_modules or ()) if isinstance(model, ModelMixin) else ()
    for name, parameter in model.named_parameters():
        if not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)
    return model


def _transformer() -> WanTransformer3DModel:
    return with_strong_gates(
        WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=64,
            num_layers=4,
            ffn_dim=512,
            text_dim=_TEXT_DIM,
            rope_max_seq_len=256,
        )
    )


def with_strong_gates(model: WanTransformer3DModel) -> WanTransformer3DModel:
    """Draw the modulation tables N(0, 0.5²): random blocks then change their input about as much as they keep of it.

    diffusers draws them N(0, 1/dim), and a block's output is then little more than its input; an error inside a block
    would hardly show.
    """
    for block in model.blocks:
        torch.nn.init.normal_(block.scale_shift_table, std=0.5)
    return model


def _vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1)


def _text_encoder() -> UMT5EncoderModel:
    vocabulary = 256 + len(_SPECIAL_TOKENS)
    model = UMT5EncoderModel(
        UMT5Config(vocab_size=vocabulary, d_model=_TEXT_DIM, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    )
    # Untrained attention spreads over all 512 text tokens, nearly all of them padding; louder text is heard through it.
    torch.nn.init.constant_(model.encoder.final_layer_norm.weight, 10.0)
    return model


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, so that every prompt in every script has its own encoding."""
    pieces = [*_SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], unk_id=2, byte_fallback=True))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.decoder = decoders.ByteFallback()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
