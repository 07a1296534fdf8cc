"""The machine on which tests run Gluon's kernels without a GPU."""

import time

import numpy as np

from tests.kernels import gluon_on_cpu


def test_a_late_load_arrives_only_when_a_role_waits_for_it(monkeypatch):
    machine = gluon_on_cpu.Machine(programs=1, seed=0)
    monkeypatch.setattr(machine.random, "random", lambda: 1.0)
    pixels = gluon_on_cpu.Descriptor(np.ones((2, 4), np.float16), [2, 4])
    target = machine.allocate(gluon_on_cpu.FLOAT16, [2, 4], None)
    arrived = gluon_on_cpu.Barrier(machine.errors)
    arrived.init(count=1)
    arrived.update(arrivals=1, expected=pixels.block_type.nbytes)
    machine.load(pixels, [0, 0], arrived, target)
    time.sleep(0.01)
    assert np.isnan(target.values).all()
    arrived.wait(1)  # for the phase before
    assert np.isnan(target.values).all()
    arrived.wait(0)
    assert (target.values == 1).all()
