import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vmap_research as research

import replayssm_jax as rs


def test_runs_as_a_script(capsys):
    arguments = ["--episodes", "2", "--steps", "20", "--population", "4", "--generations", "3"]
    assert research.main(arguments) == 0
    printed = capsys.readouterr().out
    gaps = [float(x) for x in re.findall(r"agrees? with .* to ([\d.e+-]+)", printed)]
    assert len(gaps) == 2 and max(gaps) < 1e-5
    assert re.search(r"evolution: loss [\d.]+ -> [\d.]+, 3 generations", printed)


def test_evolution_learns():
    params, teacher = (research.init_params(jax.random.key(i)) for i in (0, 1))
    prompt, observations = jax.random.normal(jax.random.key(2), (2, 20, research.FEATURES))
    dones = jnp.zeros(20, bool)
    state = research.prompt_state(teacher, prompt)
    wanted = research.episode(teacher, state, observations, dones)
    losses = []
    for key in jax.random.split(jax.random.key(3), 12):
        params, loss = research.evolve(params, key, prompt, observations, wanted, population=16)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]


def test_episodes_equal_the_recurrence_from_reset_to_reset():
    params = research.init_params(jax.random.key(0))
    observations = jax.random.normal(jax.random.key(1), (2, 20, research.FEATURES))
    dones = jnp.zeros((2, 20), bool).at[0, 17].set(True).at[1, 3].set(True)
    found = research.episodes(params, observations, dones)
    for row, cut in ((0, 17), (1, 3)):
        parts = []
        for part in (observations[row, :cut], observations[row, cut:]):
            empty = jnp.zeros(research.SPEC.state_shape(1))
            o, _ = rs.recurrent_scan(research.SPEC, empty, research.records(params, part))
            parts.append(o.reshape(o.shape[1], -1) @ params.w_out)
        np.testing.assert_allclose(found[row], jnp.concatenate(parts), rtol=1e-4, atol=1e-5)


def test_bad_arguments_are_errors(capsys):
    with pytest.raises(SystemExit):
        research.main(["--population", "0"])
    assert "must be at least 1" in capsys.readouterr().err
