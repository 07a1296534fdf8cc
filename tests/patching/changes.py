"""Changes that a user, a library or a program makes to a model. change_table.py has a row for each.

A change is a generator function of the model. It changes the model, then yields what the summary must say; code after
the last ``yield`` takes the change back. ``yield None`` means that the summary stays as it was, so that all steps are
still fused. A dictionary says it by tier, and under None for the others. Several yields are several stages.
"""

import functools
from collections import defaultdict
from contextlib import ExitStack, contextmanager

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import FP32LayerNorm, RMSNorm
from peft import LoraConfig
from torch import nn
from torch.utils._pytree import tree_map_only

from tests.patching.pairs import attention_class, blocks_of
from tests.tiny_families import tiny_family_transformer

GRAPHS = "graphs"  # the exact tier with CUDA graphs
ANYTHING = ""  # the summary may say what it likes
SEEN = defaultdict(list)  # by model: the tensors that a hook saw
CPU = torch.device("cpu")


# Kinds of changes


def hooked(path, says, register="register_forward_hook", hook=None):
    """A hook on a module. By default it negates the output, and notes what the module got and gave."""

    def make(model):
        def negate(module, args, output):
            SEEN[model] += [*args[:1], *(output if isinstance(output, tuple) else [output])]
            return tree_map_only(torch.Tensor, torch.neg, output)

        handle = getattr(model.get_submodule(path), register)(hook or negate)
        yield says
        handle.remove()

    return make


def negate_second(module, args, output):
    return tuple(-part if index == 1 else part for index, part in enumerate(output))


@contextmanager
def attribute(thing, name, value):
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        if name == "forward" and not isinstance(thing, type):
            del thing.forward
        else:
            setattr(thing, name, before)


def replaced(path, name, value, says=None):
    """An attribute of a part of the model. value: a function of the part, or of the model for a path of ""."""

    def make(model):
        part = model.get_submodule(path)
        with attribute(part, name, value(part)):
            yield says

    return make


def within(context, says=None):
    """A context of the whole program. context: a function of the model."""

    def make(model):
        with context(model):
            yield says

    return make


def called(function, says=None, back=lambda model: None):
    """A function of the model, and one that takes back what it did."""

    def make(model):
        function(model)
        yield says
        back(model)

    return make


class DoubledFeedForward(FeedForward):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def a_layer_more(path, says):
    """A layer after those of a part."""

    def make(model):
        layers = model.get_submodule(path)
        layers.append(Doubled())
        yield says
        del layers[-1]

    return make


def doubled_processor(attn):
    class Doubled(type(attn)._default_processor_cls):
        def __call__(self, *args, **kwargs):
            return 2 * super().__call__(*args, **kwargs)

    return Doubled()


def doubled_text(embedder):
    class Doubled(type(embedder)):
        def forward(self, *args, **kwargs):
            temb, timestep_proj, text, image = super().forward(*args, **kwargs)
            return temb, timestep_proj, 2 * text, image

    return Doubled


class Scaled(nn.Module):
    """A layer whose output depends on more than parameters."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, 2.0

    def forward(self, x):
        return self.scale * self.inner(x)


def in_a_layer_of_ones_own(path, name):
    def make(model):
        part = model.get_submodule(path)
        with attribute(part, name, Scaled(getattr(part, name))):
            for scale in (2.0, 4.0):
                getattr(part, name).scale = scale
                yield {GRAPHS: "tests Scaled layer", None: ANYTHING}

    return make


def another_linear(old):
    torch.manual_seed(4)
    return nn.Linear(old.in_features, old.out_features).requires_grad_(False)


# Methods that a program replaces on classes, in several ways


def scaled(method):
    def longer(self, *args, **kwargs):
        output = method(self, *args, **kwargs)
        return (1.5 * output[0],) if isinstance(output, tuple) else 1.5 * output

    return longer


def under_its_name(method):
    return functools.wraps(method)(scaled(method))


def in_its_module(method):
    longer = scaled(method)
    longer.__module__ = method.__module__
    return longer


def below_a_decorator(method):
    return torch.no_grad()(under_its_name(method))


class AnObject:
    """A callable object in place of a method, under the method's name."""

    def __init__(self, method):
        functools.update_wrapper(self, method)

    def __get__(self, instance, owner):
        return self if instance is None else functools.partial(scaled(self.__wrapped__), instance)


# part: (its class in a model, families that have another one)
CLASSES = {
    "a linear": (lambda model: nn.Linear, ()),
    "a norm": (lambda model: FP32LayerNorm, ()),
    "a QK-norm": (lambda model: type(model.blocks[0].attn1.norm_q), ("anyflow", "animate", "skyreels")),
    "an attention": (attention_class, ("vace", "anyflow", "animate")),
    "a feed-forward": (lambda model: FeedForward, ()),
    "an activation": (lambda model: GELU, ()),
    "a dropout": (lambda model: nn.Dropout, ()),
}
CLASS_FORWARD = "replaced forward of its class"


def method(find, replace, name="forward"):
    """A context in which a class has another method. find: gives the class of a model."""
    return lambda model: attribute(find(model), name, replace(getattr(find(model), name)))


def default_processor(model):
    return attention_class(model)._default_processor_cls


def decorated(model):
    """A context in which torch's decorators are on the forwards of all classes. They change nothing."""
    stack = ExitStack()
    for cls in {find(model) for find, _ in CLASSES.values()}:
        stack.enter_context(attribute(cls, "forward", torch.no_grad()(cls.forward)))
    return stack


@contextmanager
def global_hook(model):
    double = lambda module, _, output: 2 * output if isinstance(module, nn.Linear) else None  # noqa: E731
    handle = nn.modules.module.register_module_forward_hook(double)
    yield
    handle.remove()


# Changes in stages


def projections_without_a_bias(model):
    attn = model.blocks[1].attn1
    with attribute(attn.to_v, "bias", None):
        yield "unequal projections"
        with attribute(attn.to_q, "bias", None), attribute(attn.to_k, "bias", None):
            yield None


def unusual_norms(model):
    attn = model.blocks[1].attn1
    norms = {"without a weight": {"elementwise_affine": False}, "with a bias": {"bias": True}}
    for kind, options in norms.items():
        norm = RMSNorm(attn.inner_dim, eps=1e-6, **options)
        if norm.bias is not None:
            nn.init.ones_(norm.bias)
        with attribute(attn, "norm_q", norm):
            yield f"RMSNorm {kind} (1)"


def blocks_that_come_and_go(model):
    blocks = model.blocks
    torch.manual_seed(6)
    model.blocks = nn.ModuleList([*blocks, type(model).from_config(model.config).eval().blocks[0]])
    yield {GRAPHS: ANYTHING, None: "blocks that came after the patch and run as diffusers' own: 1\n"}
    model.blocks = blocks[:1]
    yield {GRAPHS: None, None: "1 blocks"}
    model.blocks = nn.ModuleList()
    yield {GRAPHS: None, None: "0 blocks"}
    model.blocks = blocks


def fused_projections(model):
    model.fuse_qkv_projections()
    yield {GRAPHS: None, None: f"fused projections ({len(model.blocks)})"}
    model.unfuse_qkv_projections()
    yield None


def dropout_in_training(model):
    with attribute(model.blocks[0].attn1.to_out[1], "p", 0.5):
        model.train()
        yield "dropout"
        model.eval()


def an_attribute_of_each_step(model):
    for step in range(3):
        model.current_step = step
        yield None


WEIGHTS = (
    "patch_embedding.weight",
    "condition_embedder.image_embedder.ff.net.2.weight",
    "rope.freqs_cos",
    "blocks.0.scale_shift_table",
    "blocks.0.attn2.to_v.bias",
    "blocks.0.attn2.add_k_proj.weight",
    "scale_shift_table",
)
WRITES = {
    "in place": lambda tensor: tensor.mul_(-1.5),
    "through data": lambda tensor: tensor.data.mul_(-1.5),
    "one element": lambda tensor: tensor.data.view(-1)[-1].add_(30.0),
    "swapped": lambda tensor: tensor.data.copy_(tensor.data.flip(0).clone()),
    "transposed": lambda tensor: setattr(tensor, "data", tensor.data.t()),
    "in new storage": lambda tensor: setattr(tensor, "data", tensor.data * -1.5),
}


def written(write, *paths):
    @torch.no_grad()
    def make(model):
        for path in paths:
            module, _, name = path.rpartition(".")
            write(getattr(model.get_submodule(module), name))
            yield None

    return make


def loaded(model):
    state = tiny_family_transformer("wan", seed=5).state_dict()
    model.load_state_dict(state, strict=False)
    yield None
    model.load_state_dict({name: -tensor for name, tensor in state.items()}, strict=False, assign=True)
    yield None


TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
WITH_LORA = {"exact": "PyTorch linear + LoRA", GRAPHS: None, None: ANYTHING}


def add_lora(model, name="first", seed=5, **options):
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": TARGETS} | options)
    model.add_adapter(config, adapter_name=name)


def loras(model):
    add_lora(model)
    yield WITH_LORA
    add_lora(model, "second", 9)
    model.set_adapters(["first", "second"], [0.5, 0.7])
    yield WITH_LORA
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-2)
    yield WITH_LORA
    model.disable_lora()
    yield {GRAPHS: None, None: ANYTHING}
    model.enable_lora()
    yield WITH_LORA
    model.unload_lora()


def fused_lora(model):
    """Fusing writes the weights through .data, which no version counter sees."""
    add_lora(model)
    model.fuse_lora()
    model.unload_lora()
    yield None
    add_lora(model)
    yield WITH_LORA
    model.fuse_lora(lora_scale=0.5)
    yield {"exact": "PyTorch linear", None: ANYTHING}
    model.unfuse_lora()
    model.set_adapters(["first"], [0.3])
    yield WITH_LORA
    model.unload_lora()


def quantised_by_torchao(model):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(blocks_of(model), Int8WeightOnlyConfig(), filter_fn=lambda module, _: isinstance(module, nn.Linear))
    yield " weight"


def group_offload(**options):
    return lambda model: model.enable_group_offload(onload_device=CPU, offload_device=CPU, **options)
