"""Recipes: the published numbers, and refusals."""

import dataclasses

import pytest

from turbo_rcm_patch.recipes import RECIPES, Recipe, find_recipe, shifted


def test_published_times():
    four = [1, 0.9375, 0.83333333, 0.625]
    assert RECIPES["lightx2v"].sigmas == pytest.approx(four)
    assert RECIPES["lightning"].sigmas == pytest.approx(four)
    assert RECIPES["lightx2v-flf2v"].sigmas == pytest.approx([1, 0.9796, 0.9412, 0.8421], abs=5e-5)
    assert RECIPES["lightx2v-nvfp4-i2v"].sigmas == pytest.approx([1, 21 / 22, 7 / 8, 7 / 10])  # shift 7
    for name in ("fastwan", "causvid"):
        assert RECIPES[name].timesteps == (1000, 757, 522)
        assert RECIPES[name].sigmas == pytest.approx([1, 0.75675672, 0.52173914], rel=1e-7)
    assert RECIPES["causvid-lora"].sigmas == (1, 0.934, 0.862, 0.756, 0.603, 0.41, 0.25, 0.14, 0.074)
    assert {name: RECIPES[name].sigma_max for name in RECIPES if RECIPES[name].sigmas is None} == {
        "rcm": 80,
        "rcm-i2v": 200,
        "turbowan": 80,
        "turbowan-i2v": 200,
    }
    assert [recipe.steps for recipe in RECIPES.values()] == [4, 4, 4, 4, 3, 4, 4, 4, 4, 3, 9, 4]
    assert shifted([1, 0.75, 0.5, 0.25], 16) == pytest.approx([1, 0.9796, 0.9412, 0.8421], abs=5e-5)
    for name in ("lightx2v-flf2v", "lightx2v-nvfp4-i2v"):  # the others sample a video in tests/patching/sampling
        assert (RECIPES[name].solver, RECIPES[name].state_dtype) == ("euler", "bfloat16")


def test_longer_lists_have_their_authors_spacing():
    """lightx2v's and Lightning's: an even line from 1 to 0, shifted by 5."""
    eight = [1, 35 / 36, 15 / 16, 25 / 28, 5 / 6, 3 / 4, 5 / 8, 5 / 12]
    for name in ("lightx2v", "lightning"):
        recipe = RECIPES[name].in_steps(8)
        assert recipe.sigmas == pytest.approx(eight)
        assert dataclasses.replace(recipe, sigmas=RECIPES[name].sigmas) == RECIPES[name]
        assert RECIPES[name].in_steps(4) is RECIPES[name]
    assert RECIPES["lightx2v-flf2v"].in_steps(6).sigmas == pytest.approx(shifted([1 - i / 6 for i in range(6)], 16))
    assert RECIPES["rcm"].in_steps(2) is RECIPES["rcm"]
    for name, steps, message in (
        ("lightning", 2, "steps=2: lightning takes 4 or more steps"),
        ("lightning", 6.5, "steps=6.5; give a whole number"),
        ("lightning", "8", "steps='8'; give a whole number"),
        ("fastwan", 6, r"steps=6: fastwan takes 3 steps\. For others, give a Recipe with sigmas of your own"),
        ("rcm", 8, "steps=8: rcm takes 1 to 4 steps"),
        ("causvid-lora", 10, "takes 1 to 9 steps"),
    ):
        with pytest.raises(ValueError, match=message):
            RECIPES[name].in_steps(steps)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"solver": "heun", "sigmas": (1,)}, "solver='heun' is unknown; accepted are sde, euler, lcm"),
        ({"solver": "euler", "sigmas": (1,), "state_dtype": "int8"}, "state_dtype='int8'"),
        ({"solver": "euler"}, "has neither sigmas nor sigma_max; give sigmas"),
        ({"solver": "euler", "sigmas": (1,), "sigma_max": 80}, "has both sigmas and sigma_max; give sigmas"),
        ({"solver": "lcm", "sigma_max": 80, "state_dtype": "float64"}, "solver 'sde' or 'euler'"),
        ({"solver": "euler", "sigma_max": 80}, "state_dtype 'float64'"),
        ({"solver": "euler", "sigmas": ()}, "one or more"),
        ({"solver": "euler", "sigmas": (1, 0.75), "shift": 5.0}, r"give sigmas=evenly_spaced\(2, 5\)"),
        ({"solver": "euler", "sigmas": (0.5, 0.7)}, "decrease strictly"),
        ({"solver": "euler", "sigmas": (1.1, 0.7)}, r"give numbers in \(0, 1\]"),
        ({"solver": "euler", "sigmas": (0.5, 0.0)}, "without the final 0"),
        ({"solver": "euler", "sigmas": (1, 0.5), "timesteps": (1000,)}, "1 timesteps for 2 sigmas"),
        ({"solver": "euler", "sigmas": (1, 0.5), "timesteps": (1000, 1000)}, "decrease strictly"),
        ({"solver": "euler", "sigmas": (1,), "boundary": 875}, "boundary=875"),
        ({"solver": "euler", "sigmas": (1,), "boundary": "0.9"}, "boundary='0.9'"),
        ({"solver": "euler", "sigmas": 1.0}, "sigmas=1.0; give one or more numbers"),
    ],
)
def test_wrong_recipes(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe("mine", **fields)


def test_a_recipe_is_found_by_name_or_given():
    mine = Recipe("mine", "euler", sigmas=[1, 0.5])
    assert mine.sigmas == (1.0, 0.5)
    assert find_recipe(mine) is mine
    assert find_recipe("fastwan") is RECIPES["fastwan"]
    with pytest.raises(ValueError, match=r"recipe='euler' is unknown; accepted are rcm, .*causvid-lora"):
        find_recipe("euler")
    with pytest.raises(TypeError, match="give a Recipe"):
        find_recipe(4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mine.solver = "lcm"
