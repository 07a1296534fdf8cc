"""The table of what may happen to a patched model: a row for each change, and the tiers and families to try it in."""

from dataclasses import dataclass

import accelerate
import torch
from diffusers.models.attention_dispatch import attention_backend
from torch import nn

from tests.patching.changes import (
    ANYTHING,
    CLASS_FORWARD,
    CLASSES,
    CPU,
    GRAPHS,
    WEIGHTS,
    WITH_LORA,
    WRITES,
    AnObject,
    Doubled,
    DoubledFeedForward,
    a_layer_more,
    add_lora,
    an_attribute_of_each_step,
    another_linear,
    attribute,
    below_a_decorator,
    blocks_that_come_and_go,
    called,
    decorated,
    default_processor,
    doubled_processor,
    doubled_text,
    dropout_in_training,
    fused_lora,
    fused_projections,
    global_hook,
    group_offload,
    hooked,
    in_a_layer_of_ones_own,
    in_its_module,
    loaded,
    loras,
    method,
    negate_second,
    projections_without_a_bias,
    quantised_by_torchao,
    replaced,
    scaled,
    under_its_name,
    unusual_norms,
    within,
    written,
)

TIERS = ("exact", "quantized", "sparse", "block_sparse")
MOST = ("exact", "quantized")  # what has nothing to do with self-attention, which the other tiers replace
ALL = (*TIERS, GRAPHS)
UNQUANTIZED = ("exact", "sparse", "block_sparse", GRAPHS)
I2V = (("image_dim", 4), ("added_kv_proj_dim", "inner"), ("in_channels", 36))


@dataclass(frozen=True)
class Change:
    """A row of the table.

    make: the generator function. columns: the tiers in which it can be made after the patch, on Wan. families: those in
    which it is made in the exact tier too. refused: tiers that raise an error instead, and where nothing changes.
    held: tiers whose `restore` asks to take it back first. before: True if it is also made before an exact patch, or
    the error of such a patch. silent: True if it leaves the output as it was. shared: True if it changes all models, so
    that it is made once. model, call: options of the model and of its calls.
    """

    make: object
    columns: tuple = MOST
    families: tuple = ()
    refused: tuple = ()
    held: tuple = ()
    before: bool | str = False
    silent: bool = False
    shared: bool = False
    model: tuple = ()
    call: tuple = ()


HOOK = {"quantized": ANYTHING, GRAPHS: "torch hook", None: "torch hook (1)"}
NO_STEPS_HOOK = {"quantized": ANYTHING, GRAPHS: "torch hook", None: None}  # one on modules that are called in any case
BACKEND = {"sparse": ANYTHING, None: "attention backend _native_math"}
OTHER_LINEAR = {"quantized": ANYTHING, None: None}
# path in a block: the family in which it is hooked too
HOOKED = {
    "attn1": "vace",
    "attn1.to_q": "skyreels",
    "attn1.to_k": "anyflow",
    "attn1.norm_q": "animate",
    "attn1.to_out.0": "chronoedit",
    "attn2": "anyflow",
    "attn2.to_out.0": "skyreels",
    "ffn": "animate",
    "ffn.net.0": "chronoedit",
    "ffn.net.0.proj": "anyflow",
    "ffn.net.2": "anyflow far",
    "norm1": "vace",
}
EVERY = ("vace", "skyreels", "animate", "chronoedit", "anyflow")

CHANGES = {
    # hooks
    **{
        f"a hook on {path}": Change(
            hooked(f"blocks.0.{path}", HOOK), TIERS if path.startswith("attn1") else MOST, families=(family,)
        )
        for path, family in HOOKED.items()
    },
    "a hook on Q of the video": Change(hooked("blocks.0.attn2.to_q", NO_STEPS_HOOK), families=("anyflow far",)),
    "a hook on K of the prompt": Change(hooked("blocks.0.attn2.to_k", NO_STEPS_HOOK), families=("vace",)),
    "a hook on the time embedding": Change(
        hooked("condition_embedder.time_embedder.linear_1", NO_STEPS_HOOK), ("exact", GRAPHS)
    ),
    "a hook on a block": Change(
        hooked("blocks.1", NO_STEPS_HOOK), (*MOST, GRAPHS), before=True, families=("anyflow far", "vace")
    ),
    "a hook before a block": Change(
        hooked(
            "blocks.1",
            NO_STEPS_HOOK,
            "register_forward_pre_hook",
            lambda module, args: (args[0], 1.5 * args[1], *args[2:]),
        )
    ),
    "a hook on the embedder": Change(
        hooked("condition_embedder", NO_STEPS_HOOK, hook=negate_second),
        (*MOST, GRAPHS),
        before=True,
        families=("skyreels",),
    ),
    "a hook on the rotation": Change(hooked("rope", NO_STEPS_HOOK, hook=negate_second)),
    "a global hook": Change(within(global_hook, "global torch hook"), ALL, shared=True),
    # other code
    "another processor": Change(
        replaced("blocks.1.attn1", "processor", doubled_processor, "processor Doubled"),
        ALL,
        families=EVERY,
        held=("sparse",),
        before=True,
    ),
    "another feed-forward class": Change(
        replaced("blocks.0.ffn", "__class__", lambda ffn: DoubledFeedForward, "tests DoubledFeedForward layer"),
        (*MOST, GRAPHS),
        families=("animate", "anyflow far"),
        before=True,
    ),
    "another embedder class": Change(
        replaced("condition_embedder", "__class__", doubled_text, {GRAPHS: "Doubled", None: None}), ("exact", GRAPHS)
    ),
    "a forward of a layer's own": Change(
        replaced(
            "blocks.0.attn1.to_v",
            "forward",
            lambda linear: lambda x: -nn.functional.linear(x, linear.weight, linear.bias),
            "replaced forward",
        ),
        ALL,
    ),
    **{
        f"{path}.{name} in a layer of one's own": Change(in_a_layer_of_ones_own(f"blocks.0.{path}", name), columns)
        for path, name, columns in (("attn2", "to_v", MOST), ("attn1.to_out", "0", ALL), ("ffn.net", "2", MOST))
    },
    **{
        f"a forward on the class of {part}": Change(
            within(method(find, under_its_name), CLASS_FORWARD),
            MOST,
            shared=True,
            before=True,
            families=families,
        )
        for part, (find, families) in CLASSES.items()
    },
    **{
        f"a forward on the class of a linear, {way.__name__}": Change(
            within(method(lambda model: nn.Linear, way), CLASS_FORWARD), columns=("exact",), shared=True
        )
        for way in (scaled, in_its_module, below_a_decorator, AnObject)
    },
    **{
        f"a forward on the class of {part}": Change(
            within(method(find, way), {GRAPHS: CLASS_FORWARD, None: ANYTHING}),
            ("exact", GRAPHS),
            shared=True,
            before=True,
        )
        for part, find, way in (
            ("an embedder's layer", lambda model: nn.SiLU, scaled),
            ("the model", type, under_its_name),
        )
    },
    **{
        f"a call on the class of a processor, {way.__name__}": Change(
            within(method(default_processor, way, "__call__"), "AttnProcessor changed"),
            ("exact", "quantized", "block_sparse", GRAPHS) if way is scaled else ("exact",),
            families,
            shared=True,
        )
        for way, families in (
            (scaled, ("vace",)),
            (in_its_module, ("skyreels",)),
            (under_its_name, ("anyflow",)),
            (below_a_decorator, ("chronoedit",)),
        )
    },
    "torch's decorators on classes": Change(within(decorated), shared=True, silent=True, families=("anyflow",)),
    # other parts and settings
    "eps of a norm": Change(replaced("blocks.0.norm1", "eps", lambda norm: 10.0), (*MOST, GRAPHS)),
    "eps of a prompt's norm": Change(replaced("blocks.0.attn2.norm_k", "eps", lambda norm: 10.0), (*MOST, GRAPHS)),
    "eps of an image's norm": Change(
        replaced("condition_embedder.image_embedder.norm1", "eps", lambda norm: 10.0), ("exact", GRAPHS), model=I2V
    ),
    "another linear in an attention": Change(
        replaced("blocks.0.attn1", "to_q", lambda attn: another_linear(attn.to_q), OTHER_LINEAR), ALL
    ),
    "another linear in a feed-forward": Change(
        replaced("blocks.0.ffn.net", "2", lambda net: another_linear(net[2]), OTHER_LINEAR)
    ),
    "projections without a bias": Change(projections_without_a_bias, TIERS, families=("anyflow", "vace")),
    "unusual norms of queries": Change(unusual_norms, (), ("anyflow",)),
    "blocks that come and go": Change(blocks_that_come_and_go, TIERS, families=("vace",)),
    "fused projections": Change(fused_projections, ALL, silent=True, families=("skyreels",)),
    "dropout in training": Change(dropout_in_training, ALL, before=True),
    "another layer in place of a dropout": Change(
        replaced("blocks.0.attn1.to_out", "1", lambda _: Doubled(), "tests Doubled layer"),
        ALL,
        families=("skyreels", "helios"),
        before=True,
    ),
    "another layer in place of the feed-forward's dropout": Change(
        replaced("blocks.0.ffn.net", "1", lambda _: Doubled(), {"quantized": "tests Doubled layer", None: None}),
        before=True,
    ),
    "a layer after a feed-forward": Change(
        a_layer_more("blocks.0.ffn.net", "tests Doubled layer"), (*MOST, GRAPHS), families=("vace",), before=True
    ),
    "a layer that an attention does not call": Change(
        a_layer_more("blocks.0.attn1.to_out", None), TIERS, silent=True, before=True
    ),
    "a layer that a cross-attention does not call": Change(a_layer_more("blocks.0.attn2.to_out", None), silent=True),
    "a backend of an attention": Change(
        within(lambda model: attribute(model.blocks[0].attn1.processor, "_attention_backend", "_native_math"), BACKEND),
        ALL,
        silent=True,
    ),
    "a backend of a model": Change(
        called(
            lambda model: model.set_attention_backend("_native_math"),
            BACKEND,
            lambda model: model.reset_attention_backend(),
        ),
        silent=True,
        families=("animate",),
    ),
    "a backend of all": Change(
        within(lambda model: attention_backend("_native_math"), BACKEND), (*MOST, GRAPHS), silent=True, shared=True
    ),
    "another attention function": Change(
        within(
            method(lambda model: nn.functional, lambda f: lambda *a, **k: -f(*a, **k), "scaled_dot_product_attention")
        ),
        (GRAPHS,),
        shared=True,
    ),
    "autocast": Change(
        within(lambda model: torch.autocast("cpu", torch.bfloat16), ANYTHING),
        TIERS,
        families=("anyflow",),
        shared=True,
    ),
    "inference mode": Change(within(lambda model: torch.inference_mode()), shared=True, silent=True),
    "another dtype": Change(
        called(nn.Module.double, {"quantized": "float64 tensors", None: ANYTHING}, nn.Module.float), TIERS, silent=True
    ),
    "an attribute of each step": Change(an_attribute_of_each_step, ("exact", GRAPHS), silent=True),
    # weights
    **{
        f"a weight written {how}": Change(
            written(write, "blocks.1.attn1.to_q.weight"),
            ALL if how == "in place" else (*MOST, GRAPHS),
            refused=("quantized",),
        )
        for how, write in WRITES.items()
    },
    "every weight in new storage": Change(written(WRITES["in new storage"], *WEIGHTS), ("exact", GRAPHS), model=I2V),
    "a loaded state_dict": Change(loaded, ALL, refused=("quantized",)),
    # LoRAs
    "LoRAs": Change(loras, ALL, families=("anyflow",), before=True),
    "a LoRA with a scale in the call": Change(
        called(add_lora, WITH_LORA, lambda model: model.unload_lora()),
        TIERS,
        families=("skyreels",),
        call=(("attention_kwargs", {"scale": 0.3}),),
    ),
    "a LoRA that is fused": Change(fused_lora, UNQUANTIZED, ("chronoedit",)),
    "a DoRA": Change(
        called(
            lambda model: add_lora(model, use_dora=True, target_modules=["to_q"]),
            "LoRA layer: DoraLinearVariant",
            lambda model: model.unload_lora(),
        ),
        (*MOST, GRAPHS),
    ),
    # diffusers, accelerate, torchao, torch.compile. test_offloading.py offloads every family.
    "layerwise casting": Change(  # to bf16, which holds the weights exactly
        called(lambda model: model.enable_layerwise_casting(torch.bfloat16, torch.float32), "hook layerwise_casting"),
        TIERS,
        families=("anyflow far", "ltx2"),
        silent=True,
    ),
    "offloading of blocks": Change(
        called(group_offload(num_blocks_per_group=1), None),
        TIERS,
        silent=True,
        before=True,
    ),
    "offloading of leaves": Change(
        called(group_offload(offload_type="leaf_level"), {"quantized": None, None: "hook group_offloading"}),
        TIERS,
        silent=True,
        before=True,
    ),
    "sequential offloading": Change(
        called(
            lambda model: accelerate.cpu_offload(model, execution_device=CPU),
            {"quantized": None, None: "hook AlignDevicesHook"},
        ),
        TIERS,
        silent=True,
        before=r"has a hook AlignDevicesHook.*patch first",
    ),
    "model offloading": Change(
        called(
            lambda model: accelerate.cpu_offload_with_hook(model, execution_device=CPU),
            {GRAPHS: "hook CpuOffload", None: None},
        ),
        ALL,
        silent=True,
        before=True,
    ),
    "linears quantised by torchao": Change(
        quantised_by_torchao, ("exact", "block_sparse"), ("vace", "ltx2"), before=True
    ),
    "a compiled block": Change(
        replaced("blocks", "0", lambda blocks: torch.compile(blocks[0]), {GRAPHS: "OptimizedModule layer", None: None}),
        (*MOST, GRAPHS),
        silent=True,
        families=("anyflow",),
    ),
}
