"""Token trees: every node against the float64 recurrence along its path, and what commit keeps."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import assert_close, make_spec, poison_dead_slots, random_inputs, reference

import replayssm_jax as rs
from replayssm_jax import dispatch

B = 3
# Compiling takes most of the time of these tests.
jit = functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
verify = jit(lambda spec, *args: rs.verify(spec, *args))
commit = jit(lambda spec, *args: rs.commit(spec, *args))
step = jit(lambda spec, *args: rs.step(spec, *args))

# Chain, star, binary tree, and a comb whose branches interleave.
SHAPES = {
    "chain": lambda n: np.arange(n) - 1,
    "star": lambda n: np.full(n, -1),
    "binary": lambda n: (np.arange(n) - 1) // 2,
    "comb": lambda n: np.maximum(np.arange(n) - 2, -1),
}


def random_parents(rng, num_tokens):
    return np.array([rng.integers(-1, t) if t else -1 for t in range(num_tokens)])


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(int(node))
        node = parents[node]
    return path[::-1]


def padded(paths, length):
    """Paths as [B, length], with nonsense behind their ends."""
    return jnp.asarray([path + [-7] * (length - len(path)) for path in paths], jnp.int32)


class History:
    """Rows of a state beside the float64 recurrence over what each has committed."""

    def __init__(self, spec, ragged, seed=0, gates=None):
        self.spec, self.ragged = spec, ragged
        self.state = rs.init_state(spec, B, ragged=ragged)
        self.exact = [np.zeros(spec.state_shape(1)) for _ in range(B)]
        self.rng = np.random.default_rng(seed)
        self.gates = gates

    def inputs(self, num_tokens):
        return random_inputs(
            self.spec, B, num_tokens, seed=self.rng.integers(1 << 30), gates=self.gates
        )

    def oracle(self, inputs, row, node, before):
        """The output and the state [1, H, P, N] after one more token on a path."""
        token = jax.tree.map(lambda x: np.asarray(x)[row : row + 1, node : node + 1], inputs)
        output, after = reference(self.spec, token, before)
        return output[0, 0], after

    def step(self):
        inputs = self.inputs(1)
        output, self.state = step(self.spec, self.state, inputs)
        for row in range(B):
            expected, self.exact[row] = self.oracle(inputs, row, 0, self.exact[row])
            assert_close(output[row, 0], expected, name="step")

    def tree(self, parents, ends, lengths=None):
        """Verify trees [B, T], then commit the paths to the nodes `ends` [B], -1 for none."""
        num_tokens = parents.shape[1]
        inputs = self.inputs(num_tokens)
        counts = None if lengths is None else jnp.asarray(lengths, jnp.int32)
        self.state = poison_dead_slots(self.spec, self.state)
        output, self.state = verify(
            self.spec, self.state, inputs, counts, jnp.asarray(parents, jnp.int32)
        )
        self.state = poison_dead_slots(self.spec, self.state)
        for row in range(B):
            real = num_tokens if lengths is None else lengths[row]
            assert not np.asarray(output[row, real:]).any()
            states = {-1: self.exact[row]}
            for node in range(real):
                before = states[parents[row, node]]
                expected, states[node] = self.oracle(inputs, row, node, before)
                assert_close(output[row, node], expected, name=f"node {node}")
            self.exact[row] = states[ends[row]]
        paths = [path_to(parents[row], end) for row, end in enumerate(ends)]
        accepted = np.array([len(path) for path in paths], np.int32)
        if not self.ragged:
            assert len({*accepted.tolist()}) == 1
            accepted = accepted[0]
        path = padded(paths, num_tokens)
        self.state = commit(self.spec, self.state, jnp.asarray(accepted), path)
        self.state = poison_dead_slots(self.spec, self.state)
        exact = np.concatenate(self.exact)
        assert_close(rs.materialize(self.spec, self.state), exact, name="state")


@pytest.mark.parametrize(
    "family, ragged",
    [("mamba2", True), ("gated_delta_net", False), ("kda", True), ("gla", False)],
)
def test_trees_of_16_nodes_and_decoding_after_them(family, ragged):
    """Into a ring that is empty, partly filled, due and wrapped; the oracle along every path."""
    spec = make_spec(family, window=20, max_tokens=16)
    history = History(spec, ragged)
    for shape in SHAPES.values():
        parents = np.tile(shape(16), (B, 1))
        ends = np.full(B, 15) if not ragged else np.array([15, -1, 6])
        history.tree(parents, ends)
        history.step()


@pytest.mark.parametrize("family", ["gated_delta_net", "kda", "gla"])
def test_every_row_its_own_tree(family):
    """With gates of all sizes on every path."""
    spec = make_spec(family, window=9, max_tokens=6)
    gates = (0.0, -1e-4, -1.0, -8.0, -40.0, -200.0)
    history = History(spec, ragged=True, seed=2, gates=gates)
    rng = np.random.default_rng(1)
    for _ in range(6):
        parents = np.stack([random_parents(rng, 6) for _ in range(B)])
        lengths = rng.integers(0, 7, B)
        ends = np.array([rng.integers(-1, n) if n else -1 for n in lengths])
        history.tree(parents, ends, lengths)
        history.step()


@pytest.mark.parametrize("family", ["mamba2", "kda"])
def test_bf16_records_move_bit_for_bit(family):
    """After commit of a path, the ring is that of the same tokens as a chain."""
    dtype = jnp.bfloat16
    spec = make_spec(family, max_tokens=5, key_dtype=dtype, value_dtype=dtype)
    inputs = random_inputs(spec, B, 5)
    parents = jnp.asarray(np.tile([-1, -1, 0, 2, 1], (B, 1)))
    _, tree = verify(spec, rs.init_state(spec, B), inputs, None, parents)
    path = jnp.asarray(np.tile([0, 2, 3], (B, 1)))
    tree = rs.commit(spec, tree, 3, path)
    chain = jax.tree.map(lambda x: x[:, np.array([0, 2, 3])], inputs)
    _, plain = verify(spec, rs.init_state(spec, B), chain)
    plain = rs.commit(spec, plain, 3)
    chex.assert_trees_all_equal(tree.pointer, plain.pointer)
    for name in ("log_decay", "key", "value", "beta"):
        found, expected = getattr(tree.buffer, name), getattr(plain.buffer, name)
        if found is not None:
            np.testing.assert_array_equal(found[:, :3], expected[:, :3], err_msg=name)


def test_a_chain_of_parents_is_no_parents():
    spec = make_spec("kda", max_tokens=4)
    inputs = random_inputs(spec, B, 4)
    state = rs.init_state(spec, B)
    chain = verify(spec, state, inputs, None, jnp.asarray(np.tile(np.arange(4) - 1, (B, 1))))
    for found, expected in zip(
        jax.tree.leaves(chain), jax.tree.leaves(verify(spec, state, inputs)), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_under_vmap():
    spec = make_spec("gated_delta_net", max_tokens=4)
    inputs = random_inputs(spec, B, 4)
    rng = np.random.default_rng(0)
    parents = jnp.asarray(np.stack([random_parents(rng, 4) for _ in range(B)]), jnp.int32)
    path, accepted = jnp.asarray([[0, 3], [1, 2], [2, 3]]), jnp.asarray([2, 1, 0])

    def run(state, inputs, parents, path, accepted):
        output, state = rs.verify(spec, state, inputs, parents=parents)
        return output, rs.materialize(spec, rs.commit(spec, state, accepted, path))

    state = rs.init_state(spec, B, ragged=True)
    arguments = (state, inputs, parents, path, accepted)
    expected = jax.jit(run)(*arguments)
    one_by_one = jax.tree.map(lambda x: x[:, None], arguments)
    found = jax.jit(jax.vmap(run))(*one_by_one)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x[:, 0], y, atol=1e-6)


def test_traced_nonsense_is_total():
    """Parents and nodes out of range are clipped; more accepted than there are counts as all."""
    spec = make_spec("mamba2", max_tokens=3)
    inputs = random_inputs(spec, B, 3)
    state = rs.init_state(spec, B, ragged=True)
    parents = jnp.asarray(np.tile([5, -9, 7], (B, 1)), jnp.int32)
    _, state = verify(spec, state, inputs, None, parents)
    out = commit(spec, state, jnp.asarray([9, -1, 2]), jnp.asarray([[0, 99], [-4, 0], [0, 2]]))
    np.testing.assert_array_equal(out.pointer.length, [2, 0, 2])
    assert np.isfinite(rs.materialize(spec, out)).all()
    again = commit(spec, out, jnp.asarray([2, 2, 2]), jnp.asarray([[0, 1]] * B))
    chex.assert_trees_all_equal(again.buffer, out.buffer)
    chex.assert_trees_all_equal(again.pointer, out.pointer)


@pytest.mark.parametrize(
    "parents, error, message",
    [
        ([[-1, 0]] * 3, ValueError, r"parents must have shape \(3, 3\), found \(3, 2\)"),
        ([[-1, 0, 2]] * 3, ValueError, "a parent must be -1 or an index smaller than its token's"),
        ([[-1, 0, -2]] * 3, ValueError, "a parent must be -1 or"),
        ([[-1.0, 0.0, 1.0]] * 3, TypeError, "parents must be integer, found float32"),
    ],
)
def test_impossible_parents_raise(parents, error, message):
    spec = make_spec("kda", max_tokens=3)
    state = rs.init_state(spec, B)
    with pytest.raises(error, match=message):
        rs.verify(spec, state, random_inputs(spec, B, 3), parents=jnp.asarray(parents))


@pytest.mark.parametrize(
    "accepted, path, error, message",
    [
        (1, [0, 1], ValueError, r"path must have shape \[B, T\] with T from 1 to max_tokens=3"),
        (1, [[0] * 4] * 3, ValueError, "path must have shape"),
        (1, [[0]] * 2, ValueError, r"path must have shape \(3, 1\), found \(2, 1\)"),
        (1, [[0.0]] * 3, TypeError, "path must be integer"),
        (2, [[1, 1]] * 3, ValueError, "must be pending and in rising order"),
        (2, [[0, 3]] * 3, ValueError, "must be pending and in rising order"),
        (1, [[-1, 0]] * 3, ValueError, "must be pending and in rising order"),
        (3, [[0, 1]] * 3, ValueError, "must be pending and in rising order"),
    ],
)
def test_impossible_paths_raise(accepted, path, error, message):
    spec = make_spec("kda", max_tokens=3)
    parents = jnp.asarray([[-1, 0, 0]] * B)
    _, state = rs.verify(spec, rs.init_state(spec, B), random_inputs(spec, B, 3), parents=parents)
    with pytest.raises(error, match=message):
        rs.commit(spec, state, accepted, jnp.asarray(path))


def test_kernels_take_no_trees(monkeypatch):
    """None falls back to XLA where a kernel would run; a kernel by name says why it does not."""
    spec = make_spec("mamba2", max_tokens=2)
    monkeypatch.setattr(dispatch, "_why_not_mosaic", lambda *args: None)
    assert dispatch.resolve(None, spec, 2) == "mosaic_gpu"
    assert dispatch.resolve(None, spec, 2, tree=True) == "xla"
    parents = jnp.asarray([[-1, -1]] * B)
    arguments = spec, rs.init_state(spec, B), random_inputs(spec, B, 2)
    rs.verify(*arguments, parents=parents)
    with pytest.raises(ValueError, match=r"cannot run: its kernels take chains .*found parents"):
        rs.verify(*arguments, parents=parents, implementation="mosaic_gpu")
