"""LoRA files in the published key formats, for tiny transformers, and what each amounts to in diffusers' parameters.

Formats are written out here once more, as names are in official_names.py, so that a slip in the package's tables shows.
"""

import copy
from functools import partial

import torch
from safetensors.torch import save_file

from tests import official_names
from tests.official_names import LINEARS, WHOLE
from turbo_rcm_patch.checkpoints import lora
from turbo_rcm_patch.patching.families.wan.names import WAN_NAMES

read_lora = partial(lora.read_lora, names=WAN_NAMES)

BLOCK = {name: official_names.BLOCK[name] for name in LINEARS}
IMAGE_BLOCK = {name: official_names.BLOCK[name] for name in ("cross_attn.k_img", "cross_attn.v_img")}
IMAGE_OUTSIDE = {name: WHOLE[name] for name in ("img_emb.proj.1", "img_emb.proj.3")}
OUTSIDE = {name: module for name, module in WHOLE.items() if name.startswith(("text_embedding", "time_"))}
NORMS = {
    name: module for name, module in official_names.BLOCK.items() if "norm" in name and name != "cross_attn.norm_k_img"
}


class LoraFile:
    """A file's tensors by their keys, and the tensors that it adds to parameters, by diffusers' names, in fp32."""

    def __init__(self, model, seed=0):
        self.model, self.tensors, self.changes = model, {}, {}
        self._generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape, std=1.0):
        return std * torch.randn(shape, generator=self._generator)

    def pair(self, key, module, rank, alpha=None, names=("lora_down.weight", "lora_up.weight"), dot="."):
        """W += alpha/rank · up @ down."""
        weight = self.model.get_submodule(module).weight
        down = self.randn(rank, weight.shape[1], std=weight.shape[1] ** -0.5)
        up = self.randn(weight.shape[0], rank, std=0.3 * rank**-0.5)
        self.tensors[f"{key}{dot}{names[0]}"], self.tensors[f"{key}{dot}{names[1]}"] = down, up
        if alpha is not None:
            self.tensors[f"{key}{dot}alpha"] = torch.tensor(float(alpha))
        self._change(f"{module}.weight", (1.0 if alpha is None else alpha / rank) * up @ down)

    def kronecker(self, key, module, rank=None, alpha=8.0):
        """W += alpha/rank · kron(w1, w2_a @ w2_b). Without a rank it is kron(w1, w2), whatever alpha is."""
        outputs, inputs = self.model.get_submodule(module).weight.shape
        w1, std = self.randn(4, 2), inputs**-0.5
        if rank is None:
            w2 = self.tensors[f"{key}.lokr_w2"] = self.randn(outputs // 4, inputs // 2, std=std)
        else:
            left, right = self.randn(outputs // 4, rank), self.randn(rank, inputs // 2, std=std * rank**-0.5)
            self.tensors |= {f"{key}.lokr_w2_a": left, f"{key}.lokr_w2_b": right}
            w2 = alpha / rank * left @ right
        self.tensors |= {f"{key}.lokr_w1": w1, f"{key}.alpha": torch.tensor(float(alpha))}
        self._change(f"{module}.weight", torch.einsum("ij,kl->ikjl", w1, w2).reshape(outputs, inputs))

    def hadamard(self, key, module, rank, alpha=2.0):
        """W += alpha/rank · (w1_a @ w1_b) * (w2_a @ w2_b)."""
        outputs, inputs = self.model.get_submodule(module).weight.shape
        w1, w2 = ((self.randn(outputs, rank), self.randn(rank, inputs, std=inputs**-0.25)) for _ in range(2))
        names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "alpha")
        for name, tensor in zip(names, (*w1, *w2, torch.tensor(float(alpha))), strict=True):
            self.tensors[f"{key}.{name}"] = tensor
        self._change(f"{module}.weight", alpha / rank * (w1[0] @ w1[1]) * (w2[0] @ w2[1]))

    def difference(self, key, parameter):
        """A whole difference."""
        difference = self.randn(*self.model.get_parameter(parameter).shape, std=0.1)
        self.tensors[key] = difference
        self._change(parameter, difference)

    def _change(self, parameter, change):
        self.changes[parameter] = self.changes.get(parameter, 0) + change

    def save(self, path, metadata=None):
        """Write a safetensors file."""
        save_file({key: tensor.contiguous() for key, tensor in self.tensors.items()}, path, metadata=metadata)
        return path

    def merged(self, scale=1.0):
        """A copy of the model with all changes in its weights."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, change in self.changes.items():
                parameter = model.get_parameter(name)
                parameter.copy_((parameter.float() + scale * change).to(parameter.dtype))
        return model


def lightx2v(model, rank=64, seed=0, prefix="diffusion_model."):
    """Like lightx2v's LoRAs: no alphas; norms, biases, modulation, patch embedding and head as differences."""
    file, image = LoraFile(model, seed), model.config.image_dim is not None
    linears = {
        f"blocks.{i}.{theirs}": f"blocks.{i}.{ours}"
        for i in range(len(model.blocks))
        for theirs, ours in {**BLOCK, **(IMAGE_BLOCK if image else {})}.items()
    }
    for theirs, ours in {**linears, **OUTSIDE, **(IMAGE_OUTSIDE if image else {})}.items():
        file.pair(prefix + theirs, ours, rank)
        file.difference(f"{prefix}{theirs}.diff_b", f"{ours}.bias")
    for i in range(len(model.blocks)):
        for theirs, ours in NORMS.items():
            file.difference(f"{prefix}blocks.{i}.{theirs}.diff", f"blocks.{i}.{ours}.weight")
        file.difference(f"{prefix}blocks.{i}.norm3.diff_b", f"blocks.{i}.norm2.bias")
        file.difference(f"{prefix}blocks.{i}.diff_m", f"blocks.{i}.scale_shift_table")
        if image:
            file.difference(f"{prefix}blocks.{i}.cross_attn.norm_k_img.diff", f"blocks.{i}.attn2.norm_added_k.weight")
    file.difference(f"{prefix}head.diff_m", "scale_shift_table")
    for theirs, ours in {"head.head": "proj_out", "patch_embedding": "patch_embedding"}.items():
        file.difference(f"{prefix}{theirs}.diff", f"{ours}.weight")
        file.difference(f"{prefix}{theirs}.diff_b", f"{ours}.bias")
    if image:
        for theirs, ours in {"img_emb.proj.0": "norm1", "img_emb.proj.4": "norm2"}.items():
            path = f"condition_embedder.image_embedder.{ours}"
            file.difference(f"{prefix}{theirs}.diff", f"{path}.weight")
            file.difference(f"{prefix}{theirs}.diff_b", f"{path}.bias")
    return file


def style(model, rank=4, seed=0):
    """Like a style's LoRA that PEFT saved: few linears, no differences."""
    file = LoraFile(model, seed)
    for i in range(len(model.blocks)):
        path = f"blocks.{i}.attn1.to_q"
        file.pair(path, path, rank, names=("lora_A.weight", "lora_B.weight"))
    return file


def lightning(model, rank=64, alphas=(8.0,), seed=0, prefix="diffusion_model."):
    """Like Wan2.2-Lightning: the blocks' linears with alphas, taken in turn."""
    file = LoraFile(model, seed)
    for i in range(len(model.blocks)):
        for n, (theirs, ours) in enumerate(BLOCK.items()):
            file.pair(f"{prefix}blocks.{i}.{theirs}", f"blocks.{i}.{ours}", rank, alphas[n % len(alphas)])
    return file


def lokr(model, ranks=(4, None), seed=0, prefix="diffusion_model."):
    """Like ai-toolkit's LoKr: the blocks' linears, with ranks in turn; None stands for whole matrices."""
    file = LoraFile(model, seed)
    for i in range(len(model.blocks)):
        for n, (theirs, ours) in enumerate(BLOCK.items()):
            file.kronecker(f"{prefix}blocks.{i}.{theirs}", f"blocks.{i}.{ours}", ranks[n % len(ranks)])
    return file


def loha(model, rank=4, seed=0):
    """Like musubi-tuner's LoHa: names with underscores."""
    file = LoraFile(model, seed)
    for i in range(len(model.blocks)):
        for theirs, ours in BLOCK.items():
            file.hadamard(f"lora_unet_blocks_{i}_{theirs.replace('.', '_')}", f"blocks.{i}.{ours}", rank)
    return file


def kohya(model, rank=32, alphas=(16.0, 32.0), seed=0, dotted=False):
    """Like musubi-tuner's files: names with underscores. dotted: only the first ones are underscores."""
    file = LoraFile(model, seed)
    for i in range(len(model.blocks)):
        for n, (theirs, ours) in enumerate(BLOCK.items()):
            name = theirs if dotted else theirs.replace(".", "_")
            key = f"lora_unet_blocks_{i}{'.' if dotted else '_'}{name}"
            file.pair(key, f"blocks.{i}.{ours}", rank, alphas[n % len(alphas)])
    return file


def diffusers(model, ranks=(32, 128), seed=0, prefix="transformer."):
    """Like a LoRA that diffusers saved: its own names, ranks taken in turn."""
    file = LoraFile(model, seed)
    for i in range(len(model.blocks)):
        for n, ours in enumerate(BLOCK.values()):
            path = f"blocks.{i}.{ours}"
            file.pair(prefix + path, path, ranks[n % len(ranks)], names=("lora_A.weight", "lora_B.weight"))
    return file
