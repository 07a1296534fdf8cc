"""An oracle is computed for the first call of each module while something runs."""

import torch

from turbo_rcm_patch.bench.oracle import first_calls


def test_the_first_call_of_each_module_counts_and_sees_its_own_inputs():
    linear, idle = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    first, second = torch.zeros(1, 2), torch.ones(1, 2)
    outputs = []
    calls = first_calls({"linear": linear, "idle": idle}, lambda: outputs.extend((linear(first), linear(input=second))))
    assert calls == {"linear": ((first,), {})}
    assert torch.equal(outputs[1], linear(second))
    assert not linear._forward_pre_hooks
