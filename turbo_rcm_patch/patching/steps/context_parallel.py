"""Our attention under diffusers' context parallelism: each of W ranks holds S/W tokens of all H heads.

Ulysses: all-to-alls give every rank all S tokens of H/W heads. Each rank runs ordinary attention on them. Another
all-to-all takes the output back (Jacobs et al. 2023, DeepSpeed Ulysses).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ParallelConfig

if dist.is_available():
    # These collectives run asynchronously to the host and the model's kernels, and torch.compile can trace them.
    import torch.distributed._functional_collectives as funcol

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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


def ulysses_attention(
    parallel_config: ParallelConfig, attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Attend over the tokens of all ranks. q, k, v, and the result: this rank's [B, S/W, H, D].

    attend: (q, k, v), each [B, S, H/W, D] and packed if B = 1, -> [B, S, H/W, D]. Every rank must call this, and only
    if why_not_between_all_to_alls returns None. There are no gradients.
    """
    batch, tokens, heads, head_dim = q.shape
    config = parallel_config.context_parallel_config
    ranks, group = config.ulysses_degree, config._ulysses_mesh.get_group()
    # Pack by receiving rank: [W, S/W, B, H/W, D]. Each tensor is sent while the next is packed.
    q, k, v = [_send(x.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4), group) for x in (q, k, v)]
    # The sending ranks are in the order of their tokens. So a view gives [S, B, H/W, D], without another copy.
    q, k, v = (_received(x).view(-1, batch, heads // ranks, head_dim).transpose(0, 1) for x in (q, k, v))
    out = _received(_send(attend(q, k, v).transpose(0, 1), group))
    return out.view(ranks, tokens, batch, -1, head_dim).permute(2, 1, 0, 3, 4).flatten(2, 3)


def _send(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Start to send the r-th of W equal parts of x to rank r. Return the received parts, flat, for `_received`."""
    return funcol.all_to_all_single(x.flatten(), None, None, group)


def _received(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, funcol.AsyncCollectiveTensor) else x  # a traced one has waited already
