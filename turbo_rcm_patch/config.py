"""What to patch and how: one frozen configuration, checked when it is made, and the presets that name one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from .tiers import (
    BLOCK_SPARSE,
    BLOCK_SPARSE_ATTENTION,
    EXACT,
    QUANTIZED,
    TIERS,
    ErrorLimits,
    Tier,
    tier_named,
    tier_with,
)

FUSION_GROUPS = ("self_attention", "cross_attention", "feed_forward")
ATTENTION_KERNELS = ("auto", "triton", "sdpa", BLOCK_SPARSE_ATTENTION)
LINEAR_KERNELS = ("auto", "triton", "torch")
IMPLEMENTATIONS = ("auto", "triton", "torch")
CUDA_GRAPH_MODES = ("auto", "on", "off")
QUANTIZABLE = ("attention", "linears")
RESIDUALS = ("fp16", "same")


@dataclass(frozen=True)
class PatchConfig:
    """Options of `patch`. The defaults are the preset "exact": no less accurate than without the patch.

    Attributes:
        fuse: the sub-layers of every block to fuse, any of FUSION_GROUPS; the others run diffusers' own code.
        attention: "auto" takes the faster kernel known for the GPU, "triton" this package's, "sdpa" PyTorch's. As
            `linears`, of what runs in the model's dtype: what the quantized tier has in 8 bits is this package's.
            "block_sparse", in the sparse tier: self-attention to the key blocks that are estimated to matter, for any
            model, and under autograd to all; without it that tier is SLA's, for weights that were trained with it.
        linears: who multiplies in the projections. "auto" takes the faster one known for the GPU, "triton" this
            package's GEMMs with what follows fused into them, "torch" PyTorch's linear, then this package's skip.
        implementation: "auto" runs Triton kernels on a GPU and the torch reference elsewhere; "triton" insists on the
            kernels (on the CPU: with TRITON_INTERPRET=1); "torch" takes the reference everywhere.
        cuda_graph: "off" never takes CUDA graphs; "auto" replays the transformer's forward as one where launching its
            kernels would take longer than running them (short or small videos), "on" at every size. What cannot be
            replayed safely (hooks, offloading, autograd and others) runs without one, and `summary()`
            says why.
        residual: "fp16" keeps the residual between the three skips of a bf16 block in fp16, divided by 32: it rounds
            with three more bits, holds values up to 2e6 and below 2e-3 rounds to multiples of 2e-6; models of other
            dtypes, autograd, blocks in 8 bits whose LoRA is faster so on sm_90, and "same" keep it in the model's
            dtype.
        tier: the kind of arithmetic (tiers.py), by name or as a Tier, and kept as a Tier: it says which errors are
            allowed, and refuses the options that mean nothing in it, with the reason.
        quantize: in the quantized and the sparse tier, what of a block is computed in 8 bits, any of QUANTIZABLE.
        keep: in these tiers, names of modules whose weights, and those of all that they hold, stay as they are, with
            wildcards, counted from the transformer: "blocks.0", "*.ffn.net.2".
        topk: in the sparse tier, the share of key blocks that each block of queries keeps, above 0 and at most 1.
        blocks: in the sparse tier, (queries, keys) in a block, as the weights were trained with. None: TurboDiffusion's
            own, (128, 64), and for 8-bit attention on sm_90 (64, 128); with attention="block_sparse" (128, 64), and for
            8-bit attention on sm_90 (192, 128).
        mass: with attention="block_sparse", the share of the estimated attention that the key blocks hold which each
            block of queries keeps, above 0 and at most 1: the more, the closer to dense attention.
        min_tokens: with attention="block_sparse", below how many tokens of a sample attention stays dense. On a GPU it
            does so too where no kernel takes the head's channels or, from 8192 tokens on, the blocks.
        exact_steps: for tiers that err more: (first, last), in how many of a generation's first and of its last steps
            the attention runs exactly. It needs a patched pipeline, whose scheduler counts the steps. None in the exact
            tier, whose steps all do.
        exact_layers: the same with attention="block_sparse": in how many of the first and last blocks of a model.
        vae: whether the decoder of a pipeline's AutoencoderKLWan is patched too, and what turns its frames into "np" or
            "pil". It computes in the VAE's own dtype in every tier. A VAE of another class stays as it is.
        vae_chunk: how many latent frames that decoder takes at a time; None: one, or as many more as fit in 1 GiB
            (128 MiB of a tile), and where memory is short a part of one. Fewer take less memory, more are faster where
            frames are small.
        restorable: False would let a tier give up the weights that it replaces. True: `restore()` brings all back.

    Raises ValueError when made with an unknown name, or with an option that means nothing in its tier.
    """

    fuse: Sequence[str] = FUSION_GROUPS
    attention: str = "auto"
    linears: str = "auto"
    implementation: str = "auto"
    cuda_graph: str = "auto"
    residual: str = "fp16"
    tier: Tier | str = EXACT
    quantize: Sequence[str] = QUANTIZABLE
    keep: Sequence[str] = ()
    topk: float = 0.1
    blocks: Sequence[int] | None = None
    mass: float = 0.9
    min_tokens: int = 8192
    exact_steps: Sequence[int] | None = None
    exact_layers: Sequence[int] | None = None
    vae: bool = True
    vae_chunk: int | None = None
    restorable: bool = True

    def __post_init__(self):
        if isinstance(self.tier, str):
            object.__setattr__(self, "tier", tier_named(self.tier))
        object.__setattr__(self, "tier", tier_with(self.tier, self.attention))
        for field, accepted in (("fuse", FUSION_GROUPS), ("quantize", QUANTIZABLE), ("keep", ("names of modules",))):
            value = getattr(self, field)
            if isinstance(value, str):
                raise ValueError(f"{field}={value!r} is a string; give a sequence of {', '.join(accepted)}.")
            object.__setattr__(self, field, tuple(value))
            for name in value if field != "keep" else ():
                _check_name(field, name, accepted)
        for name in self.keep:
            if not isinstance(name, str) or not name:
                raise ValueError(f"keep has {name!r}; give names of modules, such as 'blocks.0' or '*.ffn.net.2'.")
        self._check_exact("exact_steps", "steps")
        self._check_exact("exact_layers", "layers")
        self._check_sparsity()
        for field in ("vae", "restorable"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field}={getattr(self, field)!r}; give True or False.")
        if self.vae_chunk is not None and not (type(self.vae_chunk) is int and self.vae_chunk > 0):
            raise ValueError(f"vae_chunk={self.vae_chunk!r}; give a number of latent frames from 1 on, or None.")
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
        self._check_meaning()

    def _check_exact(self, field: str, of: str) -> None:
        value = getattr(self, field)
        if value is None:
            return
        counts = tuple(value) if isinstance(value, Sequence) else ()
        if len(counts) != 2 or not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"{field}={value!r}; give (first, last), two numbers of {of} from 0 on, or None.")
        object.__setattr__(self, field, counts)

    def _check_sparsity(self) -> None:
        for field, of in (("topk", "the key blocks"), ("mass", "the estimated attention")):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise ValueError(f"{field}={value!r}; it is a share of {of}, above 0 and at most 1.")
        if type(self.min_tokens) is not int or self.min_tokens < 0:
            raise ValueError(f"min_tokens={self.min_tokens!r}; give a number of tokens from 0 on.")
        if self.blocks is None:
            return
        blocks = tuple(self.blocks) if isinstance(self.blocks, Sequence) else ()
        if len(blocks) != 2 or not all(type(tokens) is int and tokens > 0 for tokens in blocks):
            raise ValueError(f"blocks={self.blocks!r}; give (queries, keys), two numbers of tokens, or None.")
        object.__setattr__(self, "blocks", blocks)

    @property
    def attends_exactly(self) -> bool:
        """Whether no self-attention errs more than in the exact tier."""
        return self.tier == EXACT or (self.tier == QUANTIZED and "attention" not in self.quantize)

    def in_8_bits(self, part: str) -> bool:
        """Whether a part of a block, one of QUANTIZABLE, is computed in 8 bits."""
        return self.tier != EXACT and part in self.quantize

    @property
    def limits(self) -> ErrorLimits:
        """What may be erred: as the tier allows, or as the exact one where nothing of a block is in 8 bits, and nothing
        is left out that the model was trained to see."""
        errs_more = self.tier == BLOCK_SPARSE or any(map(self.in_8_bits, QUANTIZABLE))
        return self.tier.limits if errs_more else replace(EXACT.limits, choice=self.tier.limits.choice)

    def _check_meaning(self) -> None:
        """Refuse an option that is set though the tier does nothing with it."""
        if self.attention == BLOCK_SPARSE_ATTENTION:
            if self.tier != BLOCK_SPARSE:
                raise ValueError(
                    f"attention='block_sparse' is the sparse tier's, and the {self.tier.name} tier attends to all "
                    "keys; give tier='sparse' with it."
                )
            if "self_attention" not in self.fuse:
                raise ValueError("attention='block_sparse' needs 'self_attention' in fuse: it is what runs it.")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in self.tier.meaningless and value != option.default:
                raise ValueError(
                    f"{option.name}={value!r} means nothing in this version: the {self.tier.name} tier "
                    f"{self.tier.meaningless[option.name]}; leave it at {option.default!r}."
                )


def _check_name(field: str, value: object, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{field}={value!r} is unknown; accepted are {', '.join(accepted)}.")


PRESETS = {name: PatchConfig(tier=tier, **options) for tier in TIERS.values() for name, options in tier.presets.items()}


def resolve_config(config: PatchConfig | str) -> PatchConfig:
    """The configuration itself, or that of the preset it names.

    Raises ValueError for an unknown preset and TypeError for anything else.
    """
    if isinstance(config, PatchConfig):
        return config
    if isinstance(config, str):
        if config not in PRESETS:
            raise ValueError(f"preset {config!r} is unknown; accepted are {', '.join(PRESETS)}.")
        return PRESETS[config]
    raise TypeError(f"config is a {type(config).__name__}; give a PatchConfig or the name of a preset.")
