"""Count the Python functions that one exact block calls, without those inside the kernels' launches.

On the CPU the portable kernels run, whose tiles take more calls than sm_90's, and so do diffusers' tables.
"""

import sys
from collections import Counter

import torch

import turbo_rcm_patch as trp
from tests.tiny_wan import tiny_transformer_inputs, tiny_wan_transformer
from turbo_rcm_patch.kernels.launch import launch_kernel, recorded

CALLS = 470  # 864 before launches stopped asking which kernel runs. It includes calls within torch: fewer with 2.14
HOPS = 9  # from a block's forward to the launch of a kernel


def test_a_block_calls_few_functions():
    model = tiny_wan_transformer()
    inputs = tiny_transformer_inputs(model)
    calls, depths = Counter(), []

    def count(frame, event, _):
        if event != "call":
            return
        names = []
        while frame is not None:
            names.append(frame.f_code)
            if frame.f_code.co_name == "block_forward":
                calls[names[0].co_name] += 1
                if names[0] is launch_kernel.__code__:
                    depths.append(len(names) - 1)
                return
            frame = frame.f_back

    with torch.no_grad(), trp.patch(model, trp.Exact(implementation="triton")), recorded(lambda launch: None):
        model(**inputs)
        sys.setprofile(count)
        try:
            model(**inputs)
        finally:
            sys.setprofile(None)
    blocks = len(model.blocks)
    assert len(depths) >= 10 * blocks
    assert sum(calls.values()) <= CALLS * blocks, (sum(calls.values()) / blocks, calls.most_common(30))
    assert max(depths) <= HOPS
