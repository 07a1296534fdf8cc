"""A patched model of each family beside an unpatched one, to check that both do the same."""

import io
import pickle

import pytest
import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

import turbo_rcm_patch as trp
from tests.oracle import relative_error
from tests.tiny_families import FAMILIES, first_of, tiny_family_inputs, tiny_family_transformer
from turbo_rcm_patch.patching.families import family_of
from turbo_rcm_patch.tiers import EXACT

# NAMES: a model of each family whose self-attention the steps compute. every_family adds AnyFlow-FAR, whose
# self-attention is called as a whole, and Wan-Animate-2, whose modules have other names.
NAMES = ("wan", "vace", "skyreels", "animate", "chronoedit", "anyflow", "helios", "ltx2")
families = pytest.mark.parametrize("name", NAMES)
every_family = pytest.mark.parametrize("name", [*NAMES, "anyflow far", "animate 2"])
variants = pytest.mark.parametrize("name", ["wan", *FAMILIES])


def make_pair(name, **options):
    """The model twice, the first patched, and its patch."""
    patched, plain = tiny_family_transformer(name, **options), tiny_family_transformer(name, **options)
    return patched, plain, trp.patch(patched)


def output_of(name, model, device="cpu", **overrides):
    """The model's result; for LTX-2 both streams' in one tensor."""
    inputs = {**tiny_family_inputs(name, model), **overrides}
    with torch.no_grad():
        return in_one_tensor(name, model(**_on(device, inputs)))


def in_one_tensor(name, outputs):
    """A model's result, or LTX-2's both streams, in one tensor."""
    return torch.cat([stream.flatten(1) for stream in outputs], 1) if name.startswith("ltx2") else first_of(outputs)


def _on(device, value):
    """Tensors in nested lists and dictionaries on a device."""
    if isinstance(value, dict):
        return {key: _on(device, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_on(device, item) for item in value]
    if isinstance(value, WanAnimate2KVCache):
        for layer in value.layer_caches:
            layer.store(_on(device, layer.key), _on(device, layer.value))
    return value.to(device) if isinstance(value, torch.Tensor) else value


def assert_same_output(name, patched, plain, **overrides):
    error = relative_error(output_of(name, patched, **overrides), output_of(name, plain, **overrides))
    assert error <= EXACT.limits.fp32


def attributes_of(model):
    """Return the names of the attributes of each module."""
    return {path: set(module.__dict__) for path, module in model.named_modules()}


def row(patch, sub_layer, step):
    """Return the summary's row of a step in the first list of blocks. LTX-2's is that of the video."""
    names = {("blocks", sub_layer, step), ("transformer_blocks", f"video {sub_layer}", step)}
    return next(row for row in patch.rows() if (row.blocks, row.sub_layer, row.step) in names)


def blocks_of(model):
    """Return the first list of a model's blocks."""
    return getattr(model, family_of(model).blocks[0].name)


def attention_class(model):
    """Return the class of the attentions in a model's blocks."""
    return family_of(model).blocks[0].kind.attention_class


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
