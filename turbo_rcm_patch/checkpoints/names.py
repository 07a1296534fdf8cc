"""Names of Wan's modules and parameters: the authors' own, diffusers', and Kohya's with underscores.

Tools put prefixes before all names of a file, and wrappers of modules put parts into them: `without_prefix`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

# The prefixes of LoRA files and of whole models. A file may have several, one after another.
PREFIXES = (
    *("model.diffusion_model.", "diffusion_model."),  # ComfyUI and the trainers that write for it
    *("transformer.", "transformer_2."),  # diffusers
    *("pipe.dit.", "dit."),  # DiffSynth
    *("base_model.model.", "module.", "model.", "net."),  # PEFT, DistributedDataParallel, CausVid, rCM
    *(
        "lora_unet__",
        "lora_unet_",
        "lora_transformer_",
        "lycoris_",
    ),  # VideoX-Fun, Kohya and musubi, OneTrainer, LyCORIS
)
# torch.compile, FSDP and activation checkpointing, at the beginning or inside of a name.
_WRAPPER = re.compile(r"(?<![a-z])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)[._]")

# Patterns of diffusers' names, and the official names. All are applied in turn to a module's or parameter's name.
_OFFICIAL = [
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])$", r".\1"),
    (r"\.to_out\.0$", ".o"),
    (r"\.add_([kv])_proj$", r".\1_img"),
    (r"\.norm_added_([kq])$", r".norm_\1_img"),
    (r"\.ffn\.net\.0\.proj$", ".ffn.0"),
    (r"\.ffn\.net\.2$", ".ffn.2"),
    (r"^((?:vace_)?blocks\.\d+)\.norm2$", r"\1.norm3"),  # the norm of the two that has a weight
    (r"^((?:vace_)?blocks\.\d+)\.scale_shift_table$", r"\1.modulation"),
    (r"^(vace_blocks\.\d+)\.proj_in$", r"\1.before_proj"),
    (r"^(vace_blocks\.\d+)\.proj_out$", r"\1.after_proj"),
    (r"^scale_shift_table$", "head.modulation"),
    (r"^proj_out$", "head.head"),
    (r"^condition_embedder\.text_embedder\.linear_1$", "text_embedding.0"),
    (r"^condition_embedder\.text_embedder\.linear_2$", "text_embedding.2"),
    (r"^condition_embedder\.time_embedder\.linear_1$", "time_embedding.0"),
    (r"^condition_embedder\.time_embedder\.linear_2$", "time_embedding.2"),
    (r"^condition_embedder\.time_proj$", "time_projection.1"),
    (r"^condition_embedder\.image_embedder\.norm1$", "img_emb.proj.0"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj$", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2$", "img_emb.proj.3"),
    (r"^condition_embedder\.image_embedder\.norm2$", "img_emb.proj.4"),
    (r"^condition_embedder\.image_embedder\.pos_embed$", "img_emb.emb_pos"),
]
_OF_IMAGE = re.compile(r"(^|[._])(img_emb|image_embedder|k_img|v_img|add_[kv]_proj|norm_added_[kq])([._]|$)")


def without_prefix(name: str) -> str:
    """Return a name of a file without the prefixes and wrappers that tools put into it."""
    name = _WRAPPER.sub("", name)
    while (prefix := next(filter(name.startswith, PREFIXES), None)) is not None:
        name = name.removeprefix(prefix)
    return name


def official_name(name: str) -> str:
    """Return the authors' name for diffusers' ``name``."""
    for pattern, replacement in _OFFICIAL:
        name = re.sub(pattern, replacement, name)
    return name


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a Wan transformer's modules by diffusers' names, leaving out LoRA layers that wrap them."""
    for name, module in model.named_modules():
        parts = name.split(".")
        if hasattr(module, "base_layer") or any(part.startswith("lora_") for part in parts):
            continue
        yield ".".join(part for part in parts if part != "base_layer"), module


class ModelNames:
    """Finds a transformer's modules and parameters by any of their names."""

    def __init__(self, model: nn.Module):
        self.modules = dict(modules_of(model))
        self.blocks = len(model.blocks)
        # Names of parameters other than weight and bias, such as modulation. A weight goes by its module's name.
        own = [
            f"{path}.{name}".lstrip(".")
            for path, module in self.modules.items()
            for name in module._parameters
            if name not in ("weight", "bias")
        ]
        self._parameters = set(own)
        # Other tools call two of Wan's norms norm2 and norm3. One has no weight; its name must not hide the other's.
        with_weights = [name for name, module in self.modules.items() if getattr(module, "weight", None) is not None]
        self._known: dict[str, str] = {}
        for name in (*with_weights, *own):
            self._known[_plain(name)] = self._known[_plain(official_name(name))] = name

    def canonical(self, name: str) -> str:
        """Return one name for all spellings of a name."""
        return self._known.get(_plain(name), _plain(name))

    def module(self, name: str) -> str | None:
        """Return diffusers' name of a module, or None if the model has no such module."""
        found = self._known.get(_plain(name))
        return None if found in self._parameters else found

    def parameter(self, name: str, part: str) -> str | None:
        """Return diffusers' name of the weight, bias or modulation (``part``) at a name, or None if it is unknown.

        A modulation is a block's or, by the name "head", the last layer's.
        """
        found = self._known.get(_plain(f"{name}.modulation" if part == "modulation" else name))
        if found in self._parameters:
            return None if part == "bias" else found
        has_part = found is not None and getattr(self.modules[found], part, None) is not None
        return f"{found}.{part}" if has_part else None

    def owner(self, parameter: str) -> tuple[nn.Module, str]:
        """Return the module that holds a parameter, and its name there."""
        path, _, own = parameter.rpartition(".")
        return self.modules[path], own

    def why_absent(self, name: str) -> str:
        """Return the reason why the model has no parameter of this name."""
        return "the model takes no image" if _OF_IMAGE.search(name) else "the model has no module of this name"

    def block_beyond(self, name: str) -> bool:
        """True if a name belongs to a block that the model does not have."""
        number = re.match(r"blocks[._](\d+)[._]", name)
        return number is not None and int(number[1]) >= self.blocks


def _plain(name: str) -> str:
    """Return a name with underscores for dots, because Kohya's tools replace all dots or only some."""
    return name.replace(".", "_")
