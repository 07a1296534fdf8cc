"""Our attention under diffusers' context parallelism, where each of W ranks holds S/W tokens of all H heads.

Ulysses: all-to-alls give every rank all S tokens of H/W heads, over which attention is attention as always, and take
its output back (Jacobs et al. 2023, DeepSpeed Ulysses).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ParallelConfig

if dist.is_available():
    # Collectives that run behind the host and the kernels of the model, and that torch.compile can trace.
    import torch.distributed._functional_collectives as funcol

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def why_not_between_all_to_alls(parallel_config: ParallelConfig, heads: int, *, differentiated: bool) -> str | None:
    """Why attention is left to diffusers under this parallel_config, in a few words; None where ours can run between
    the all-to-alls. differentiated: whether derivatives of it are asked for.
    """
    config = parallel_config.context_parallel_config
    if config.ring_degree > 1:
        return "ring context parallelism"  # joins attention over parts of the keys
    if config.ulysses_anything:
        return "ulysses_anything"  # shares of any size, which the ranks would first have to tell each other
    if heads % config.ulysses_degree:
        return f"{heads} heads on {config.ulysses_degree} ranks"
    return "autograd under context parallelism" if differentiated else None


def ulysses_attention(
    parallel_config: ParallelConfig, attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attention over the tokens of all ranks for this rank's q, k and v [B, S/W, H, D]; [B, S/W, H, D] in q's dtype.

    attend: (q, k, v), each [B, S, H/W, D] and packed if B = 1, to [B, S, H/W, D]. Every rank has to call this, and only
    where why_not_between_all_to_alls knows of nothing against it. No gradients.
    """
    batch, tokens, heads, head_dim = q.shape
    config = parallel_config.context_parallel_config
    ranks, group = config.ulysses_degree, config._ulysses_mesh.get_group()
    # Packed by receiving rank, [W, S/W, B, H/W, D]. Each is under way while the next is packed.
    q, k, v = [_send(x.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4), group) for x in (q, k, v)]
    # The ranks that sent are in the order of their tokens, so this is [S, B, H/W, D], without another copy.
    q, k, v = (_received(x).view(-1, batch, heads // ranks, head_dim).transpose(0, 1) for x in (q, k, v))
    out = _received(_send(attend(q, k, v).transpose(0, 1), group))
    return out.view(ranks, tokens, batch, -1, head_dim).permute(2, 1, 0, 3, 4).flatten(2, 3)


def _send(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Start to send the r-th of W equal parts of x to rank r; the parts received, flat, for `_received` to wait for."""
    return funcol.all_to_all_single(x.flatten(), None, None, group)


def _received(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, funcol.AsyncCollectiveTensor) else x  # where torch.compile traces it has waited
