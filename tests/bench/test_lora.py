"""The LoRA rows: random adapters, and what they are timed beside."""

import json
import sys

import pytest
import torch

from tests.oracle import relative_error
from tests.test_examples import load_script
from turbo_rcm_patch.bench.cases import CASES, build_pipeline, random_inputs
from turbo_rcm_patch.bench.lora import RESCALED, WITHOUT, add_random_lora, lora_variants
from turbo_rcm_patch.config import PatchConfig
from turbo_rcm_patch.patching import use_rcm
