"""The options of a patch: one frozen configuration class per tier, checked when it is made, and the presets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from .keep_list import REMEDY, KeepList
from .tiers import BLOCK_SPARSE, DECODED_IN_8_BITS, EXACT, QUANTIZED, SPARSE, ErrorLimits, Tier

FUSION_GROUPS = ("self_attention", "cross_attention", "feed_forward")
ATTENTION_KERNELS = ("auto", "triton", "sdpa")
LINEAR_KERNELS = ("auto", "triton", "torch")
IMPLEMENTATIONS = ("auto", "triton", "torch")
CUDA_GRAPH_MODES = ("auto", "on", "off")
QUANTIZABLE = ("attention", "linears")
RESIDUALS = ("fp16", "same")
VAE_8BIT = "8bit"  # the value of `vae` for convolutions in 8 bits


@dataclass(frozen=True, kw_only=True)
class PatchConfig:
    """The options that all tiers have. Make an `Exact`, `Quantized`, `Sparse` or `BlockSparse`, not this class.

    Attributes:
        tier: the tier that the class belongs to, with its name, description and error limits (tiers.py).
        fuse: the sub-layers of every block to fuse, any of FUSION_GROUPS. The others run diffusers' own code.
        attention: the kernel for attention in the model's dtype. "auto" takes the faster one known for the GPU,
            "triton" this package's, "sdpa" PyTorch's. A function in place of F.scaled_dot_product_attention counts as
            PyTorch's, and "auto" takes it. Attention in 8 bits and sparse attention are always this package's.
        linears: which matmul the projections in the model's dtype use. "auto" takes the faster one known for the GPU,
            "triton" this package's GEMMs with what follows fused into them, "torch" PyTorch's linear, then this
            package's skip.
        implementation: "auto" runs Triton kernels on a GPU and the torch reference elsewhere. "triton" insists on the
            kernels (on the CPU: with TRITON_INTERPRET=1, not in bf16). "torch" takes the reference everywhere.
        cuda_graph: "auto" replays the transformer's forward as one CUDA graph where launching its kernels would take
            longer than running them (short or small videos). "on" does so at every size, "off" never. Calls that
            cannot be replayed safely (hooks, offloading, autograd and others) run without a graph, and `summary()` says
            why.
        residual: "fp16" keeps the residual between the three skips of a bf16 block in fp16, divided by 32. This format
            has three more bits, and holds values up to 2e6. It rounds values below 2e-3 to multiples of 2e-6. "same"
            keeps the residual in the model's dtype. So do, always: models of other dtypes, calls under autograd, and
            8-bit blocks with a LoRA on sm_90, which run faster so.
        vae: True patches a pipeline's AutoencoderKLWan or AutoencoderKLQwenImage too, and the conversion of its frames
            to "np" or "pil". The VAE computes in its own dtype in every tier. VAEs of other classes stay as they are.
            "8bit" also runs most of the decoder's convolutions in 8 bits, on a GPU. Decoded frames then differ from
            exact ones (docs/tiers.md).
        vae_chunk: how many latent frames the VAE takes at a time. Fewer take less memory; more are faster if frames
            are small. None: one, or as many more as fit in 1 GiB (128 MiB for a tile), or part of one if frames are
            large or memory is short.

    Raises TypeError for an option that the tier does not have, and ValueError for a value that an option does not take.
    """

    fuse: Sequence[str] = FUSION_GROUPS
    attention: str = "auto"
    linears: str = "auto"
    implementation: str = "auto"
    cuda_graph: str = "auto"
    residual: str = "fp16"
    vae: bool | str = True
    vae_chunk: int | None = None

    tier: ClassVar[Tier]
    # The values for tiers without these options.
    quantize: ClassVar[tuple[str, ...]] = ()
    exact_steps: ClassVar[tuple[int, int] | None] = None
    keep: ClassVar[tuple[str, ...]] = ()
    restorable: ClassVar[bool] = True

    def __new__(cls, *_: object, **options: object):
        if not hasattr(cls, "tier"):
            raise TypeError(
                f"{cls.__name__} is not the configuration of a tier; make one of {', '.join(map(_name, CLASSES))}."
            )
        for option in options:
            if option not in options_of(cls):
                raise TypeError(_why_no_option(cls, option))
        return super().__new__(cls)

    def __post_init__(self):
        self._check_names("fuse", FUSION_GROUPS)
        if not isinstance(self.vae, bool) and self.vae != VAE_8BIT:
            raise ValueError(f"vae={self.vae!r}; give True, False or {VAE_8BIT!r}.")
        if self.vae_chunk is not None and not (type(self.vae_chunk) is int and self.vae_chunk > 0):
            raise ValueError(
                f"vae_chunk={self.vae_chunk!r}; give a whole number of latent frames, at least 1, or None."
            )
        _check_name("attention", self.attention, ATTENTION_KERNELS)
        _check_name("linears", self.linears, LINEAR_KERNELS)
        _check_name("implementation", self.implementation, IMPLEMENTATIONS)
        _check_name("cuda_graph", self.cuda_graph, CUDA_GRAPH_MODES)
        _check_name("residual", self.residual, RESIDUALS)
        contradictions = {"attention": ("triton torch", "sdpa triton"), "linears": ("triton torch",)}
        for field, pairs in contradictions.items():
            if f"{getattr(self, field)} {self.implementation}" in pairs:
                raise ValueError(
                    f"{field}={getattr(self, field)!r} contradicts implementation={self.implementation!r}; leave one "
                    "at 'auto'."
                )

    @property
    def limits(self) -> ErrorLimits:
        """The errors that are allowed with these options: the tier's, or the exact tier's if nothing is in 8 bits."""
        return self.tier.limits if self.quantize else replace(EXACT.limits, choice=self.tier.limits.choice)

    @property
    def decode_limits(self) -> ErrorLimits:
        """The errors that are allowed in decoded frames."""
        return DECODED_IN_8_BITS if self.vae == VAE_8BIT else EXACT.limits

    def in_8_bits(self, part: str) -> bool:
        """True if a part of a block, one of QUANTIZABLE, is computed in 8 bits."""
        return part in self.quantize

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _check_names(self, field: str, accepted: tuple[str, ...]) -> None:
        """Keep a sequence of names as a tuple. Raises ValueError for a string, or a name that is not accepted."""
        names = getattr(self, field)
        if isinstance(names, str):
            raise ValueError(f"{field}={names!r} is a string; give a list with any of {', '.join(accepted)}.")
        for name in names:
            _check_name(field, name, accepted)
        self._set(field, tuple(names))

    def _check_pair(self, field: str, what: str, least: int) -> None:
        """Keep a pair of numbers as a tuple. Raises ValueError for anything else except None."""
        value = getattr(self, field)
        if value is None:
            return
        pair = tuple(value) if isinstance(value, Sequence) else ()
        if len(pair) != 2 or not all(type(number) is int and number >= least for number in pair):
            raise ValueError(f"{field}={value!r}; give {what}, or None.")
        self._set(field, pair)


@dataclass(frozen=True, kw_only=True)
class _In8Bits(PatchConfig):
    """The options of the tiers that compute in 8 bits. `Quantized` describes them."""

    quantize: Sequence[str] = QUANTIZABLE
    keep: Sequence[str] | str | Path = ()
    restorable: bool = True

    def __post_init__(self):
        super().__post_init__()
        self._check_names("quantize", QUANTIZABLE)
        self._set("keep", _names_to_keep(self.keep))
        _check_flag("restorable", self.restorable)


@dataclass(frozen=True, kw_only=True)
class Exact(PatchConfig):
    """The model's own bf16, fp16 or fp32, no less accurate than the unpatched model. All options: see `PatchConfig`."""

    tier: ClassVar[Tier] = EXACT


@dataclass(frozen=True, kw_only=True)
class Quantized(_In8Bits):
    """8-bit attention and linears. The other options are those of every tier, see `PatchConfig`.

    Attributes:
        quantize: what is computed in 8 bits, any of "attention" and "linears".
        keep: modules whose weights stay in the model's dtype, with all modules inside them. Paths in the transformer,
            with wildcards: "blocks.0", "*.ffn.net.2". A name that ends in ".processor" is that of a self-attention
            which computes in the model's dtype itself: "blocks.3.attn1.processor". Or the JSON file of such names that
            ``turbo-rcm verify --keep-out`` wrote.
        exact_steps: (first, last): in how many of a generation's first and last steps attention runs exactly. Needs
            "attention" in `quantize`, and a patched pipeline, whose scheduler counts the steps.
        restorable: True keeps the original weights on the CPU, and `restore()` brings them back. False frees them.
    """

    exact_steps: Sequence[int] | None = None

    tier: ClassVar[Tier] = QUANTIZED

    def __post_init__(self):
        super().__post_init__()
        self._check_pair("exact_steps", "(first, last), two whole numbers of steps, at least 0", 0)
        if self.exact_steps is not None and "attention" not in self.quantize:
            raise ValueError(
                f"exact_steps={self.exact_steps!r} changes nothing: quantize={self.quantize!r} has no attention in 8 "
                "bits; leave exact_steps at None."
            )


SLA_TOPK = 0.1  # the share of key blocks that TurboDiffusion publishes for Wan


@dataclass(frozen=True, kw_only=True)
class Sparse(_In8Bits):
    """Sparse-linear attention (SLA), for weights that were trained with it. The other options: see `PatchConfig`.

    `keep` and `restorable` are as in `Quantized`.

    Attributes:
        quantize: what is computed in 8 bits, any of "attention" (SLA's softmax, not its linear part) and "linears".
        topk: the share of key blocks that each block of queries keeps, above 0 and at most 1. None: the published one,
            0.1 for Wan and 0.3 for LTX-2.
        blocks: (queries, keys), the tokens in a block that the weights were trained with. None: TurboDiffusion's own,
            (128, 64), and for 8-bit attention on sm_90 (64, 128).
    """

    topk: float | None = None
    blocks: Sequence[int] | None = None

    tier: ClassVar[Tier] = SPARSE

    def __post_init__(self):
        super().__post_init__()
        if self.topk is not None:
            _check_share("topk", self.topk, "the key blocks")
        self._check_pair("blocks", "(queries, keys), two whole numbers of tokens, at least 1", 1)


@dataclass(frozen=True, kw_only=True)
class BlockSparse(_In8Bits):
    """Self-attention to the key blocks with the largest estimated share, for any model. More options: `PatchConfig`.

    Under autograd attention is dense. `quantize`, `keep` and `restorable` are as in `Quantized`.

    Attributes:
        mass: the share of its estimated attention that the kept key blocks of each block of queries hold, above 0 and
            at most 1. A larger share is closer to dense attention.
        blocks: (queries, keys), the tokens in a block. None: (128, 64), and for 8-bit attention on sm_90 (192, 128).
        min_tokens: attention is dense for samples of fewer tokens. On a GPU it is dense too where no kernel takes the
            head's channels or, from 8192 tokens on, the blocks.
        exact_steps: (first, last): in how many of a generation's first and last steps attention is dense and in the
            model's dtype. Needs a patched pipeline, whose scheduler counts the steps.
        exact_layers: (first, last): the same for the first and last blocks of a model.
    """

    mass: float = 0.9
    blocks: Sequence[int] | None = None
    min_tokens: int = 8192
    exact_steps: Sequence[int] | None = None
    exact_layers: Sequence[int] | None = None

    tier: ClassVar[Tier] = BLOCK_SPARSE

    def __post_init__(self):
        super().__post_init__()
        _check_share("mass", self.mass, "the estimated attention")
        self._check_pair("blocks", "(queries, keys), two whole numbers of tokens, at least 1", 1)
        if type(self.min_tokens) is not int or self.min_tokens < 0:
            raise ValueError(f"min_tokens={self.min_tokens!r}; give a whole number of tokens, at least 0.")
        self._check_pair("exact_steps", "(first, last), two whole numbers of steps, at least 0", 0)
        self._check_pair("exact_layers", "(first, last), two whole numbers of layers, at least 0", 0)
        if "self_attention" not in self.fuse:
            raise ValueError(
                f"fuse={self.fuse!r} lacks 'self_attention', which runs the block-sparse attention; add it."
            )

    @property
    def limits(self) -> ErrorLimits:
        """The tier's limits, in 8 bits or not, because it always leaves out keys that training saw."""
        return self.tier.limits


def _check_name(field: str, value: object, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{field}={value!r} is unknown; accepted are {', '.join(accepted)}.")


def _names_to_keep(keep: Sequence[str] | str | Path) -> tuple[str, ...]:
    """Return a list of names, or the names in a file. Raises ValueError for anything else."""
    if isinstance(keep, (str, Path)):
        if Path(keep).suffix != ".json":
            raise ValueError(f"keep={keep!r} is a string; {REMEDY}")
        return KeepList.read(keep)
    for name in keep:
        if not isinstance(name, str) or not name:
            raise ValueError(f"keep contains {name!r}; give names of modules, such as 'blocks.0' or '*.ffn.net.2'.")
    return keep if isinstance(keep, KeepList) else tuple(keep)


def _check_flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{field}={value!r}; give True or False.")


def _check_share(field: str, value: object, whole: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{field}={value!r}; give a share of {whole}, above 0 and at most 1.")


CLASSES: tuple[type[PatchConfig], ...] = (Exact, Quantized, Sparse, BlockSparse)
PRESETS: dict[str, PatchConfig] = {config_class.tier.name: config_class() for config_class in CLASSES}


def resolve_config(config: PatchConfig | str) -> PatchConfig:
    """Return the configuration itself, or the named preset's.

    Raises ValueError for an unknown preset and TypeError for anything else.
    """
    if isinstance(config, PatchConfig):
        return config
    if isinstance(config, str):
        if config not in PRESETS:
            raise ValueError(f"preset {config!r} is unknown; accepted are {', '.join(PRESETS)}.")
        return PRESETS[config]
    raise TypeError(
        f"config={config!r}; give a configuration, such as {_name(Exact)}(), or the name of a preset: "
        f"{', '.join(PRESETS)}."
    )


def options_of(config_class: type[PatchConfig]) -> frozenset[str]:
    """Return the names of a configuration's options."""
    return frozenset(field.name for field in fields(config_class))


def without_originals(config: PatchConfig) -> PatchConfig:
    """Return a configuration that frees the weights that 8 bits replace. `restore()` is not possible then."""
    return replace(config, restorable=False) if "restorable" in options_of(type(config)) else config


def presets_with(option: str) -> tuple[str, ...]:
    """Return the presets whose tier has this option."""
    return tuple(name for name, config in PRESETS.items() if option in options_of(type(config)))


def _name(config_class: type[PatchConfig]) -> str:
    return f"trp.{config_class.__name__}"


def _why_no_option(config_class: type[PatchConfig], option: str) -> str:
    owners = [_name(other) for other in CLASSES if option in options_of(other)]
    if owners:
        hint = f"{' and '.join(owners)} {'have' if len(owners) > 1 else 'has'} it"
    else:
        hint = f"accepted are {', '.join(field.name for field in fields(config_class))}"
    return f"{option!r} is not an option of {_name(config_class)}, the {config_class.tier.name} tier; {hint}."
