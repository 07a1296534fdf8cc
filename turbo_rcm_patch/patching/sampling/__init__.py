"""Few-step sampling on a pipeline.

use_rcm.py, use_distilled.py    install a sampler; use_distilled also chooses it and reads a LoRA
handle.py                       what both change on a pipeline; distilled_handle.py adds the LoRA
step_count.py                   the step of a generation that is under way
"""
