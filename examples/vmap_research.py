"""Research code with ReplaySSM: vmapped episodes, weight perturbations, forks.

    python examples/vmap_research.py --episodes 8 --population 16

Everything is a function of one sequence, and `vmap` adds the axes. Three things are shown, on one
recurrent policy, a Gated DeltaNet cell between two matrices:

1. Episodes: `scan` over environment steps with a reset flag at every step, `vmap` over episodes.
2. Evolution strategies: `vmap` over perturbed weights, all of which go on from one state that the
   unperturbed weights made of a common prompt. The parameters climb to imitate a teacher.
3. Forks: one state, continued under several futures.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import replayssm_jax as rs

HEADS, DIM, FEATURES, ACTIONS = 2, 8, 6, 3
SPEC = rs.ReplaySpec.gated_delta_net(
    num_value_heads=HEADS,
    num_key_heads=HEADS,
    key_dim=DIM,
    value_dim=DIM,
    key_dtype=jnp.float32,
    value_dtype=jnp.float32,
)
SPLITS = [HEADS * DIM, 2 * HEADS * DIM, 3 * HEADS * DIM, 3 * HEADS * DIM + HEADS]


class Params(NamedTuple):
    """w_in [FEATURES, q | k | v | a | b] and w_out [HEADS * DIM, ACTIONS]."""

    w_in: jax.Array
    w_out: jax.Array


def init_params(key: jax.Array) -> Params:
    key_in, key_out = jax.random.split(key)
    w_in = jax.random.normal(key_in, (FEATURES, SPLITS[-1] + HEADS)) * FEATURES**-0.5
    return Params(w_in, jax.random.normal(key_out, (HEADS * DIM, ACTIONS)))


def records(params: Params, observations: jax.Array) -> rs.TokenInputs:
    """Observations [T, FEATURES] of one sequence as token records: arrays have B = 1 in front."""
    q, k, v, a, b = jnp.split((observations @ params.w_in)[None], SPLITS, axis=-1)
    heads = (*q.shape[:2], HEADS, DIM)
    q, k, v = (x.reshape(heads) for x in (q, k, v))
    return rs.TokenInputs.gated_delta_net(q, k, v, a, b, A_log=jnp.zeros(HEADS))


def act(params: Params, state: rs.ReplayState, observation: jax.Array) -> tuple[Any, jax.Array]:
    """One step of one sequence: observation [FEATURES] -> state, logits [ACTIONS]."""
    o, state = rs.step(SPEC, state, records(params, observation[None]))
    return state, o.reshape(-1) @ params.w_out


def prompt_state(params: Params, observations: jax.Array) -> rs.ReplayState:
    """The state after a prompt [T, FEATURES], in one prefill."""
    state = rs.init_state(SPEC, 1, ragged=True)
    return rs.prefill(SPEC, state, records(params, observations))[1]


def episode(
    params: Params, state: rs.ReplayState, observations: jax.Array, dones: jax.Array
) -> jax.Array:
    """Logits [T, ACTIONS] of one sequence; where done [T] the policy forgets before it acts."""

    def body(state: rs.ReplayState, x: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        observation, done = x
        state = rs.reset(SPEC, state, where=done[None])  # moves the pointer, nothing else
        return act(params, state, observation)

    return jax.lax.scan(body, state, (observations, dones))[1]


@jax.jit
def episodes(params: Params, observations: jax.Array, dones: jax.Array) -> jax.Array:
    """Logits [E, T, ACTIONS] of E episodes that start from nothing."""
    state = rs.init_state(SPEC, 1, ragged=True)
    return jax.vmap(episode, in_axes=(None, None, 0, 0))(params, state, observations, dones)


def noise_like(params: Params, key: jax.Array) -> Params:
    keys = jax.random.split(key, len(params))
    return Params(*(jax.random.normal(k, x.shape) for k, x in zip(keys, params, strict=True)))


@functools.partial(jax.jit, static_argnames=("population", "scale", "rate"))
def evolve(
    params: Params,
    key: jax.Array,
    prompt: jax.Array,
    observations: jax.Array,
    wanted: jax.Array,
    *,
    population: int,
    scale: float = 0.05,
    rate: float = 0.03,
) -> tuple[Params, jax.Array]:
    """One step of evolution strategies with mirrored noise; return new parameters and the old loss.

    The prompt is read once, by the unperturbed weights. Its state has no axis for the population:
    `vmap` gives each member its copy where the members' states begin to differ.
    """
    state = prompt_state(params, prompt)
    dones = jnp.zeros(observations.shape[0], bool)

    def loss(params: Params) -> jax.Array:
        logits = episode(params, state, observations, dones)
        return jnp.mean((logits - wanted) ** 2)

    def member(key: jax.Array) -> tuple[Params, jax.Array]:
        noise = noise_like(params, key)
        plus, minus = (
            loss(jax.tree.map(lambda x, n, s=s: x + s * n, params, noise)) for s in (scale, -scale)
        )
        return noise, plus - minus

    noise, scores = jax.vmap(member)(jax.random.split(key, population))
    scores = scores / (jnp.linalg.norm(scores) + 1e-12)
    better = jax.tree.map(lambda x, n: x - rate * jnp.tensordot(scores, n, axes=1), params, noise)
    return better, loss(params)


@jax.jit
def futures(params: Params, state: rs.ReplayState, observations: jax.Array) -> jax.Array:
    """Logits [F, T, ACTIONS] of one state under F futures [F, T, FEATURES].

    `rs.take` with repeated rows forks a state into a batch, which then moves as one.
    """
    states = rs.take(SPEC, state, jnp.zeros(observations.shape[0], jnp.int32))
    inputs = jax.vmap(lambda x: jax.tree.map(lambda r: r[0], records(params, x)))(observations)

    def body(states: rs.ReplayState, token: rs.TokenInputs) -> tuple[Any, jax.Array]:
        o, states = rs.step(SPEC, states, jax.tree.map(lambda x: x[:, None], token))
        return states, o.reshape(o.shape[0], -1) @ params.w_out

    time_first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
    return jnp.moveaxis(rs.scan_steps(body, states, time_first)[1], 0, 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="steps of an episode")
    parser.add_argument("--population", type=int, default=32)
    parser.add_argument("--generations", type=int, default=60)
    args = parser.parse_args(argv)
    if min(args.episodes, args.steps, args.population, args.generations) < 1:
        parser.error("every number must be at least 1")

    keys = iter(jax.random.split(jax.random.key(0), 8))
    params = init_params(next(keys))

    observations = jax.random.normal(next(keys), (args.episodes, args.steps, FEATURES))
    dones = jax.random.bernoulli(next(keys), 0.1, observations.shape[:2])
    logits = episodes(params, observations, dones)
    last = max(int(i) for i in jnp.flatnonzero(dones[0].at[0].set(True)))
    alone = episodes(params, observations[:1, last:], dones[:1, last:])
    gap = float(jnp.max(jnp.abs(alone[0] - logits[0, last:])))
    print(f"episodes: {args.episodes} of {args.steps} steps, {int(dones.sum())} resets; after its")
    print(f"  last reset, episode 0 agrees with one that starts there to {gap:.1e}")

    prompt, observations = jax.random.normal(next(keys), (2, args.steps, FEATURES))
    teacher = init_params(next(keys))
    no_reset = jnp.zeros(args.steps, bool)
    wanted = episode(teacher, prompt_state(teacher, prompt), observations, no_reset)
    losses = []
    for key in jax.random.split(next(keys), args.generations):
        params, loss = evolve(params, key, prompt, observations, wanted, population=args.population)
        losses.append(float(loss))
    print(f"evolution: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {args.generations} generations")
    print(f"  of {args.population} mirrored pairs, each of them from one state of the prompt")

    state = prompt_state(params, prompt)
    branches = jnp.stack([observations, -observations, observations])
    logits = futures(params, state, branches)
    straight = episode(params, state, observations, no_reset)
    gap = float(jnp.max(jnp.abs(logits[::2] - straight[None])))
    apart = float(jnp.max(jnp.abs(logits[1] - straight)))
    print(f"forks: equal futures agree with the unforked run to {gap:.1e}, the other one")
    print(f"  is {apart:.1e} away")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
