"""Helpers for tests of whole generations: seeds, the network as a velocity, the comparison of videos."""

import copy

import torch

LATENTS = (16, 2, 4, 6)  # of one sample


def randn(shape, generator):
    if isinstance(generator, list):
        return torch.cat([torch.randn(1, *shape[1:], generator=one) for one in generator])
    return torch.randn(shape, generator=generator)


def seeded(*seeds):
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return generators if len(seeds) > 1 else generators[0]


def text(pipe, prompt, tokens=16):
    with torch.no_grad():
        embeds, _ = pipe.encode_prompt(prompt, do_classifier_free_guidance=False, max_sequence_length=tokens)
    return embeds.to(pipe.transformer.dtype)


def t2v_velocity(pipe, prompt):
    embeds = text(pipe, prompt)

    @torch.no_grad()
    def velocity(x, timestep):
        return pipe.transformer(x, timestep.expand(len(x)), embeds, return_dict=False)[0]

    return velocity


def assert_same_video(actual, expected):
    """Equal to fp32 rounding: a few steps of a network whose output is as large as its input."""
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def record_calls(transformer):
    """The keyword arguments of every call from now on."""
    calls = []
    transformer.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    return calls


def a_servers_copy(pipe):
    """Return a copy of a pipeline with its own scheduler, as servers make for each request."""
    twin = copy.copy(pipe)
    twin.scheduler = copy.deepcopy(pipe.scheduler)
    return twin
