"""The summary of a patch: the kernel of every step of the blocks, and why some steps are not fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from diffusers.utils.torch_utils import get_module_execution_device
from torch import nn

from .. import kernels
from ..config import BlockSparse, PatchConfig, Sparse
from ..kernels.choice import measured
from ..kernels.choice.measured import Verdict
from ..plain import is_sharded
from ..tables import table
from ..wording import counted
from .families import family_of
from .families import vae as vae_family
from .families.family import BlockPlan, Blocks
from .sampling.step_count import NOT_COUNTED
from .steps.context_parallel import ranks_of
from .steps.layers import ALONE
from .steps.plan import NOTHING, SHARED, Call, Step, active_backend, is_patched, state_of
from .steps.residual import CUT_OFF
from .tiny_vae.decoding import has_tiny_vae
from .weights.quantize_linears import weights_note

HEADER = ("sub-layer", "step", "kernel", "fused", "not fused because")
FOOTER = "under autograd steps without a gradient run as torch ops; under autocast blocks run diffusers' code"
DENSE_FOOTER = "under autograd block-sparse attention is dense"
VAE_FOOTER = "under autograd, autocast and torch.compile, and where a step says so, diffusers' own code runs"
NOT_CALLED_NOTE = "sharded or offloaded, and not called yet: what is fused shows after a first call"
LAST_CALL_NOTE = "sharded or offloaded: the weights are here only while blocks run, so the table shows the last call"


class Row(NamedTuple):
    """One step of equal blocks.

    kernel: the name of the kernel, or of several. count: the number of blocks with this step. reasons: the number of
    blocks where the step is not fused, by reason.
    """

    blocks: str
    sub_layer: str
    step: str
    kernel: str
    count: int
    reasons: dict[str, int]

    def cells(self) -> tuple[str, ...]:
        because = "; ".join(f"{reason} ({count})" for reason, count in self.reasons.items())
        fused = f"{self.count - sum(self.reasons.values())}/{self.count}"
        return self.sub_layer, self.step, self.kernel, fused, because


class Section(NamedTuple):
    """A part of the summary: tables of steps with titles, and notes below them."""

    tables: list[tuple[str, list[Row]]]
    notes: list[str]


def as_text(sections: Iterable[Section]) -> str:
    """Return the sections as text for a terminal, with aligned columns."""
    return "\n\n".join(map(_section_text, sections))


def _section_text(section: Section) -> str:
    tables = ["\n  ".join([title, *_lines(rows)]) for title, rows in section.tables]
    return "\n  ".join(["\n".join(tables), *section.notes])


def _lines(rows: list[Row]) -> list[str]:
    return table([HEADER, *(row.cells() for row in rows)], numbers=False).splitlines() if rows else []


def in_one_line(rows: Iterable[Row], unknown: Iterable[str] = ()) -> str:
    """Return how many parts of a model's layers are fused, and why the others are not.

    Parts with nothing to fuse do not count. unknown: names of models that are not patched.
    """
    reasons: Counter[str] = Counter()
    total = 0
    for row in rows:
        total += row.count
        reasons.update(row.reasons)
    total -= reasons.pop(ALONE, 0)
    text = f"{total - reasons.total()} of {counted(total, 'part')} of its layers are fused"
    if reasons:
        text += f" (why not the others: {', '.join(reason for reason, _ in reasons.most_common())})"
    return text + "".join(f"; the {name} is not patched" for name in unknown)


def transformer_section(name: str, transformer: nn.Module) -> Section:
    """Return a table for each list of blocks, then notes.

    A row shows a step, its kernel, how many blocks are fused there, and why the others are not.
    """
    family, tables = family_of(transformer), []
    for blocks in family.blocks:
        title = f"{len(getattr(transformer, blocks.name))} {blocks.name}"
        rows = list(plan_rows(transformer, blocks))
        tables.append((_title(name, transformer, title, family.compute_dtype(transformer)), rows))
    patched = [block for _, block in family.blocks[0].of(transformer) if is_patched(block)]
    shared, device = vars(transformer)[SHARED], device_of_calls(transformer)
    plans = (current_plan(transformer, family.blocks[0], block, device) for block in patched)
    stored = dict.fromkeys(str(plan.residual) for plan in plans)
    notes = [f"residual between a block's skips: {'; '.join(stored)}"] if stored else []
    config = shared.config
    added = sum(not is_patched(block) for _, block in family.every_block(transformer))
    notes += [f"blocks that came after the patch and run as diffusers' own: {added}"] if added else []
    away = [block for block in patched if _is_away(block, device)]
    if away:
        notes.append(NOT_CALLED_NOTE if any(state_of(block).plans.ran is None for block in away) else LAST_CALL_NOTE)
    notes += [CUT_OFF] if shared.saturation.happened() else []
    notes += filter(None, [weights_note(transformer), shared.from_file, _exact_steps(config)])
    notes += [*_measurements("attention and linears", "attention", device), *beside_exact(_slower(config, device))]
    footer = f"{DENSE_FOOTER}; {FOOTER}" if isinstance(config, BlockSparse) else FOOTER
    return Section(tables, [*notes, *family.notes(transformer), footer])


def unknown_line(name: str, model: nn.Module) -> str:
    """Return a line on a transformer that no family knows, in a pipeline whose VAE is patched."""
    kind = type(getattr(model, "_orig_mod", model)).__name__
    return f"{name}: {kind}, as without the patch: its class is unknown; only the VAE is patched"


def vae_section(vae: nn.Module, config: PatchConfig) -> Section:
    """Return a table for each network of a VAE, then notes, or why the VAE is not patched.

    config: of the patch whose summary this is.
    """
    state = vae_family.vae_state(vae)
    if state is None:
        reason = vae_family.why_left_alone(vae) or "restored"
        return Section([(f"vae: {type(vae).__name__}, as without the patch: {reason}", [])], [])
    tables = [(_title("vae", vae, name, vae.dtype), list(_network_rows(vae, name))) for name in _networks(vae)]
    options = ("vae", "vae_chunk", "implementation")
    theirs = [f"{name}={getattr(state.config, name)!r}" for name in options]
    is_others = any(getattr(state.config, name) != getattr(config, name) for name in options)
    notes = [f"patched by another call of patch, whose options stay: {', '.join(theirs)}"] if is_others else []
    if vae.dtype in measured.MEASURED_DTYPES:  # otherwise every convolution's row says that it was not measured
        notes += _measurements("convolutions", "conv_skip", get_module_execution_device(vae))
    if has_tiny_vae(vae):
        notes.append("a tiny VAE decodes, whole frames in every process")
    return Section(tables, [*notes, *vae_family.vae_notes(vae, decodes=not has_tiny_vae(vae)), VAE_FOOTER])


def vae_rows(vae: nn.Module) -> Iterator[Row]:
    """Yield a row for each step of a VAE's encoder and decoder. A VAE that is not patched has none."""
    if vae_family.vae_state(vae) is not None:
        for network in _networks(vae):
            yield from _network_rows(vae, network)


def _networks(vae: nn.Module) -> list[str]:
    """Return the networks that run: not the decoder, if a tiny VAE decodes in its place."""
    return [name for name in vae_family.NETWORKS if name != "decoder" or not has_tiny_vae(vae)]


def _network_rows(vae: nn.Module, network: str) -> Iterator[Row]:
    for name, steps in vae_family.network_steps(vae, network):
        yield _row(network, network, name, steps)


def _exact_steps(config: PatchConfig) -> str | None:
    if not any(config.exact_steps or ()):
        return None
    first, last = config.exact_steps
    return f"self-attention in the model's dtype in the first {first} and last {last} steps, under torch.compile in all"


def _measurements(steps: str, op: str, device: torch.device) -> list[str]:
    """Return a line on the measurements that choose between our kernels and PyTorch's for steps like this op."""
    if device.type != "cuda":
        return []
    gpus = kernels.measured_on(op, device)
    if gpus is None:
        return [
            f"{steps}: PyTorch's kernel if it has one, because ours were not measured on this GPU; run turbo-rcm tune"
        ]
    return [f"{steps}: the faster ones as measured on {gpus}"]


def beside_exact(verdicts: Mapping[str, Verdict]) -> list[str]:
    """Return a line on the speed of parts of other tiers that turbo-rcm tune measured, or none without verdicts."""
    if not verdicts:
        return []
    (gpu,) = next(iter(verdicts.values())).gpus
    return [f"beside the exact tier, on {gpu}: " + ", ".join(f"{name} {v.speed}" for name, v in verdicts.items())]


def _slower(config: PatchConfig, device: torch.device) -> dict[str, Verdict]:
    """Return the parts of the tier that turbo-rcm tune found slower than the exact tier's, or too inaccurate."""
    parts = _measured_parts(config)
    return {part: v for part, v in kernels.tuned_tiers(device).items() if part in parts and not v.is_ours}


def _measured_parts(config: PatchConfig) -> list[str]:
    """Return the parts of the tier that turbo-rcm tune measures: those in 8 bits."""
    attentions = {Sparse: measured.SPARSE_LINEAR, BlockSparse: measured.BLOCK_SPARSE}
    parts = {"attention": attentions.get(type(config), measured.ATTENTION_8BIT), "linears": measured.LINEARS_8BIT}
    return [part for name, part in parts.items() if config.in_8_bits(name)]


def _title(name: str, model: nn.Module, what: str, dtype: torch.dtype) -> str:
    device = _device_name(get_module_execution_device(model))
    return f"{name}: {type(model).__name__}, {what}, {str(dtype).removeprefix('torch.')} on {device}"


def plan_rows(transformer: nn.Module, blocks: Blocks) -> Iterator[Row]:
    """Yield a row for each step of a list of blocks, for the present state of the model. Skip steps that do nothing."""
    order: list[tuple[str, str]] = []
    found: dict[tuple[str, str], list[Step]] = {}
    device = device_of_calls(transformer)
    for block in (block for _, block in blocks.of(transformer) if is_patched(block)):
        place = 0
        for *key, parts in current_plan(transformer, blocks, block, device).rows():
            decisive = next((part for part in parts if part.reason is not None), parts[0])
            if decisive.kernel != NOTHING:
                place = _placed(tuple(key), order, place)
                found.setdefault(tuple(key), []).append(decisive)
    for key in order:
        yield _row(blocks.name, *key, found[key])


def _placed(key: tuple[str, str], order: list[tuple[str, str]], place: int) -> int:
    """Insert a step at this place of the order if it is new. Return the place after it."""
    if key not in order:
        order.insert(place, key)
    return order.index(key) + 1


def _row(blocks: str, sub_layer: str, name: str, steps: Sequence[Step]) -> Row:
    """Return the row of a step, from the blocks that have it."""
    kernels_taken = "; ".join(dict.fromkeys(step.kernel for step in steps))
    reasons = Counter(step.reason for step in steps if step.reason is not None)
    return Row(blocks, sub_layer, name, kernels_taken, len(steps), dict(reasons))


def current_plan(transformer: nn.Module, blocks: Blocks, block: nn.Module, device: torch.device) -> BlockPlan:
    """Return what a block would do now with a call like its last one, outside of autograd and of `exact_steps`.

    If such a call ran and the block has not changed since, this is the plan that ran.

    device: that of `device_of_calls`, which is slow to find: it walks through the whole model.

    For a block whose weights are sharded or offloaded until it runs, return the last plan that ran. For one that was
    not called yet, return that of a usual video, of which each of several GPUs has a share of the tokens.
    """
    state = state_of(block)
    if state.plans.ran is not None and _is_away(block, device):
        return state.plans.ran
    latest = state.plans.latest
    if latest is None:
        call = Call(state.shared.config, torch.device("cpu"), torch.float32, None, active_backend())
        latest = blocks.usual_call(call)
        own = latest.stream.tokens // ranks_of(transformer._parallel_config)
        latest = latest._replace(stream=latest.stream._replace(tokens=own))
    dtype = family_of(transformer).compute_dtype(transformer)
    exactly = state.exactly or (NOT_COUNTED if latest.call.exactly == NOT_COUNTED else None)
    now = {"device": device, "dtype": dtype, "derivative": None, "backend": active_backend(), "exactly": exactly}
    now["sdpa"] = torch.nn.functional.scaled_dot_product_attention
    return state.plans.shown(block, latest._replace(call=latest.call._replace(**now)), blocks.decide)


def device_of_calls(transformer: nn.Module) -> torch.device:
    """Return the device that a transformer runs on, with its index. Offloaded weights are elsewhere between calls."""
    return torch.empty(0, device=get_module_execution_device(transformer)).device


def _is_away(block: nn.Module, device: torch.device) -> bool:
    """True if a block's weights are sharded, or are on another device than the model runs on."""
    return is_sharded(block) or any(parameter.device != device for parameter in block.parameters())


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
