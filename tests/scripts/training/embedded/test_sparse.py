"""Fine-tuning to sparse-linear attention at a toy size: what learns, from what, and that it stops and goes on."""

import json

import pytest
import torch
from safetensors.torch import load_file

import turbo_rcm_patch as trp
from scripts.training import train_sparse
from scripts.training.embedded import sparse, text, trajectory
from scripts.training.embedded.progress import Run
from tests.lora_files import read_lora
from tests.oracle import same_tensors
from turbo_rcm_patch.bench.evaluate import EMBEDDED_CALL
from turbo_rcm_patch.solvers import rcm_times

LATENTS = (16, 2, 8, 12)  # 48 tokens: three blocks


@pytest.fixture(autouse=True)
def _small_batches_and_short_prompts(monkeypatch):
    monkeypatch.setattr(sparse, "BATCH", 2)
    monkeypatch.setattr(text, "MAX_TEXT_TOKENS", 32)


@pytest.fixture(scope="module")
def pipe():
    return trp.load_embedded_pipeline()


def test_it_stops_goes_on_and_ends_as_if_it_had_not_stopped(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(train_sparse, "EMBEDDED_CALL", {**EMBEDDED_CALL, "height": 64, "width": 96, "num_frames": 5})
    monkeypatch.setattr(trajectory, "STEPS", 2)
    command = ["--seed", "3", "--steps", "2", "--output"]
    assert train_sparse.main([*command, str(tmp_path / "whole")]) == 0
    assert train_sparse.main([*command, str(tmp_path / "parts"), "--minutes", "0"]) == 75
    assert "run the same command again" in capfd.readouterr().out
    assert not (tmp_path / "parts/difference.safetensors").exists()
    assert train_sparse.main([*command, str(tmp_path / "parts")]) == 0
    whole, parts = (load_file(tmp_path / name / "difference.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert {tensor.dtype for tensor in whole.values()} == {torch.float16}
    line = json.loads((tmp_path / "whole/log.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 2
    assert set(line) >= {"velocity", "attention"}


def test_what_learns_is_the_difference_and_the_teacher_stays(tmp_path, pipe):
    before = {name: tensor.clone() for name, tensor in pipe.transformer.state_dict().items()}
    learned = sparse.train_sparse(Run(tmp_path, 0), pipe, LATENTS, 2)
    assert same_tensors(pipe.transformer.state_dict(), before)
    assert not any(hook for block in pipe.transformer.blocks for hook in block.attn1.to_out[0]._forward_hooks)
    blocks = len(pipe.transformer.blocks)
    assert sum(name.endswith(".diff") for name in learned) == 2 * blocks
    assert sum("proj_l" in name for name in learned) == 2 * blocks
    assert len(learned) == (2 + 2 + 2 * len(sparse.LINEARS)) * blocks
    never_zero = {name for name in learned if "lora_A" in name}
    assert all(tensor.any() for name, tensor in learned.items() if name not in never_zero), "something did not learn"
    pairs = {name: tensor for name, tensor in learned.items() if "proj_l" not in name}
    assert read_lora(pairs, pipe.transformer).ranks == [sparse.RANK]


def test_the_student_starts_as_block_sparse_attention_of_the_dense_weights(pipe):
    student = sparse.to_sparse(trp.load_embedded_pipeline().transformer)
    found = sparse.difference(student, pipe.transformer)
    changes = [tensor for name, tensor in found.items() if "lora_A" not in name]
    assert not any(tensor.any() for tensor in changes)


def test_the_states_are_those_of_the_sampler():
    """Networks that return zeros leave only the noise and its fading."""

    def network(x, timestep, text, return_dict):
        seen.append((x.clone(), timestep))
        return (torch.zeros_like(x),)

    seen, prompt = [], torch.zeros(1, 1, 1)
    torch.manual_seed(0)
    assert len(list(trajectory.trajectory(network, network, prompt, prompt, LATENTS))) == 4
    states = [x for x, _ in seen[::2]]
    assert [timestep.item() for _, timestep in seen[::2]] == [988.0, 932.0, 852.0, 608.0]
    assert all(torch.equal(student, teacher) for (student, _), (teacher, _) in zip(seen[::2], seen[1::2], strict=True))
    assert states[0].std().item() == pytest.approx(80 / 81, rel=0.03)
    noise = [
        (after - (1 - t) * before) / t
        for before, after, t in zip(states, states[1:], rcm_times(4).tolist()[1:], strict=False)
    ]
    assert all(one.std().item() == pytest.approx(1.0, rel=0.03) for one in noise)
