"""The Wan family: Wan 2.1 T2V and I2V, Wan 2.2 with two experts, TI2V-5B.

layers.py: one fused op each, or diffusers' module. block.py: the block's forward. state.py: constants of a generation.
graph.py: the model's forward as a CUDA graph. repeatable.py: which modules may run more or less often than they are
called. model.py: which module gets which forward. plan.py: what runs where, for the summary.
"""

from .graph import graph_of
from .model import SUPPORTED, bindings, check_supported
from .plan import notes, plan_rows

__all__ = ["SUPPORTED", "bindings", "check_supported", "graph_of", "notes", "plan_rows"]
