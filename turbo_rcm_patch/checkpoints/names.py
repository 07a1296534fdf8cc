"""Names of modules and parameters: the authors' own, diffusers', and Kohya's with underscores.

Tools put prefixes before all names of a file, and wrappers of modules put parts into them: `without_prefix`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

# The prefixes of LoRA files and of whole models. A file may have several, one after another.
PREFIXES = (
    *("model.diffusion_model.", "diffusion_model."),  # ComfyUI and the trainers that write for it
    *("transformer.", "transformer_2."),  # diffusers
    *("pipe.dit.", "dit."),  # DiffSynth
    *("base_model.model.", "module.", "model.", "net."),  # PEFT, DistributedDataParallel, CausVid, rCM
    "velocity_model.",  # LTX-2's authors and TurboT2AV
    *("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_"),  # VideoX-Fun, Kohya, musubi, OneTrainer, LyCORIS
)
# torch.compile, FSDP and activation checkpointing, at the beginning or inside of a name.
_WRAPPER = re.compile(r"(?<![a-z])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)[._]")

PROJ_L = "proj_l"
OTHERS = r"(vae|audio_vae|vocoder|text_encoders|text_embedding_projection)\."  # in ComfyUI's files of whole pipelines


@dataclass(frozen=True)
class Names:
    """The names that the authors of a family's models give to modules and parameters. A family states them.

    title: the models' name for messages.
    blocks: the list of blocks, in diffusers' names and the authors'.
    patterns: patterns of diffusers' names, and the official names. All are applied in turn.
    self_attentions: the names of a block's self-attention that may have SLA's projection proj_l, diffusers' first.
    of_image: a pattern of the parts that only a model with images has, or None.
    ignored: a pattern of the beginnings of names that belong to other models in the same file, or None.
    """

    title: str
    blocks: str
    patterns: tuple[tuple[str, str], ...]
    self_attentions: tuple[str, ...]
    of_image: re.Pattern | None = None
    ignored: re.Pattern | None = None

    def official(self, name: str) -> str:
        """Return the authors' name for diffusers' name of a module, or of a parameter that is no weight or bias."""
        for pattern, replacement in self.patterns:
            name = re.sub(pattern, replacement, name)
        return name

    def official_parameter(self, name: str) -> str:
        """Return the authors' name for diffusers' name of a parameter."""
        path, _, part = name.rpartition(".")
        return f"{self.official(path)}.{part}" if part in ("weight", "bias") else self.official(name)

    @property
    def proj_l(self) -> re.Pattern:
        """A pattern of SLA's projections in files: the block's name, the module's in it, and weight or bias."""
        attentions = "|".join(self.self_attentions)
        return re.compile(rf"^({self.blocks}\.\d+)(\.(?:{attentions})\.(?:\w+\.)*{PROJ_L}\.)(weight|bias)$")

    def fit(self, names: Iterable[str]) -> bool:
        """True if any of a file's names is of a block of such a model."""
        return any(without_prefix(name).startswith(f"{self.blocks}.") for name in names)


def without_prefix(name: str) -> str:
    """Return a name of a file without the prefixes and wrappers that tools put into it."""
    name = _WRAPPER.sub("", name)
    while (prefix := next(filter(name.startswith, PREFIXES), None)) is not None:
        name = name.removeprefix(prefix)
    return name


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a transformer's modules by diffusers' names, leaving out LoRA layers that wrap them."""
    for name, module in model.named_modules():
        parts = name.split(".")
        if hasattr(module, "base_layer") or any(part.startswith("lora_") for part in parts):
            continue
        yield ".".join(part for part in parts if part != "base_layer"), module


def owner_in(modules: Mapping[str, nn.Module], parameter: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter, and its name there. modules: by diffusers' names (`modules_of`)."""
    path, _, own = parameter.rpartition(".")
    return modules[path], own


class ModelNames:
    """Finds a transformer's modules and parameters by any of their names."""

    def __init__(self, model: nn.Module, names: Names):
        self._names, self.modules = names, dict(modules_of(model))
        self.blocks = len(getattr(model, names.blocks))
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
            self._known[_plain(name)] = self._known[_plain(names.official(name))] = name

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

    def why_absent(self, name: str) -> str:
        """Return the reason why the model has no parameter of this name."""
        of_image = self._names.of_image
        is_of_image = of_image is not None and of_image.search(name)
        return "the model takes no image" if is_of_image else "the model has no module of this name"

    def block_beyond(self, name: str) -> bool:
        """True if a name belongs to a block that the model does not have."""
        number = re.match(rf"{self._names.blocks}[._](\d+)[._]", name)
        return number is not None and int(number[1]) >= self.blocks


def _plain(name: str) -> str:
    """Return a name with underscores for dots, because Kohya's tools replace all dots or only some."""
    return name.replace(".", "_")
