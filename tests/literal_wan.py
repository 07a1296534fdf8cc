"""TurboDiffusion's Wan written out literally from its published equations, on weights in the authors' names: the model,
sparse-linear attention and the rCM sampler, in fp64 or fp32. It shares no code with the package or with diffusers."""

import itertools
import math

import torch


def wan(weights, x, timestep, context, *, heads, sla=None):
    """The velocity for latents x [C, F, H, W], a timestep and a prompt [L, text_dim]. sla: (topk, block_q, block_k), or
    None for attention to all keys."""
    w = weights
    channels, frames, height, width = x.shape
    grid = (frames, height // 2, width // 2)
    patches = x.reshape(channels, frames, grid[1], 2, grid[2], 2).permute(1, 2, 4, 0, 3, 5).reshape(math.prod(grid), -1)
    tokens = patches @ w["patch_embedding.weight"].flatten(1).T + w["patch_embedding.bias"]
    dim = tokens.shape[1]

    frequencies = w["time_embedding.0.weight"].shape[1] // 2
    angles = timestep * torch.exp(-math.log(10000) * torch.arange(frequencies, dtype=x.dtype) / frequencies)
    e = linear(w, "time_embedding.0", torch.cat([angles.cos(), angles.sin()]))
    e = linear(w, "time_embedding.2", silu(e))
    e0 = linear(w, "time_projection.1", silu(e)).reshape(6, dim)
    context = linear(w, "text_embedding.2", gelu(linear(w, "text_embedding.0", context)))
    rotation = rope(grid, dim // heads, x.dtype)

    for number in range(1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))):
        block = f"blocks.{number}"
        m = w[f"{block}.modulation"][0] + e0
        h = layer_norm(tokens) * (1 + m[1]) + m[0]
        tokens = tokens + self_attention(w, f"{block}.self_attn", h, heads, rotation, sla) * m[2]
        h = layer_norm(tokens) * w[f"{block}.norm3.weight"] + w[f"{block}.norm3.bias"]
        tokens = tokens + cross_attention(w, f"{block}.cross_attn", h, context, heads)
        h = layer_norm(tokens) * (1 + m[4]) + m[3]
        tokens = tokens + linear(w, f"{block}.ffn.2", gelu(linear(w, f"{block}.ffn.0", h))) * m[5]

    m = w["head.modulation"][0] + e
    out = linear(w, "head.head", layer_norm(tokens) * (1 + m[1]) + m[0])
    return out.reshape(*grid, 1, 2, 2, -1).permute(6, 0, 3, 1, 4, 2, 5).reshape(-1, frames, height, width)


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def silu(x):
    return x / (1 + torch.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_norm(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-6)


def rms_norm(w, name, x):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]


def rope(grid, head_dim, dtype):
    """Complex factors [tokens, head_dim / 2]: of the frame, the row and the column."""
    third = head_dim // 6
    parts = []
    for axis, pairs in enumerate((head_dim // 2 - 2 * third, third, third)):
        rates = 1 / 10000 ** (torch.arange(pairs, dtype=torch.float64) / pairs)
        shape = [1, 1, 1, pairs]
        shape[axis] = grid[axis]
        angles = (torch.arange(grid[axis], dtype=torch.float64)[:, None] * rates).reshape(shape)
        parts.append(torch.polar(torch.ones_like(angles), angles).expand(*grid, pairs))
    factors = torch.cat(parts, -1).flatten(0, 2)
    return factors if dtype == torch.float64 else factors.to(torch.complex64)


def self_attention(w, name, x, heads, rotation, sla):
    q, k = (rms_norm(w, f"{name}.norm_{part}", linear(w, f"{name}.{part}", x)) for part in "qk")
    v = linear(w, f"{name}.v", x)
    outputs = []
    for q_head, k_head, v_head in zip(*(part.chunk(heads, -1) for part in (q, k, v)), strict=True):
        q_head, k_head = (rotate(part, rotation) for part in (q_head, k_head))
        if sla is None:
            outputs.append(softmax(q_head @ k_head.T / math.sqrt(q_head.shape[1])) @ v_head)
        else:
            local = f"{name}.attn_op.local_attn.proj_l"
            outputs.append(sparse_linear_attention(q_head, k_head, v_head, w, local, *sla))
    return linear(w, f"{name}.o", torch.cat(outputs, -1))


def rotate(x, rotation):
    pairs = torch.view_as_complex(x.reshape(len(x), -1, 2).contiguous())
    return torch.view_as_real(pairs * rotation).flatten(1)


def softmax(x):
    e = torch.exp(x - x.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def cross_attention(w, name, x, context, heads):
    q = rms_norm(w, f"{name}.norm_q", linear(w, f"{name}.q", x))
    k = rms_norm(w, f"{name}.norm_k", linear(w, f"{name}.k", context))
    v = linear(w, f"{name}.v", context)
    heads_of = (part.chunk(heads, -1) for part in (q, k, v))
    outputs = [softmax(q @ k.T / math.sqrt(q.shape[1])) @ v for q, k, v in zip(*heads_of, strict=True)]
    return linear(w, f"{name}.o", torch.cat(outputs, -1))


def sparse_linear_attention(q, k, v, w, proj_l, topk, block_q, block_k):
    """SLA of one head, q, k, v [L, D]."""
    smooth = k - k.mean(0)
    pooled_k = torch.stack([block.mean(0) for block in smooth.split(block_k)])
    kept = min(len(pooled_k), int(topk * len(pooled_k)))
    rows = []
    for queries in q.split(block_q):
        scores = queries.mean(0) @ pooled_k.T
        chosen = scores.argsort(descending=True)[:kept].tolist()
        indices = torch.cat([torch.arange(len(k)).split(block_k)[block] for block in chosen])
        rows.append(softmax(queries @ k[indices].T / math.sqrt(q.shape[1])) @ v[indices])
    phi_q, phi_k = softmax(q), softmax(k)
    linear_branch = phi_q @ (phi_k.T @ v) / (1e-5 + (phi_q * phi_k.sum(0)).sum(-1, keepdim=True))
    return torch.cat(rows) + linear(w, proj_l, linear_branch)


def rcm_sample(velocity, shape, steps, sigma_max, seed, dtype, stochastic=True):
    """The rCM sampler, with fresh noise in every step or deterministic: velocity(x, timestep) for one video."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.tensor([*[math.atan(sigma_max), 1.5, 1.4, 1.0][:steps], 0.0], dtype=torch.float64)
    times = angles.sin() / (angles.cos() + angles.sin())
    x = torch.randn(shape, generator=generator).double() * times[0]
    for t, t_next in itertools.pairwise(times):
        timestep = (1000 * t.float()).bfloat16().to(dtype)
        v = velocity(x.to(dtype), timestep).double()
        if stochastic:
            x = (1 - t_next) * (x - t * v) + t_next * torch.randn(shape, generator=generator)
        else:
            x = x - (t - t_next) * v
    return x
