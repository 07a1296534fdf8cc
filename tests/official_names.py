"""Wan transformers' weights in their authors' names, written out here independently of the package."""

import json

import torch

# The authors' names of a block's parts and diffusers'.
BLOCK = {
    "self_attn.q": "attn1.to_q",
    "self_attn.k": "attn1.to_k",
    "self_attn.v": "attn1.to_v",
    "self_attn.o": "attn1.to_out.0",
    "self_attn.norm_q": "attn1.norm_q",
    "self_attn.norm_k": "attn1.norm_k",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.k": "attn2.to_k",
    "cross_attn.v": "attn2.to_v",
    "cross_attn.o": "attn2.to_out.0",
    "cross_attn.norm_q": "attn2.norm_q",
    "cross_attn.norm_k": "attn2.norm_k",
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
WHOLE = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "head.head": "proj_out",
}
LINEARS = [f"{attn}.{part}" for attn in ("self_attn", "cross_attn") for part in "qkvo"] + ["ffn.0", "ffn.2"]


def official_state_dict(model, *, flat_patches=False, prefix="", dtype=None):
    """The parameters of a Wan transformer under the authors' names.

    flat_patches: with the patch embedding as a linear over patches, as rCM writes it.
    """
    theirs = model.state_dict()
    found = {}
    for official, name in WHOLE.items():
        for part in ("weight", "bias"):
            if f"{name}.{part}" in theirs:
                found[f"{official}.{part}"] = theirs.pop(f"{name}.{part}")
    found["head.modulation"] = theirs.pop("scale_shift_table")
    for number in range(len(model.blocks)):
        found[f"blocks.{number}.modulation"] = theirs.pop(f"blocks.{number}.scale_shift_table")
        for official, name in BLOCK.items():
            for part in ("weight", "bias"):
                key = f"blocks.{number}.{name}.{part}"
                if key in theirs:
                    found[f"blocks.{number}.{official}.{part}"] = theirs.pop(key)
    assert not theirs, list(theirs)
    if flat_patches:
        found["patch_embedding.weight"] = found["patch_embedding.weight"].flatten(1)
    return {prefix + name: tensor.to(dtype or tensor.dtype).clone() for name, tensor in found.items()}


def with_proj_l(state_dict, model, *, seed=0, prefix=""):
    """The same with SLA's projections, as TurboWan's files have them."""
    generator = torch.Generator().manual_seed(seed)
    size = model.config.attention_head_dim
    for number in range(len(model.blocks)):
        name = f"{prefix}blocks.{number}.self_attn.attn_op.local_attn.proj_l"
        state_dict[f"{name}.weight"] = torch.randn(size, size, generator=generator) / size
        state_dict[f"{name}.bias"] = torch.randn(size, generator=generator) / size
    return state_dict


def in_8_bits(state_dict, *, prefix=""):
    """The same as TurboWan's -quant files: the blocks' linears as int8 with a scale for 128×128 of them."""
    written = {}
    for name, tensor in state_dict.items():
        parts = name.removeprefix(prefix).split(".", 2)
        linear = name.endswith(".weight") and parts[0] == "blocks" and parts[2].removesuffix(".weight") in LINEARS
        if not linear:
            written[name] = tensor
            continue
        rows, columns = tensor.shape
        values = torch.empty(rows, columns, dtype=torch.int8)
        scale = torch.empty(-(-rows // 128), -(-columns // 128))
        for i in range(0, rows, 128):
            for j in range(0, columns, 128):
                block = tensor[i : i + 128, j : j + 128].float()
                largest = block.abs().max().clamp(min=1e-8)
                values[i : i + 128, j : j + 128] = (block * 128 / largest).round().clamp(-128, 127).to(torch.int8)
                scale[i // 128, j // 128] = largest / 128
        base = name.removesuffix(".weight")
        written[f"{base}.int8_weight"], written[f"{base}.scale"] = values, scale
    return written


def with_scales(state_dict, *, dtype=torch.float8_e4m3fn, scale="scale_weight", by_row=False, keep=(), prefix=""):
    """The same as ComfyUI's and Kijai's files: the blocks' linears in 8 bits with a scale, under a prefix.

    scale: the name of the scale. "scale_weight": with the older format's marker. "weight_scale": with each layer's
    format as JSON. keep: linears that stay as they are.
    """
    largest = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    written = {"scaled_fp8": torch.zeros(0, dtype=dtype)} if scale == "scale_weight" else {}
    for name, tensor in state_dict.items():
        parts = name.split(".", 2)
        layer = name.removesuffix(".weight")
        if name == layer or parts[0] != "blocks" or parts[2].removesuffix(".weight") not in LINEARS or layer in keep:
            written[name] = tensor
            continue
        factor = tensor.abs().amax(1, keepdim=True) / largest if by_row else tensor.abs().max() / largest
        written[name] = (tensor / factor).round().to(dtype) if dtype == torch.int8 else (tensor / factor).to(dtype)
        written[f"{layer}.{scale}"] = factor.float()
        if scale == "weight_scale":
            format = "int8_tensorwise" if dtype == torch.int8 else str(dtype).removeprefix("torch.")
            written[f"{layer}.comfy_quant"] = as_bytes({"format": format})
        else:
            written[f"{layer}.scale_input"] = torch.ones(1)
    return {prefix + name: tensor for name, tensor in written.items()}


def as_bytes(described):
    """JSON as a tensor of bytes."""
    return torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8)


def without_scales(state_dict, *, prefix=""):
    """The weights in fp32 that such a file stands for, without the prefix and what belongs to 8 bits."""
    given = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items()}
    found = {}
    for name, tensor in given.items():
        layer = name.removesuffix(".weight")
        scale = given.get(f"{layer}.scale_weight", given.get(f"{layer}.weight_scale", torch.ones(())))
        if name.rpartition(".")[2] in ("weight", "bias", "modulation"):
            found[name] = tensor.float() * scale if name != layer else tensor.float()
    return found
