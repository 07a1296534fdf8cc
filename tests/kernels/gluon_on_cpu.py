"""Runs a Gluon kernel for sm_90 on the CPU: its roles in threads, on numpy arrays.

Triton's interpreter does not take Gluon. This is no model of the hardware's speed or layouts, but of what a kernel may
rely on: mbarriers with their phases, and asynchronous work, which takes effect as late as allowed. A product reads its
operands when it is waited for, and a store its buffer. A load arrives at once, or only when a role waits for it. A
hand-over that is missing or too early gives a wrong result, or a deadlock, which raises.
"""

from __future__ import annotations

import contextlib
import operator
import random
import re
import threading
import types

import numpy as np
import torch
from triton.language import constexpr

SECONDS = 20  # until a wait counts as a deadlock


class Deadlock(Exception):
    pass


class Barrier:
    """An mbarrier. errors: the errors of all roles. If there is one, a role that waits here gives up."""

    def __init__(self, errors):
        self.errors = errors
        self.changed = threading.Condition()
        self.phase = self.bytes = 0
        self.count = self.pending = None
        self.late = []  # loads that arrive when a role waits for them

    def init(self, count):
        self.count = self.pending = count

    def update(self, arrivals=0, expected=0, arrived=0):
        with self.changed:
            self.pending -= arrivals
            self.bytes += expected - arrived
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, phase):
        with self.changed:
            for _ in range(10 * SECONDS):
                if self.changed.wait_for(lambda: self._is_past(phase), 0.1):
                    return
                if self.errors:
                    break
            raise Deadlock

    def postpone(self, arrive):
        with self.changed:
            self.late.append(arrive)
            self.changed.notify_all()

    def _is_past(self, phase):
        while self.phase == phase and self.late:
            self.late.pop()()
        return self.phase != phase


class Dtype(str):
    """A dtype, by its name. Values are in fp16 for every dtype."""

    @property
    def primitive_bitwidth(self):
        return int(re.search(r"\d+", self)[0])


FLOAT16 = Dtype("float16")


class Memory:
    """Shared memory: an array, or barriers."""

    layout = None

    def __init__(self, values, dtype=FLOAT16):
        self.values, self.shape, self.dtype = values, values.shape, dtype

    def index(self, i):
        assert 0 <= i < self.shape[0]
        part = self.values[i]
        return part[0] if isinstance(part[0], Barrier) else Memory(part, self.dtype)

    def slice(self, start, length, dim=0):
        return Memory(self.values[(slice(None),) * dim + (slice(start, start + length),)], self.dtype)

    def reinterpret(self, dtype, shape, layout):
        bits = self.values.size * self.dtype.primitive_bitwidth
        assert np.prod(shape) * dtype.primitive_bitwidth == bits, "other bytes"
        return Memory(self.values.reshape(-1)[: np.prod(shape)].reshape(shape), dtype)

    def permute(self, order):
        return Memory(self.values.transpose(order))

    def reshape(self, shape):
        return Memory(self.values.reshape(shape), self.dtype)

    def load(self, layout):
        return Tensor(self.values.copy())

    def store(self, tensor):
        self.values[...] = tensor.values


def to_float32(values):
    """Convert an array, by PyTorch, which takes an eighth of numpy's time for float16."""
    return torch.from_numpy(values).float().numpy()


class Tensor:
    """A tensor in registers. products: those still to be added, each as its number in the role and its operands."""

    type = types.SimpleNamespace(layout=types.SimpleNamespace(instr_shape=(64, 64, 16)))

    def __init__(self, values, products=()):
        self.values, self.products, self.shape = values, products, values.shape

    def wait(self, last):
        """Add the products up to this number."""
        due = [(a, b) for number, a, b in self.products if number <= last]
        products = (to_float32(a.values) @ to_float32(b.values) for a, b in due)
        return Tensor(sum(products, start=self.values), self.products[len(due) :])

    def apply(self, function, *others):
        assert not self.products, "read before it was waited for"
        return Tensor(function(self.values, *(getattr(other, "values", other) for other in others)))

    def __add__(self, other):
        return self.apply(operator.add, other)

    def __sub__(self, other):
        return self.apply(operator.sub, other)

    def __mul__(self, other):
        return self.apply(operator.mul, other)

    def __rtruediv__(self, other):
        return self.apply(lambda values: other / values)

    def __getitem__(self, key):
        return Tensor(self.values[key])

    def to(self, dtype, bitcast=False):
        if bitcast:
            return self.apply(lambda values: np.rint(values).astype(np.int32).view(np.float32))
        return self.apply(lambda values: values.astype(np.float16 if dtype == "float16" else np.float32))

    def reshape(self, shape):
        return Tensor(self.values.reshape(shape), *([self.products] if self.products else []))

    def permute(self, order):
        return Tensor(self.values.transpose(order))

    def split(self):
        return Tensor(self.values[..., 0]), Tensor(self.values[..., 1])


class Pointer:
    def __init__(self, values, offsets=0):
        self.values, self.offsets = values, offsets

    def __add__(self, offsets):
        return Pointer(self.values, self.offsets + offsets)

    def __getitem__(self, key):
        return Pointer(self.values, self.offsets[key])


class Descriptor:
    """A TMA descriptor of an array. Parts of a box outside the array load zero and are not stored."""

    layout = None

    def __init__(self, array, box, dtype=None):
        self.array, self.dtype = array, Dtype(dtype or array.dtype)
        size = int(np.prod(box)) * self.dtype.primitive_bitwidth // 8
        self.block_type = types.SimpleNamespace(shape=box, nbytes=size)

    def _overlap(self, start):
        box = self.block_type.shape
        sizes = zip(start, box, self.array.shape, strict=True)
        inside = [slice(max(s, 0), max(min(s + n, size), 0)) for s, n, size in sizes]
        return tuple(inside), tuple(slice(i.start - s, i.stop - s) for i, s in zip(inside, start, strict=True))

    def read(self, start):
        box = np.zeros(self.block_type.shape, self.array.dtype)
        inside, of_box = self._overlap(start)
        if all(i.stop > i.start for i in inside):
            box[of_box] = self.array[inside]
        return box

    def write(self, start, box):
        inside, of_box = self._overlap(start)
        if all(i.stop > i.start for i in inside):
            self.array[inside] = box[of_box]


class Machine:
    """One run of a kernel. It holds the stand-ins for the names in the kernel's module."""

    def __init__(self, programs, seed):
        self.programs, self.random = programs, random.Random(seed)
        self.local = threading.local()
        self.errors = []

    def names(self):
        gl = types.SimpleNamespace(
            **{name: Dtype(name) for name in ("int8", "int32", "int64", "float32", "bfloat16", "float8e4nv")},
            static_range=range,
            cdiv=lambda a, b: -(-a // b),
            program_id=lambda _: self.program,
            num_programs=lambda _: self.programs,
            allocate_shared_memory=self.allocate,
            zeros=lambda shape, dtype, layout: Tensor(np.zeros(shape, np.float32)),
            full=lambda shape, value, dtype, layout: Tensor(np.full(shape, value, dtype)),
            cast=lambda value, _: value,
            exp2=lambda tensor: tensor.apply(np.exp2),
            log2=lambda tensor: tensor.apply(np.log2),
            max=lambda tensor, axis: tensor.apply(lambda values: values.max(axis)),
            sum=lambda tensor, axis: tensor.apply(lambda values: values.sum(axis)),
            maximum=lambda one, other: one.apply(np.maximum, other) if isinstance(one, Tensor) else max(one, other),
            minimum=lambda one, other: one.apply(np.minimum, other) if isinstance(one, Tensor) else min(one, other),
            join=lambda one, other: Tensor(np.stack((one.values, other.values), -1)),
            inline_asm_elementwise=self.inline_asm,
            arange=lambda start, end, layout: np.arange(start, end),
            where=self.where,
            DotOperandLayout=lambda *_, **__: None,
            SliceLayout=lambda *_: None,
            convert_layout=lambda tensor, *_, **__: tensor,
            NVMMASharedLayout=lambda **_: None,
            NVMMADistributedLayout=lambda *_, **__: None,
            load=self.load_values,
            warp_specialize=self.warp_specialize,
        )
        mbarrier = types.SimpleNamespace(
            MBarrierLayout=lambda: "barrier",
            init=lambda barrier, count: self.one(barrier).init(count),
            wait=lambda barrier, phase: self.one(barrier).wait(phase),
            expect=lambda barrier, size: self.one(barrier).update(arrivals=1, expected=size),
            arrive=lambda barrier, pred=True: self.one(barrier).update(arrivals=1) if pred else None,
        )
        tl = types.SimpleNamespace(
            cdiv=gl.cdiv, int32=None, maximum=max, cast=lambda value, _: getattr(value, "value", value)
        )
        return {
            "gl": gl,
            "tl": tl,
            "mbarrier": mbarrier,
            "tma": types.SimpleNamespace(store_wait=self.store_wait),
            "reinterpret": Memory.reinterpret,
            "tma_load": self.load,
            "tma_store": self.store,
            "fence_async_shared": lambda: None,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait,
        }

    @staticmethod
    def one(barrier):
        return barrier.values[0] if isinstance(barrier, Memory) else barrier

    @staticmethod
    def where(condition, one, other):
        if isinstance(condition, np.ndarray):
            return one.apply(lambda values: np.where(condition, values, np.float32(other)))
        return one if condition else other

    @staticmethod
    def inline_asm(asm, constraints, arguments, dtype, is_pure, pack):
        """Round to e4m3, the only assembly that is known here."""
        assert dtype == "float8e4nv"
        return arguments[0].apply(lambda values: torch.from_numpy(values).to(torch.float8_e4m3fn).float().numpy())

    @staticmethod
    def load_values(at, mask=True, other=0):
        if np.ndim(at.offsets) == 0:
            return at.values[at.offsets].item()
        return Tensor(np.where(mask, at.values[np.where(mask, at.offsets, 0)], other))

    def allocate(self, dtype, shape, layout):
        if layout != "barrier":
            return Memory(np.full(shape, np.nan, np.float16), dtype)
        values = np.empty(shape, object)
        values.flat = [Barrier(self.errors) for _ in range(values.size)]
        return Memory(values)

    def load(self, descriptor, start, barrier, target, pred=True):
        if not pred:
            return
        box = descriptor.read(start)
        target.values[...] = np.nan

        def arrive():
            target.values[...] = box
            self.one(barrier).update(arrived=box.size * target.dtype.primitive_bitwidth // 8)

        if self.random.random() < 0.8:
            arrive()
        else:
            self.one(barrier).postpone(arrive)

    def store(self, descriptor, start, source):
        self.local.stores = [*getattr(self.local, "stores", []), (descriptor, start, source)]

    def store_wait(self, outstanding):
        for descriptor, start, source in getattr(self.local, "stores", []):
            descriptor.write(start, source.values)
        self.local.stores = []

    def multiply(self, a, b, acc, use_acc=True, is_async=True):
        self.local.started = getattr(self.local, "started", 0) + 1
        products = (*(acc.products if use_acc else ()), (self.local.started, a, b))
        return Tensor(acc.values if use_acc else np.zeros_like(acc.values), products)

    def wait(self, outstanding, deps):
        """Wait for all products that the role has started but the last ones, `outstanding` of them."""
        waited = [tensor.wait(self.local.started - outstanding) for tensor in deps]
        return waited[0] if len(waited) == 1 else tuple(waited)

    def warp_specialize(self, roles, warps, registers):
        threads = [threading.Thread(target=self._run_role, args=role, daemon=True) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _run_role(self, function, arguments):
        try:
            function(*arguments)
        except BaseException as error:  # for the thread that waits for it
            self.errors.append(error)


@contextlib.contextmanager
def on_cpu(monkeypatch, modules, programs, seed=0, **names):
    """A context in which the Gluon functions of these modules run on the CPU. Yields the Machine.

    programs: how many a kernel is launched as. names: other stand-ins for names of the modules.
    """
    machine = Machine(programs, seed)
    with monkeypatch.context() as patch:
        for module in modules:
            for name, value in list(vars(module).items()):
                if hasattr(value, "fn") and callable(value.fn):
                    patch.setattr(module, name, value.fn)
                elif isinstance(value, constexpr):
                    patch.setattr(module, name, value.value)
            for name, value in (machine.names() | names).items():
                if name in vars(module):
                    patch.setattr(module, name, value)
        yield machine


def run_launches(monkeypatch, module, launch, modules, programs, seed=0, **names):
    """Call a launcher of a module, and run what it launches on the CPU. The other arguments are those of `on_cpu`."""
    launched = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "launch_kernel", lambda *given, **options: launched.append((given, options)))
        launch()
    for (kernel, _, *arguments), options in launched:
        options.pop("num_warps")
        with on_cpu(monkeypatch, modules, programs, seed, **names) as machine:
            run(machine, kernel.fn, *map(argument, arguments), **options)


def run(machine, kernel, *arguments, **constants):
    """Run every program of a kernel, one after the other."""
    for program in range(machine.programs):
        machine.program = program
        kernel(*arguments, **constants)


def argument(value: object) -> object:
    """Return what the kernel receives for an argument of its launch."""
    if isinstance(value, torch.Tensor):
        return Pointer(value.numpy().reshape(-1))
    base = getattr(value, "base", None)
    if base is None:
        return value
    is_fp8 = base.dtype == torch.float8_e4m3fn
    array = (base.half() if is_fp8 else base).as_strided(value.shape, value.strides).numpy()
    return Descriptor(array, value.block_shape, "float8e4nv" if is_fp8 else None)
