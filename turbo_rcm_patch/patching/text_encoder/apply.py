"""patch_text_encoder: check everything, then change. After any failure all changes are undone."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from transformers import UMT5EncoderModel
from transformers.models.umt5.modeling_umt5 import UMT5Block, UMT5Stack

from ...plain import hook_on
from ...wording import counted, with_article
from ..copying import reduce_ex
from ..errors import PatchError
from ..journal import Journal, bind
from ..restoring import Handle, check_restorable
from ..weights.quantize_linears import free_originals, load_state_dict, shared_parameters, weights_note
from ..weights.weight_only import GROUP, WeightOnlyLinear, convert_in_groups
from .forward import GRAPHS, KEPT, block_forward, encoder_forward, stack_forward
from .graph import EncoderGraphs
from .lean import why_not_lean
from .prompt_cache import PromptCache

_JOURNAL = "_turbo_rcm_patch_text_journal"  # the attribute of a patched encoder that holds its Journal
OFFLOADED = "its weights are offloaded or hooked; call plan.undo(), or remove that, first."


class TextEncoderPatch(Handle):
    """A patch of a text encoder, and how to undo it. It is a context manager that restores on exit.

    Attributes:
        encoder: the patched encoder.
    """

    def __init__(self, encoder: UMT5EncoderModel):
        self.encoder = encoder

    @property
    def active(self) -> bool:
        """True until `restore`."""
        return _JOURNAL in vars(self.encoder)

    @property
    def kept_prompts(self) -> int:
        """The number of calls whose embeddings are kept."""
        return len(vars(self.encoder)[KEPT]) if self.active else 0

    def forget_prompts(self) -> None:
        """Forget the kept embeddings. Call it after you change the encoder other than by its weights.

        Changes of weights made through ``.data`` are not detected: call it after these too.
        """
        if self.active:
            vars(self.encoder)[KEPT].clear()

    def restore(self) -> None:
        """Undo the patch. Raises PatchError if it was undone already or cannot be; nothing changes then."""
        if not self.active:
            raise PatchError("nothing to restore: the text encoder was restored already.")
        journal = vars(self.encoder)[_JOURNAL]
        models = {"the text encoder": self.encoder}
        check_restorable(models, [journal], lambda encoder: OFFLOADED if _is_offloaded(encoder) else None)
        graphs: EncoderGraphs | None = vars(self.encoder)[GRAPHS]
        journal.undo()
        if graphs is not None:
            graphs.release()

    def __str__(self) -> str:
        """Return what is patched, as a line for each part."""
        if not self.active:
            return "text encoder: restored"
        kept: PromptCache = vars(self.encoder)[KEPT]
        lines = ["text encoder: encodes the prompts' real tokens", weights_note(self.encoder)]
        if (reason := _why_not_lean(self.encoder)) is not None:
            lines.append(f"its layers run as transformers runs them: {reason}")
        if kept.count:
            lines.append(f"embeddings of {counted(len(kept), 'call')} kept, at most {kept.count}; {kept.hits} reused")
        if (graphs := vars(self.encoder)[GRAPHS]) is not None:
            lines.append(str(graphs))
        return "\n".join(filter(None, lines))


def patch_text_encoder(
    target: object,
    *,
    in_8_bits: bool = False,
    restorable: bool = True,
    keep_prompts: int = 0,
    cuda_graph: bool = False,
) -> TextEncoderPatch:
    """Let a pipeline's UMT5 text encoder encode the prompts' real tokens alone, with fewer launches.

    The embeddings are transformers' up to rounding. Results at padding, which the pipelines drop, are 0.

    Args:
        target: a diffusers pipeline, or its UMT5EncoderModel.
        in_8_bits: True to store the weights of its linears in int8. They multiply in the model's dtype. The error of
            the embeddings is at most twice that of bf16.
        restorable: True to keep the original weights on the CPU, False to free them.
        keep_prompts: how many calls' embeddings are kept, so that the same prompts again take no time. Each takes up to
            4 MB a prompt. A generation with guidance makes two calls.
        cuda_graph: True to replay the encoder as CUDA graphs, while all of it is on the GPU. A graph is of one length
            in 64 tokens, recorded when that comes for the second time. Graphs keep the memory that they compute with.

    Raises:
        PatchError: the encoder is of another class, patched already or compiled; or its weights are to be stored in 8
            bits and are offloaded, or of another kind.
        ValueError: keep_prompts is negative.
    """
    encoder = _encoder_of(target)
    if type(keep_prompts) is not int or keep_prompts < 0:
        raise ValueError(f"keep_prompts={keep_prompts!r}; give the number of calls to keep, 0 or more.")
    linears = _convertible(encoder) if in_8_bits else []
    journal = Journal()
    try:
        journal.set(encoder, _JOURNAL, journal)
        journal.set(encoder, KEPT, PromptCache(keep_prompts))
        forwards = _forwards(encoder)
        journal.set(encoder, GRAPHS, EncoderGraphs(encoder, dict(forwards)) if cuda_graph else None)
        for module, forward in forwards:
            journal.set(module, "forward", bind(forward, module))
            journal.set(module, "__reduce_ex__", bind(reduce_ex, module))
        if linears:
            store_in_8_bits(journal, linears)
            journal.set(encoder, "load_state_dict", bind(load_state_dict, encoder))
    except BaseException:
        journal.undo()
        raise
    if not restorable:  # only now, when nothing can fail any more
        free_originals(encoder)
    return TextEncoderPatch(encoder)


def store_in_8_bits(journal: Journal, linears: list[nn.Linear]) -> None:
    """Store the weights of linears in 8 bits, one after the other; the originals go to the CPU."""
    for linear in linears:
        weight = convert_in_groups(linear.weight, linear.weight.device)
        journal.on_undo(WeightOnlyLinear.end, linear)
        WeightOnlyLinear.begin(linear, weight)


def linears_to_store(encoder: nn.Module) -> list[nn.Linear]:
    """Return the linears of an encoder whose weights can be stored in 8 bits: plain ones with weights of their own."""
    linears = [m for m in encoder.modules() if type(m) is nn.Linear and type(m.weight) is nn.Parameter]
    linears = [m for m in linears if m.weight.is_floating_point() and m.weight.numel() and m.in_features % GROUP == 0]
    shared = shared_parameters(encoder)
    return [linear for linear in linears if id(linear.weight) not in shared]


def runs_lean(encoder: nn.Module) -> bool:
    """True if an encoder is patched and its layers run as here: their attention keeps no scores."""
    return KEPT in vars(encoder) and _why_not_lean(encoder) is None


def has_graphs(encoder: nn.Module) -> bool:
    """True if an encoder is patched to run as CUDA graphs."""
    return vars(encoder).get(GRAPHS) is not None


def _why_not_lean(encoder: UMT5EncoderModel) -> str | None:
    """Return the reason why a patched encoder's layers run as transformers runs them, or None."""
    stack = encoder.encoder
    return why_not_lean(stack) if "forward" in vars(stack) else "layers of another class"


def _convertible(encoder: UMT5EncoderModel) -> list[nn.Linear]:
    if _is_offloaded(encoder):
        raise PatchError(f"cannot store the text encoder in 8 bits: {OFFLOADED} Patch it before trp.fit.")
    linears = linears_to_store(encoder)
    if not linears:
        raise PatchError("cannot store the text encoder in 8 bits: it has no plain linears; load it in bf16.")
    return linears


def _encoder_of(target: object) -> UMT5EncoderModel:
    """Return a pipeline's text encoder. Raises PatchError if it cannot be patched."""
    encoder = target if isinstance(target, nn.Module) else getattr(target, "text_encoder", None)
    if type(encoder) is not UMT5EncoderModel:
        found = "no text encoder" if encoder is None else with_article(type(encoder).__name__)
        compiled = "; patch before torch.compile" if hasattr(encoder, "_orig_mod") else ""
        raise PatchError(f"cannot patch: found {found}; give a pipeline with a UMT5EncoderModel{compiled}.")
    if _JOURNAL in vars(encoder):
        raise PatchError("cannot patch: the text encoder is patched already; call restore() on its handle first.")
    return encoder


def _forwards(encoder: UMT5EncoderModel) -> list[tuple[nn.Module, Callable]]:
    """Return the modules whose forward is replaced, each with the new one."""
    stack = encoder.encoder
    found = [(encoder, encoder_forward)]
    if type(stack) is UMT5Stack and all(type(block) is UMT5Block for block in stack.block):
        found += [(stack, stack_forward), *((block, block_forward) for block in stack.block)]
    return found


def _is_offloaded(encoder: nn.Module) -> bool:
    """True if hooks on any of an encoder's modules may hold its weights."""
    ours = {module for module, _ in _forwards(encoder)}
    return any(hook_on(module, vars(module).get("forward") if module in ours else None) for module in encoder.modules())
