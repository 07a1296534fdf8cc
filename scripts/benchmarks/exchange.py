"""Time the parts of a self-attention that several GPUs share (Ulysses), with random q, k and v.

    python scripts/benchmarks/exchange.py --ulysses 4 --heads 12 --tokens 32760 --json exchange.json

The parts are what the package runs, and for comparison: three messages instead of one, messages of half the bytes, an
exchange that runs beside the attention, the whole with two halves of the heads, where one is sent while the other
attends, q and k sent while the next of q, k and v is projected, and 8 bits before the exchange instead of after it.
Every GPU times them, the first one reports.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from turbo_rcm_patch import kernels
from turbo_rcm_patch.bench.environment import describe_environment
from turbo_rcm_patch.bench.timing import in_turns
from turbo_rcm_patch.cli.files import json_file, write_json
from turbo_rcm_patch.patching.steps.context_parallel import exchanged, own_tokens, packed

ROUNDS, CALLS, WARM_UP = 5, 10, 3
# What a message in 8 bits holds of a QuantizedQKV with v in e4m3: the dimensions of the heads and of the tokens.
SENT = {"q": (2, 1), "k": (2, 1), "v": (1, 3), "q_scale": (2, 1), "k_scale": (1, 2)}


def main(argv: list[str] | None = None) -> int:
    options = parse_options(argv)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, f"file://{folder}/rendezvous")
        torch.multiprocessing.spawn(measure_in_parallel, arguments, nprocs=options.ulysses)
    return 0


def measure_in_parallel(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    """Run one of several processes, each on the GPU of its rank. The first one reports."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if has_gpu else "gloo", init_method=rendezvous, rank=rank, world_size=options.ulysses
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if rank == 0 else nowhere):
        milliseconds = measure(options, device)
        for name, value in milliseconds.items():
            print(f"{name:45} {value:8.3f} ms")
    dist.destroy_process_group()  # not after an error: NCCL would wait for the others, which wait for this
    if rank == 0 and options.json is not None:
        settings = {name: getattr(options, name) for name in ("ulysses", "heads", "tokens", "head_dim")}
        environment = asdict(describe_environment(device))
        write_json(options.json, {"settings": settings, "environment": environment, "milliseconds": milliseconds})


@torch.no_grad()
def measure(options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Return the milliseconds of every part, medians over the rounds."""
    parts = parts_of(options, device)
    milliseconds = {name: [] for name in parts}
    for _, name in in_turns(parts, ROUNDS):
        milliseconds[name].append(timed(parts[name], device))
    return {name: statistics.median(times) for name, times in milliseconds.items()}


def parts_of(options: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the parts by name, each as a call."""
    ranks, group = options.ulysses, dist.group.WORLD
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = 1, options.tokens // ranks, options.heads, options.head_dim
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    message = packed((q, k, v), ranks)
    received = exchanged(message, group).flatten(0, 1)
    whole = [part.transpose(0, 1) for part in received.unbind(1)]  # all tokens, a part of the heads
    in_8_bits = partial(kernels.quantize_qkv, *(x.flatten(2) for x in whole), heads=options.heads // ranks)
    quantized = in_8_bits()
    attend, attend_8bit = partial(kernels.attention, *whole), partial(kernels.attention_8bit, quantized)
    result = attend().transpose(0, 1).contiguous()

    def attend_in_8_bits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = q.shape[2]
        return kernels.attention_8bit(kernels.quantize_qkv(*(x.flatten(2) for x in (q, k, v)), heads=heads))

    half = message.view(torch.int8)[..., : message.shape[-1] * message.element_size() // 2].contiguous()
    return {
        "pack q, k and v": partial(packed, (q, k, v), ranks),
        "exchange q, k and v": partial(exchanged, message, group),
        "pack and exchange them one by one": lambda: [exchanged(packed((x,), ranks), group) for x in (q, k, v)],
        "exchange half of the bytes": partial(exchanged, half, group),
        "q, k and v to 8 bits": in_8_bits,
        "attention": attend,
        "attention in 8 bits": attend_8bit,
        "exchange the result": partial(exchanged, result, group),
        "unpack the result": partial(own_tokens, result, ranks),
        "attention beside an exchange of q, k and v": _beside(attend, partial(exchanged, message, group), device),
        "attention in 8 bits beside it": _beside(attend_8bit, partial(exchanged, message, group), device),
        "the whole": partial(_whole, kernels.attention, (q, k, v), ranks, group),
        "the whole, by halves of the heads": _by_halves(kernels.attention, (q, k, v), ranks, group, device),
        "the whole in 8 bits": partial(_whole, attend_in_8_bits, (q, k, v), ranks, group),
        "the whole in 8 bits, by halves of the heads": _by_halves(attend_in_8_bits, (q, k, v), ranks, group, device),
        **_ways_to_project(q, ranks, group, device),
        **_ways_to_8_bits((q, k, v), ranks, group),
    }


def _ways_to_project(
    q: torch.Tensor, ranks: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Return the parts of projecting q, k and v from one input and exchanging them, without their norms and RoPE."""
    heads, x = q.shape[2], q.flatten(2)
    weights = torch.randn((3, x.shape[-1], x.shape[-1]), device=device, dtype=x.dtype)
    side = Side(device)

    def project(weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight).unflatten(2, (-1, heads, q.shape[3]))

    def project_all() -> Sequence[torch.Tensor]:
        return project(weights.flatten(0, 1)).unbind(2)

    def after() -> torch.Tensor:
        return exchanged(packed(project_all(), ranks), group)

    def beside() -> list[torch.Tensor]:
        projected, received = [], []  # the projected ones are kept until they are sent
        for weight in weights:
            projected.append(project(weight).squeeze(2))
            with side:
                received.append(exchanged(packed(projected[-1:], ranks), group))
        side.join()
        return received

    return {
        "project q, k and v": project_all,
        "project, then exchange": after,
        "project one by one, each sent beside the next": beside,
    }


def _ways_to_8_bits(
    parts: tuple[torch.Tensor, ...], ranks: int, group: dist.ProcessGroup
) -> dict[str, Callable[[], object]]:
    """Return the parts of both ways from a GPU's tokens, before norm and RoPE, to all tokens of its heads in 8 bits.

    The package puts q, k and v in 8 bits after the exchange. The other way has the right time, but not the right
    values: the mean of k and the scale of v are those of each GPU's own tokens. If 128 does not divide these tokens,
    k's groups and v have gaps, which the attention's kernels do not read.
    """
    tokens, heads, head_dim = parts[0].shape[1:]
    q, k, v = (part.flatten(2) for part in parts)
    weight = torch.ones_like(q[0, 0])
    cos, sin = (torch.rand((tokens, head_dim // 2), device=q.device) for _ in range(2))
    rotated = {"heads": heads, "eps": 1e-6, "cos": cos, "sin": sin}
    in_8_bits = partial(kernels.quantize_qkv, v_format=kernels.FP8)

    def norms() -> tuple[torch.Tensor, ...]:
        return tuple(kernels.rms_norm_rope(x, weight, **rotated) for x in (q, k))

    def after() -> kernels.QuantizedQKV:
        received = exchanged(packed((*norms(), parts[2]), ranks), group).flatten(0, 1)
        whole = (part.transpose(0, 1).flatten(2) for part in received.unbind(1))
        return in_8_bits(*whole, heads=heads // ranks)

    mean, largest = (q.new_zeros((1, heads, head_dim), dtype=torch.float32) for _ in range(2))

    def all_reduces() -> None:
        dist.all_reduce(mean, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)

    own_in_8_bits = partial(in_8_bits, q, k, v, norm_q=weight, norm_k=weight, **rotated)

    def before() -> kernels.QuantizedQKV:
        all_reduces()
        own = own_in_8_bits()
        return joined_8bit(exchanged(packed_8bit(own, ranks), group), own, largest, group)

    own = own_in_8_bits()
    message = packed_8bit(own, ranks)
    return {
        "norm and RoPE of q and k": norms,
        "norm, RoPE and 8 bits of a GPU's tokens": own_in_8_bits,
        "two small all-reduces": all_reduces,
        "pack 8 bits": partial(packed_8bit, own, ranks),
        "exchange 8 bits": partial(exchanged, message, group),
        "join 8 bits": partial(joined_8bit, message, own, largest, group),
        "norm to 8 bits after the exchange": after,
        "norm to 8 bits before the exchange": before,
    }


def packed_8bit(own: kernels.QuantizedQKV, ranks: int) -> torch.Tensor:
    """Return one message of a GPU's tokens in 8 bits with their scales for all GPUs, bytes [W, N]."""
    parts = _of_ranks(own, ranks)
    message = parts[0].new_empty((ranks, -(-sum(part[0].nbytes for part in parts) // 8)), dtype=torch.int64)
    for place, part in zip(_places(message, parts), parts, strict=True):
        place.copy_(part)
    return message.view(torch.int8)


def joined_8bit(
    received: torch.Tensor, own: kernels.QuantizedQKV, v_scale: torch.Tensor, group: dist.ProcessGroup
) -> kernels.QuantizedQKV:
    """Return all tokens of this GPU's heads in 8 bits, packed as the attention's kernels read them.

    received: the messages of all GPUs. own: what one of them was packed from. v_scale: of all heads and tokens.
    """
    ranks = len(received)
    places = _places(received, _of_ranks(own, ranks))
    whole = {
        name: place.movedim(0, tokens).flatten(tokens, tokens + 1).contiguous().view(getattr(own, name).dtype)
        for place, (name, (_, tokens)) in zip(places, SENT.items(), strict=True)
    }
    return own._replace(**whole, v_scale=v_scale.chunk(ranks, 1)[dist.get_rank(group)])


def _of_ranks(own: kernels.QuantizedQKV, ranks: int) -> list[torch.Tensor]:
    """Return what is sent of a GPU's tokens, [W, ...] each. Numbers of 8 bits are copied as ones of 8 bytes."""
    parts = []
    for name, (heads, _) in SENT.items():
        part = getattr(own, name)
        part = part.view(torch.int64) if part.element_size() == 1 else part
        parts.append(part.unflatten(heads, (ranks, -1)).movedim(heads, 0))
    return parts


def _places(message: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the places of parts [W, ...] in a message [W, N]."""
    sizes = [part[0].nbytes for part in parts]
    places = message.view(torch.int8)[:, : sum(sizes)].split(sizes, 1)
    return [place.view(part.dtype).unflatten(1, part.shape[1:]) for place, part in zip(places, parts, strict=True)]


def _whole(attend: Callable, parts: tuple[torch.Tensor, ...], ranks: int, group: dist.ProcessGroup) -> torch.Tensor:
    return _sent_back(_attended(attend, exchanged(packed(parts, ranks), group)), ranks, group)


def _attended(attend: Callable, received: torch.Tensor) -> torch.Tensor:
    """Return the attention's result [S, B, H/W, D] for a message of q, k and v that was received."""
    parts = (part.transpose(0, 1) for part in received.flatten(0, 1).unbind(1))
    return attend(*parts).transpose(0, 1).contiguous()


def _sent_back(result: torch.Tensor, ranks: int, group: dist.ProcessGroup) -> torch.Tensor:
    return own_tokens(exchanged(result, group), ranks)


def _by_halves(
    attend: Callable, parts: tuple[torch.Tensor, ...], ranks: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    """Return a call that sends the second half while the first attends, and the first half's result while the second
    attends."""
    side = Side(device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        of_ranks = (part.unflatten(2, (ranks, -1)).tensor_split(2, 3) for part in parts)
        first, second = (packed([part.flatten(2, 3) for part in half], ranks) for half in zip(*of_ranks, strict=True))
        received = exchanged(first, group)
        with side:
            other = exchanged(second, group)
        result = _attended(attend, received)
        side.join()
        with side:
            sent = _sent_back(result, ranks, group)
        last = _attended(attend, other)
        side.join()
        return sent, _sent_back(last, ranks, group)

    return run


class Side:
    """A second stream of a GPU: what is launched within it runs beside what is launched after it, until `join`."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._within = contextlib.nullcontext()

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            self._within = torch.cuda.stream(self._stream)
        self._within.__enter__()

    def __exit__(self, *error: object) -> None:
        self._within.__exit__(*error)

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def _beside(run: Callable, other: Callable, device: torch.device) -> Callable[[], None]:
    """Return a call of both, beside each other."""
    side = Side(device)

    def both() -> None:
        with side:
            other()
        run()
        side.join()

    return both


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the mean milliseconds of a call when calls follow each other. All processes start together."""
    for _ in range(WARM_UP):
        call()
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    dist.barrier()
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    wait()
    return (time.perf_counter() - start) / CALLS * 1e3


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ulysses", type=int, default=2, help="GPUs that share the tokens (default 2)")
    parser.add_argument("--heads", type=int, default=12, help="default: those of Wan 1.3B; 14B has 40")
    parser.add_argument("--tokens", type=int, default=32760, help="default: 81 frames at 832×480; 1280×720 has 75600")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--json", type=json_file, help="write the figures with the GPU and versions")
    options = parser.parse_args(argv)
    if options.ulysses < 1:
        parser.error(f"--ulysses {options.ulysses}: give 1 or more.")
    if options.heads < 2 * options.ulysses:
        parser.error(f"--heads {options.heads}: every GPU needs two, for halves.")
    for name in ("heads", "tokens"):
        if getattr(options, name) % options.ulysses:
            parser.error(f"--{name} {getattr(options, name)} cannot be divided by --ulysses {options.ulysses}.")
    if torch.cuda.is_available() and options.ulysses > torch.cuda.device_count():
        parser.error(f"--ulysses {options.ulysses}: PyTorch finds {torch.cuda.device_count()} CUDA GPUs.")
    return options


if __name__ == "__main__":
    sys.exit(main())
