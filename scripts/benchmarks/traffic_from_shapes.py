"""Count DRAM traffic from shapes, for machines where no counters can be read.

Every kernel is taken to read each of its inputs and write each of its outputs once, and nothing to stay in a cache
between kernels. The kernels come from a trace of the implementation, in which nothing is computed.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .dram import KernelTraffic


def count_call(module: nn.Module, args: tuple, kwargs: Mapping[str, object], compiled: bool) -> list[KernelTraffic]:
    """Return the kernels of one forward: one per op, or, compiled, one per chain of ops that torch.compile would merge.

    On the CPU the Triton ops can be traced with TRITON_INTERPRET=1 alone.
    """
    with torch.no_grad():
        graph = torch.export.export(module, args, dict(kwargs), strict=True).graph
    ops = list(_ops(graph))
    if compiled:
        results = {_storage(tensor) for node in graph.output_node().all_input_nodes for tensor in _tensors(node)}
        ops = _merged(ops, results)
    return [KernelTraffic(op.name, sum(op.reads.values()), sum(op.writes.values())) for op in ops]


@dataclass(frozen=True)
class _Op:
    """A launch with its bytes by storage. mergeable: True if torch.compile merges it with other launches."""

    name: str
    reads: Mapping[StorageWeakRef, int]
    writes: Mapping[StorageWeakRef, int]
    mergeable: bool


SECTOR = 32  # bytes that DRAM moves at once
UNMERGED = ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention")


def _ops(graph: torch.fx.Graph) -> Iterator[_Op]:
    """Yield the nodes that move data: they fill a new storage, or write into an argument's."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        name = node.target._schema.name.split("::")[1]
        inputs = [tensor for source in node.all_input_nodes for tensor in _tensors(source)]
        if node.target._schema.is_mutable:  # as x.copy_(y) is
            target, *inputs = inputs
            outputs = [target]
        else:
            known = {_storage(tensor) for tensor in inputs}
            outputs = [tensor for tensor in _tensors(node) if _storage(tensor) not in known]
        if outputs and not name.startswith(("empty", "new_empty")):
            mergeable = node.target.namespace == "aten" and name not in UNMERGED
            yield _Op(name, _bytes_by_storage(inputs), _bytes_by_storage(outputs), mergeable)


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [one for one in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(one, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _bytes_by_storage(tensors: Sequence[torch.Tensor]) -> dict[StorageWeakRef, int]:
    touched: dict[StorageWeakRef, int] = defaultdict(int)
    for tensor in tensors:
        touched[_storage(tensor)] += _touched_bytes(tensor)
    return {storage: total for storage, total in touched.items() if total}


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's elements, each once, and of the gaps between them in the same sectors."""
    strides = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    if not tensor.numel():
        return 0
    elements = math.prod(size for size, stride in strides if stride)
    step = min((stride for _, stride in strides if stride), default=1)
    return elements * min(step * tensor.itemsize, max(SECTOR, tensor.itemsize))


def _merged(ops: Sequence[_Op], results: set[StorageWeakRef]) -> list[_Op]:
    """Merge ops as torch.compile does: ops between two matmuls or attentions that feed one another become one kernel.

    Each op has a level: the number of unmerged ops that must run before it. The level is raised as far as the op's
    consumers allow, because torch.compile also delays ops that it can compute anew. Mergeable ops of one level that
    feed one another form a group.
    """
    consumers = _consumers(ops)
    level = [0] * len(ops)
    for index, op in enumerate(ops):
        for consumer in consumers[index]:
            level[consumer] = max(level[consumer], level[index] + (not op.mergeable))
    group = list(range(len(ops)))
    for index in reversed(range(len(ops))):
        if ops[index].mergeable and consumers[index]:
            level[index] = min(level[consumer] for consumer in consumers[index])
            for consumer in consumers[index]:
                if ops[consumer].mergeable and level[consumer] == level[index]:
                    old, new = group[consumer], group[index]
                    group = [new if one == old else one for one in group]
    members: dict[int, list[_Op]] = defaultdict(list)
    for index, op in enumerate(ops):
        members[group[index]].append(op)
    return [_merge(together, _read_outside(ops, together) | results) for together in members.values()]


def _consumers(ops: Sequence[_Op]) -> list[list[int]]:
    """Return, for each op, the later ops that read or complete a storage that it writes."""
    return [
        [
            later
            for later in range(index + 1, len(ops))
            if op.writes.keys() & (ops[later].reads.keys() | ops[later].writes.keys())
        ]
        for index, op in enumerate(ops)
    ]


def _read_outside(ops: Sequence[_Op], together: Sequence[_Op]) -> set[StorageWeakRef]:
    inside = {id(op) for op in together}
    return {storage for op in ops if id(op) not in inside for storage in op.reads}


def _merge(together: Sequence[_Op], needed: set[StorageWeakRef]) -> _Op:
    """Return one kernel, which reads its outer inputs and writes what later kernels need, each byte once."""
    if len(together) == 1:
        return together[0]
    reads, writes = _union(op.reads for op in together), _union(op.writes for op in together)
    reads = {storage: size for storage, size in reads.items() if storage not in writes}
    writes = {storage: size for storage, size in writes.items() if storage in needed}
    return _Op("merged: " + ", ".join(dict.fromkeys(op.name for op in together)), reads, writes, True)


def _union(parts: Iterator[Mapping[StorageWeakRef, int]]) -> dict[StorageWeakRef, int]:
    """Return the largest of several accesses to one storage: views overlap more often than they lie side by side."""
    union: dict[StorageWeakRef, int] = {}
    for part in parts:
        for storage, size in part.items():
            union[storage] = max(size, union.get(storage, 0))
    return union
