"""Our attention under diffusers' context parallelism: each of W ranks (GPUs) holds S/W tokens of all H heads.

Ulysses: an all-to-all of q, k and v gives every rank all S tokens of H/W heads. Each rank runs ordinary attention on
them, in 8 bits or sparse too. Another all-to-all takes the output back (Jacobs et al. 2023, DeepSpeed Ulysses).
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import ContextParallelGatherHook, ContextParallelSplitHook
from diffusers.models._modeling_parallel import ParallelConfig
from torch import nn

from ...kernels import Quantized
from ...kernels.launch import recording
from ..cuda_graphs import Graphs

if dist.is_available():
    # torch.compile can trace these collectives.
    import torch.distributed._functional_collectives as funcol

Activation = torch.Tensor | Quantized
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
OwnTokens = Callable[[torch.Tensor, int], Activation]  # (all that a rank received, the number of ranks)


def why_not_between_all_to_alls(parallel_config: ParallelConfig, heads: int, *, differentiated: bool) -> str | None:
    """Return the reason why diffusers runs attention under this parallel_config, or None if ours can.

    differentiated: True if attention needs derivatives.
    """
    config = parallel_config.context_parallel_config
    if config.ring_degree > 1:
        return "ring context parallelism"  # joins attention over parts of the keys
    if config.ulysses_anything:
        return "ulysses_anything"  # shares of any size; the ranks would have to exchange the sizes first
    if heads % config.ulysses_degree:
        return f"{heads} heads on {config.ulysses_degree} ranks"
    return "autograd under context parallelism" if differentiated else None


_using_groups: weakref.WeakSet[Graphs] = weakref.WeakSet()


def prepare_graphs(graphs: Graphs) -> None:
    """Prepare NCCL and torch.distributed for CUDA graphs with collectives.

    Until `forget_graphs`, torch.distributed.destroy_process_group first clears these graphs, and the end of the process
    forgets them, because NCCL would wait for them forever. A reference to that function that was taken before does not
    clear them. And NCCL_GRAPH_REGISTER is 0 unless it is set: else NCCL registers buffers while it records. The ranks
    wait for each other then, also for one that failed, and memory in expandable segments breaks it
    (pytorch/pytorch#158029).
    """
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    _using_groups.add(graphs)
    destroy = dist.destroy_process_group
    if not _is_ours(destroy):
        dist.destroy_process_group = functools.wraps(destroy)(functools.partial(_clear_then, destroy))


def forget_graphs(graphs: Graphs) -> None:
    """Undo `prepare_graphs`, except for NCCL_GRAPH_REGISTER, which NCCL reads once. Do nothing for other graphs.

    torch.distributed gets its own function back with the last graphs. If someone wrapped ours since, it stays, and only
    calls the original.
    """
    if graphs not in _using_groups:
        return
    _using_groups.remove(graphs)
    if not _using_groups and _is_ours(dist.destroy_process_group):
        dist.destroy_process_group = dist.destroy_process_group.__wrapped__


def _is_ours(destroy: Callable[..., None]) -> bool:
    return isinstance(destroy, functools.partial) and destroy.func is _clear_then


def _clear_then(destroy: Callable[..., None], *args: object, **kwargs: object) -> None:
    for graphs in list(_using_groups):
        graphs.clear()
    destroy(*args, **kwargs)


@atexit.register
def _forget_at_exit() -> None:
    """Forget graphs before NCCL ends with the process, for example after an error: else the process would never end."""
    for graphs in list(_using_groups):
        graphs.forget()


def check_heads(parallel_config: ParallelConfig, heads: int, *, takes_any_share: bool = True) -> None:
    """Raise ValueError if these heads cannot be shared among the ranks. diffusers' own error does not say why.

    takes_any_share: True if the attention runs under ulysses_anything, which the error then names.
    """
    config = parallel_config.context_parallel_config
    if not config.ulysses_anything and heads % config.ulysses_degree:
        others = ", or ulysses_anything=True" if takes_any_share else ""
        raise ValueError(
            f"{heads} heads cannot be shared equally among {config.ulysses_degree} GPUs; give ulysses_degree a divisor "
            f"of {heads}{others}."
        )


def ranks_of(parallel_config: ParallelConfig | None) -> int:
    """Return the number of GPUs that share the tokens of a sample."""
    config = None if parallel_config is None else parallel_config.context_parallel_config
    return 1 if config is None else config.ulysses_degree * config.ring_degree


def least_of_all(parallel_config: ParallelConfig, device: torch.device, value: int) -> int:
    """Return the least value of the ranks that share the tokens of a sample. All must call this.

    The ranks ask each other on the CPU if their process group has a backend for it, as by default. Otherwise they do so
    on this device, and wait for it.
    """
    group = parallel_config.context_parallel_config._flattened_mesh.get_group()
    cpu = torch.device("cpu")
    values = torch.tensor([value], device=cpu if cpu in group._device_types else device)
    dist.all_reduce(values, dist.ReduceOp.MIN, group=group)
    return int(values)


def only_shares_tokens(module: nn.Module) -> bool:
    """True if a module has hooks, and all are those of context parallelism, which split or gather tokens."""
    registry = vars(module).get("_diffusers_hook")
    hooks = () if registry is None else registry.hooks.values()
    return bool(hooks) and all(type(hook) in (ContextParallelSplitHook, ContextParallelGatherHook) for hook in hooks)


def ulysses_attention(
    parallel_config: ParallelConfig,
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gather: OwnTokens | None = None,
) -> Activation:
    """Attend over the tokens of all ranks. q, k, v, and the result: this rank's [B, S/W, H, D].

    attend: (q, k, v), each [B, S, H/W, D] with any strides, -> [B, S, H/W, D]. gather: makes the result of what arrives
    in the end, in place of `own_tokens`. Every rank must call this, and only if why_not_between_all_to_alls returns
    None. There are no gradients.
    """
    config = parallel_config.context_parallel_config
    ranks, group = config.ulysses_degree, config._ulysses_mesh.get_group()
    if q.shape == k.shape:
        q, k, v = _tokens_of_all((q, k, v), ranks, group)
    else:
        (q,), (k, v) = _tokens_of_all((q,), ranks, group), _tokens_of_all((k, v), ranks, group)
    return (gather or own_tokens)(exchanged(attend(q, k, v).transpose(0, 1).contiguous(), group), ranks)


def _tokens_of_all(parts: Sequence[torch.Tensor], ranks: int, group: dist.ProcessGroup) -> Sequence[torch.Tensor]:
    """Return for each [B, S/W, H, D] of the parts the tokens of all ranks and this rank's heads, [B, S, H/W, D]."""
    received = exchanged(packed(parts, ranks), group)
    return [part.transpose(0, 1) for part in received.flatten(0, 1).unbind(1)]


def packed(parts: Sequence[torch.Tensor], ranks: int) -> torch.Tensor:
    """Return one message of parts [B, S/W, H, D] for all ranks, [W, S/W, parts, B, H/W, D].

    The parts lie side by side for each token. So the parts of what arrives are views, in the order of their tokens.
    """
    batch, tokens, heads, head_dim = parts[0].shape
    message = parts[0].new_empty(ranks, tokens, len(parts), batch, heads // ranks, head_dim)
    for place, part in zip(_words(message).unbind(2), parts, strict=True):
        place.copy_(_words(part).unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4))
    return message


def own_tokens(received: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return a rank's tokens of all heads, [B, S/W, H, D], from those of each rank's heads, [W·S/W, B, H/W, D]."""
    heads = _words(received).unflatten(0, (ranks, -1)).permute(2, 1, 0, 3, 4).flatten(2, 3)
    return heads.view(received.dtype)


def own_tokens_in_8_bits(quantize: Callable, format: torch.dtype, received: torch.Tensor, ranks: int) -> Quantized:
    """Return a rank's tokens as a Quantized [B, S/W, C]. Those of a single sample are not copied first.

    quantize: the launch of a kernel of QUANTIZE_ROWS. received: as `own_tokens` takes it.
    """
    batch = received.shape[1]
    if batch == 1:
        parts = received.unflatten(0, (ranks, -1)).flatten(2).transpose(0, 1)
    else:
        parts = own_tokens(received, ranks).flatten(0, 1)
    values, scale, _ = quantize(parts, format, False, True)
    return Quantized(values.unflatten(0, (batch, -1)), scale.unflatten(0, (batch, -1)))


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] as numbers of 8 bytes if D allows it: [..., D/4] in bf16. All strides must be multiples of D.

    PyTorch copies a permuted tensor number by number, so wide numbers take a fraction of the time.
    """
    return x if x.shape[-1] * x.element_size() % 8 else x.view(torch.int64)


def exchanged(message: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send the r-th of W equal parts of a message to rank r. Return the received parts in the ranks' order.

    While launches are recorded instead of run, nothing is sent: the other ranks may not be in such a call.
    """
    if recording():
        return torch.empty_like(message)
    if torch.compiler.is_compiling():
        received = funcol.all_to_all_single(message, None, None, group)
        return received.wait() if isinstance(received, funcol.AsyncCollectiveTensor) else received
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message, group=group)  # takes the host a tenth of the time of funcol's
    return received
