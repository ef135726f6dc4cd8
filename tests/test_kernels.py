"""Kernels without a GPU: values in the Mosaic interpreter, lowering for the GPUs they are for."""

import contextlib
import dataclasses
import functools
import itertools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    check_nan_row,
    check_read_copies,
    check_snapshots,
    check_who_reads_what,
    check_windowed_loop,
    cut_as_for_large_batches,
    records_follow,
)
from oracle import assert_close, make_spec, poison_dead_slots, random_inputs, reference, tokens

import replayssm_jax as rs
from replayssm_jax import dispatch
from replayssm_jax.snapshots import Snapshots, verify_snapshots

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < dispatch.OLDEST_JAX_FOR_KERNELS, reason="kernels need a newer jax"
)

SHAPES = {
    "mamba2": dict(value_dim=64, key_dim=32),
    "gated_delta_net": dict(value_dim=64, key_dim=48),
    "kda": dict(value_dim=64, key_dim=32),
    "gla": dict(value_dim=64, key_dim=64),
}

# Layers of published models: Nemotron-H 8B, Nemotron-3-Nano-4B, Qwen3-Next, Kimi Linear.
LAYERS = {
    "mamba2": rs.ReplaySpec.mamba2(num_heads=128, head_dim=64, state_dim=128, num_groups=8),
    "mamba2, head_dim 80": rs.ReplaySpec.mamba2(
        num_heads=96, head_dim=80, state_dim=128, num_groups=8
    ),
    "gated_delta_net": rs.ReplaySpec.gated_delta_net(
        num_value_heads=32, num_key_heads=16, key_dim=128, value_dim=128
    ),
    "kda": rs.ReplaySpec.kda(num_heads=32, key_dim=128, value_dim=128),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, cut",
    [("mamba2", "small"), ("gated_delta_net", "large"), ("kda", "large"), ("gla", "small")],
)
def test_values_in_the_interpreter(family, cut):
    """Steps, drafts of uneven lengths, rollback, flush, reset rows, vmap; NaN in dead slots."""
    few = dict(num_heads=2, num_groups=1) if cut == "small" else {}  # many programs take long
    spec = make_spec(family, window=5, max_tokens=2, **SHAPES[family] | few)
    inputs = random_inputs(spec, 2, 12)
    on_kernels = {"implementation": "mosaic_gpu"}
    step = jax.jit(functools.partial(rs.step, spec, **on_kernels))
    verify = jax.jit(functools.partial(rs.verify, spec, **on_kernels))
    outputs = []
    large = cut_as_for_large_batches() if cut == "large" else contextlib.nullcontext()
    with dispatch.interpreted_kernels(), large:
        state = rs.init_state(
            spec, 2, jnp.full(spec.state_shape(2), jnp.nan), layout="vk", ragged=True
        )
        state = rs.reset(spec, state, jnp.array([True, True]))
        for t in range(6):
            state = poison_dead_slots(spec, state)
            output, state = step(state, tokens(inputs, t, t + 1))
            outputs.append(output)
        _, state = verify(state, tokens(inputs, 9, 11))
        state = poison_dead_slots(spec, rs.commit(spec, state, jnp.array([0, 0])))
        for t in (6, 8):
            output, state = verify(state, tokens(inputs, t, t + 2), jnp.array([2, 1]))
            assert not output[1, 1].any()
            row = jax.tree.map(lambda x: x[:, 1:], tokens(inputs, t, t + 2))
            state = rs.commit(spec, state, jnp.array([2, 1]))
            rest, state = verify(state, row, jnp.array([0, 1]))
            state = rs.commit(spec, state, jnp.array([0, 1]))
            outputs.append(output.at[1, 1].set(rest[1, 0]))
        state = rs.flush(spec, state, jnp.array([True, False]), **on_kernels)
        state = poison_dead_slots(spec, state)
        single = jax.jit(jax.vmap(functools.partial(rs.step, spec, **on_kernels)))
        each = functools.partial(jax.tree.map, lambda x: x[:, None])
        output, state = single(each(state), each(tokens(inputs, 10, 11)))
        outputs.append(output[:, 0])
        state = jax.tree.map(lambda x: x[:, 0], state)
        output, state = step(state, tokens(inputs, 11, 12))
        outputs.append(output)
        pointer = dataclasses.replace(state.pointer, length=jnp.array([6, 5]))
        outrun = dataclasses.replace(state, pointer=pointer)
        lost, _ = step(outrun, tokens(inputs, 0, 1))
    expected, expected_state = reference(spec, inputs)
    assert_close(jnp.concatenate(outputs, axis=1), expected)
    assert_close(rs.materialize(spec, state), expected_state, name="state")
    assert np.isnan(lost[0]).all(), "more records than the window holds must be loud"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, key_dtype, num_tokens, tested_at",
    [
        ("mamba2", jnp.bfloat16, 8, (24, 32)),
        ("kda", jnp.float32, 8, (24, 32)),
        ("mamba2", jnp.float32, 16, (16,)),
        ("gated_delta_net", jnp.bfloat16, 16, (32,)),
        ("kda", jnp.float32, 16, (16,)),
        ("gla", jnp.bfloat16, 16, (32,)),
    ],
)
def test_many_tokens_in_the_interpreter(family, key_dtype, num_tokens, tested_at):
    """A window of two blocks, before and at its flush, as programs with many rows have it.

    Of 16 tokens little, for the time that it takes: a GPU runs the rest.
    """
    few = dict(num_heads=1, num_groups=1) if num_tokens > 8 else {}
    dims = SHAPES[family] | few
    spec = make_spec(family, window=32, max_tokens=num_tokens, key_dtype=key_dtype, **dims)
    inputs = random_inputs(spec, 1, 32 + num_tokens)
    verify = functools.partial(rs.verify, spec)
    known = jax.jit(functools.partial(verify, implementation="xla"))
    tested = jax.jit(functools.partial(verify, implementation="mosaic_gpu"))
    state = rs.init_state(spec, 1, ragged=True)
    with dispatch.interpreted_kernels(), cut_as_for_large_batches():
        for t in range(0, 32 + num_tokens, num_tokens):
            state, new = poison_dead_slots(spec, state), tokens(inputs, t, t + num_tokens)
            expected, after = known(state, new)
            after = rs.commit(spec, after, num_tokens)
            if t in tested_at:
                output, found = tested(state, new)
                assert_close(output, expected)
                found = rs.materialize(spec, rs.commit(spec, found, num_tokens))
                assert_close(found, rs.materialize(spec, after), 1e-6, "state")
            state = after


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, max_tokens, names",
    [
        ("mamba2", 2, ["float16"]),
        ("gated_delta_net", 1, ["bfloat16", "int8"]),
        ("kda", 2, ["float8_e4m3fn"]),
    ],
)
def test_read_copies_in_the_interpreter(family, max_tokens, names):
    dims = SHAPES[family]
    make = functools.partial(make_spec, family, window=3, max_tokens=max_tokens, **dims)
    with dispatch.interpreted_kernels():
        check_read_copies(make, "mosaic_gpu", names)


@pytest.mark.slow
def test_who_reads_what_in_the_interpreter():
    spec = make_spec("kda", read_dtype="int8", window=4, max_tokens=2, **SHAPES["kda"])
    with dispatch.interpreted_kernels():
        check_who_reads_what(spec, "mosaic_gpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, read_dtype",
    [("mamba2", "int8"), ("gated_delta_net", None), ("kda", "bfloat16"), ("gla", None)],
)
def test_windowed_loops_in_the_interpreter(family, read_dtype):
    spec = make_spec(family, window=2, read_dtype=read_dtype, **SHAPES[family])
    with dispatch.interpreted_kernels():
        check_windowed_loop(spec, "mosaic_gpu")


@pytest.mark.slow
def test_records_that_follow_several_tiles_in_the_interpreter():
    """As a real layer has them: those of row 0 take three places, of row 1 one, of row 2 none."""
    from pallas_kernels import configs
    from pallas_kernels.problem import Mode
    from replayssm_jax import kernels
    from replayssm_jax.flush_switch import stored_of
    from replayssm_jax.mosaic_gpu import problem_of

    dims = dict(num_heads=8, num_groups=1, value_dim=64, key_dim=128)
    dtypes = dict(key_dtype=jnp.bfloat16, value_dtype=jnp.bfloat16)
    spec = make_spec("mamba2", window=24, read_dtype="int8", **dims, **dtypes)
    inputs = random_inputs(spec, 3, 34)
    state = rs.init_state(spec, 3, ragged=True)
    for t in range(33):
        _, state = rs.step(spec, state, tokens(inputs, t, t + 1), implementation="xla")
    length = jnp.array([23, 5, 0], jnp.int32)
    pointer = dataclasses.replace(state.pointer, length=length)
    state = poison_dead_slots(spec, dataclasses.replace(state, pointer=pointer))
    token = tokens(inputs, 33, 34)
    given = stored_of(state), state.buffer, state.pointer, None, token

    @jax.jit
    def read(given):
        run = functools.partial(kernels.step, flush="none", implementation="mosaic_gpu_interpret")
        return run(spec, *given)[0]

    with dispatch.interpreted_kernels(), cut_as_for_large_batches():
        problem, mode = problem_of(spec, 3, 1), Mode(fold=False, interpret=True)
        cut = configs.choose(problem, mode)
        assert problem.records_follow(cut, mode)
        places = [problem.records_after(cut, i) for i in range(4, 8)]
        assert [any(exists for _, exists in place) for place in places] == [True] * 3 + [False]
        found = read(given)
    expected, _ = rs.step(spec, state, token, implementation="xla")
    assert_close(found, expected, 1e-2)  # of bf16 outputs


@pytest.mark.slow
def test_a_row_of_a_read_copy_that_is_not_finite_in_the_interpreter():
    make = functools.partial(make_spec, "gla", **SHAPES["gla"] | dict(num_heads=1, num_groups=1))
    with dispatch.interpreted_kernels():
        check_nan_row(make, "mosaic_gpu", ["int8"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "kda"])
def test_conventional_step_in_the_interpreter(family):
    spec = make_spec(family, **SHAPES[family])
    inputs = random_inputs(spec, 2, 1)
    initial = np.random.default_rng(0).standard_normal(spec.state_shape(2))
    state = jnp.asarray(initial, jnp.float32)
    with dispatch.interpreted_kernels():
        output, state = rs.recurrent_step(spec, state, inputs, implementation="mosaic_gpu")
    expected, expected_state = reference(spec, inputs, initial)
    assert_close(output, expected)
    assert_close(state, expected_state, name="state")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gated_delta_net", "gla"])
def test_evaluation_alone_writes_nothing(family):
    from pallas_kernels import fused_step, replay  # which older versions of jax cannot import

    spec = make_spec(family, window=5, max_tokens=2, **SHAPES[family])
    inputs = random_inputs(spec, 2, 6)
    _, state = rs.prefill(spec, rs.init_state(spec, 2, ragged=True), tokens(inputs, 0, 1))
    for t in range(1, 4):
        _, state = rs.step(spec, state, tokens(inputs, t, t + 1))
    new = tokens(inputs, 4, 6)

    @jax.jit
    def evaluate(state):
        pointer, ring = (
            state.pointer,
            fused_step.Ring(*(getattr(state.buffer, name) for name in fused_step.Ring._fields)),
        )
        flat = state.checkpoint.reshape(2, -1, spec.key_dim)
        refs = jax.tree.map(jax.new_ref, (flat, ring))
        rows = fused_step.Rows(pointer.start, pointer.length, jnp.array([2, 1]), pointer.fresh)
        output = replay.evaluate(
            *refs, rows, (new.q, new.k, new.v, new.g, new.beta), window=5, interpret=True
        )
        return output, (flat, ring), jax.tree.map(jax.freeze, refs)

    with dispatch.interpreted_kernels():
        output, before, after = evaluate(state)
    expected, _ = rs.verify(spec, state, new, jnp.array([2, 1]))
    assert_close(output, expected)
    chex.assert_trees_all_equal(after, before)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "kda"])
def test_snapshots_in_the_interpreter(family):
    with dispatch.interpreted_kernels():
        check_snapshots(make_spec(family, max_tokens=3, **SHAPES[family]), "mosaic_gpu")


def lowered(f, *args, device, axes=()):
    """The text of `f` lowered for a GPU that is not there, or two where a mesh has axes."""
    target = jax.sharding.AbstractDevice(device_kind=device, platform="gpu", num_cores=132)
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.sharding.AbstractMesh((2,) * len(axes), axes, kinds, abstract_device=target)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA B200"])
@pytest.mark.parametrize("layer", LAYERS)
def test_real_layers_lower_and_call_one_kernel(layer, device):
    """Every layer of a loop calls the same function, which holds one kernel."""
    spec = LAYERS[layer]
    state = jax.eval_shape(lambda: rs.init_state(spec, 8, ragged=True))
    one = jax.eval_shape(lambda: random_inputs(spec, 8, 1))

    def three_layers(states, one):
        return [rs.step(spec, state, one) for state in states]

    text = lowered(three_layers, [state] * 3, one, device=device)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert "replay_step" in text


def test_wide_keys_and_a_long_window_have_a_kernel_beside_a_copy():
    """In float32, too: their bf16 terms serve the solve and the fold."""
    from pallas_kernels import configs
    from pallas_kernels.problem import Mode
    from replayssm_jax.mosaic_gpu import problem_of

    dims = dict(num_groups=4, num_heads=8, key_dim=256, value_dim=64, window=64)
    spec = make_spec("gated_delta_net", read_dtype="int8", **dims)
    assert spec.key_dtype == jnp.float32
    for num_tokens, mode in ((1, Mode()), (0, Mode(decides=False))):
        assert configs.why_not(problem_of(spec, 4, num_tokens), mode) is None


@pytest.mark.parametrize("read_dtype", [None, "bfloat16", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 4, 8])
@pytest.mark.parametrize("layer", LAYERS)
def test_cuts_of_real_layers(layer, num_tokens, read_dtype):
    """They fit whatever the batch; at 16 rows all programs run at once where heads share them."""
    from pallas_kernels import configs
    from pallas_kernels.problem import Mode, programs_per_row
    from pallas_kernels.scratch import shared_bytes
    from replayssm_jax.mosaic_gpu import problem_of

    spec = dataclasses.replace(LAYERS[layer], max_tokens=num_tokens, read_dtype=read_dtype)
    shared = "mamba2", "gated_delta_net"
    for batch, mode in itertools.product((1, 16, 256), (Mode(), Mode(fold=False))):
        problem = problem_of(spec, batch, num_tokens)
        cut = configs.choose(problem, mode)
        taken = shared_bytes(problem, cut, mode)
        assert taken <= configs.MOST_SHARED
        assert spec.value_dim * spec.num_heads % cut.num_rows == 0
        if batch == 16 and num_tokens != 4 and read_dtype is None and layer in shared:
            at_once = 132 * min(3, 228 // (taken / 1024 + 1))
            assert configs.FILLED <= 16 * programs_per_row(problem, cut) <= at_once


@pytest.mark.parametrize("window", [16, 32])
@pytest.mark.parametrize("read_dtype", ["bfloat16", "int8"])
def test_records_follow_the_tiles_of_a_real_layer(read_dtype, window):
    """Not beside a fold, which has other arrays there."""
    from pallas_kernels import configs
    from pallas_kernels.problem import Mode
    from replayssm_jax.mosaic_gpu import problem_of

    spec = dataclasses.replace(LAYERS["mamba2"], read_dtype=read_dtype, window=window)
    assert records_follow(spec, 256)
    problem = problem_of(spec, 256, 1)
    assert not problem.records_follow(configs.choose(problem, Mode(fold=False)), Mode())


def test_what_records_follow_is_not_needed_any_more():
    """Every chunk comes once, in order, where tiles were read and no other comes."""
    from pallas_kernels import configs
    from pallas_kernels.problem import TILE, Mode
    from replayssm_jax.mosaic_gpu import problem_of

    mode, found = Mode(fold=False), []
    sizes = [(4, 32, 64), (5, 48, 128), (8, 64, 128), (16, 64, 128), (2, 256, 64), (3, 128, 48)]
    formats = [("bfloat16", "bfloat16"), ("int8", "bfloat16"), ("int8", "float32")]
    for (heads, rows, keys), (read, values), window, family in itertools.product(
        sizes, formats, (1, 5, 8, 13, 16, 31, 48, 64), ("mamba2", "gla")
    ):
        dims = dict(num_heads=heads, num_groups=1, value_dim=rows, key_dim=keys)
        spec = make_spec(family, window=window, read_dtype=read, value_dtype=values, **dims)
        problem = problem_of(spec, 256, 1)
        for widest, copies in itertools.product(configs.configs(problem), range(1, 9)):
            cut = dataclasses.replace(widest, copies=copies)
            if not problem.records_follow(cut, mode):
                continue
            tile, record = TILE * keys * spec.read_dtype.itemsize, problem.record_bytes(cut)
            places, chunks = list(range(copies)), []  # the tile in each, or "free" or "records"
            for i in range(cut.num_tiles):
                assert places[i % copies] == i
                places[i % copies] = "free"
                for first, exists in problem.records_after(cut, i):
                    if exists:
                        chunks.append(first)
                        end = (first + problem.chunk) * record
                        assert end <= copies * tile
                        for place in range(first * record // tile, -(-end // tile)):
                            assert places[place] in ("free", "records")
                            places[place] = "records"
                if i + copies < cut.num_tiles:
                    assert places[i % copies] == "free"
                    places[i % copies] = i + copies
            assert chunks == [*range(0, window, problem.chunk)]
            found.append(cut)
    assert len(found) > 100


@pytest.mark.parametrize("read_dtype, window", [("bfloat16", 13), ("int8", 32)])
def test_steps_whose_records_follow_lower(read_dtype, window):
    spec = dataclasses.replace(LAYERS["mamba2"], read_dtype=read_dtype, window=window)
    assert records_follow(spec, 256)
    state = jax.eval_shape(lambda: rs.init_state(spec, 256))
    inputs = jax.eval_shape(lambda: random_inputs(spec, 256, window))

    def loop(state, inputs):
        turns = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], inputs)
        step = lambda state, token: rs.step(spec, state, token)[::-1]  # noqa: E731
        return rs.scan_steps(step, state, turns, window=window)

    assert "mosaic_gpu" in lowered(loop, state, inputs, device="NVIDIA H200")


@pytest.mark.slow
@pytest.mark.parametrize("family, read_dtype", [("mamba2", None), ("kda", "int8")])
def test_kernels_where_float64_is_the_default(family, read_dtype):
    spec = make_spec(family, window=3, max_tokens=2, read_dtype=read_dtype, **SHAPES[family])
    inputs = random_inputs(spec, 2, 2)

    def outputs():
        state = rs.init_state(spec, 2)
        with dispatch.interpreted_kernels():
            return rs.verify(spec, state, inputs, implementation="mosaic_gpu")

    expected = outputs()
    with jax.enable_x64(True):
        chex.assert_trees_all_equal(outputs(), expected)


def test_two_state_tiles_in_flight_beside_a_copy_are_refused():
    from pallas_kernels import configs
    from pallas_kernels.problem import Config
    from replayssm_jax.mosaic_gpu import problem_of

    spec, cut = LAYERS["kda"], Config(1, 128, 2, 2)
    assert configs.completed(problem_of(spec, 4, 1), cut).stages == 2
    copied = dataclasses.replace(spec, read_dtype="int8")
    with pytest.raises(ValueError, match="stages must be 1 beside a read copy, found 2"):
        configs.completed(problem_of(copied, 4, 1), cut)


@pytest.mark.parametrize(
    "family, name, window, device",
    [
        ("mamba2", "bfloat16", 16, "NVIDIA H200"),
        ("gated_delta_net", "int8", 32, "NVIDIA H200"),  # rows of 48 bytes
        ("kda", "float8_e4m3fn", 16, "NVIDIA B200"),
        ("gla", "float8_e5m2", 16, "NVIDIA B200"),
    ],
)
def test_read_copies_lower(family, name, window, device):
    dims = SHAPES[family]
    spec = make_spec(family, window=window, max_tokens=8, read_dtype=name, **dims)
    state = jax.eval_shape(lambda: rs.init_state(spec, 2, ragged=True))
    inputs = jax.eval_shape(lambda: random_inputs(spec, 2, 8))
    one = jax.eval_shape(lambda: random_inputs(spec, 2, 1))
    for f, args in ((rs.step, (state, one)), (rs.verify, (state, inputs)), (rs.flush, (state,))):
        text = lowered(functools.partial(f, spec), *args, device=device)
        assert text.count("stablehlo.custom_call @mosaic_gpu") == 1, f.__name__


@pytest.mark.parametrize("family", SHAPES)
def test_drafts_flush_and_baseline_lower(family):
    spec = make_spec(family, window=32, max_tokens=8, **SHAPES[family])
    state = jax.eval_shape(lambda: rs.init_state(spec, 2, ragged=True))
    inputs = jax.eval_shape(lambda: random_inputs(spec, 2, 8))
    one = jax.eval_shape(lambda: random_inputs(spec, 2, 1))
    snapshots = jax.eval_shape(lambda: Snapshots.zeros(spec, 2))
    position = jax.ShapeDtypeStruct((2,), jnp.int32)
    device = "NVIDIA H200"
    for f, args in (
        (rs.verify, (state, inputs)),
        (rs.flush, (state,)),
        (rs.recurrent_step, (state.checkpoint, one)),
        (verify_snapshots, (snapshots, inputs, position)),
    ):
        text = lowered(functools.partial(f, spec), *args, device=device)
        assert "mosaic_gpu" in text, f.__name__


def test_what_kernels_do_not_take_falls_back_unless_named():
    spec = make_spec("kda")
    state, inputs = rs.init_state(spec, 2), random_inputs(spec, 2, 1)
    text = lowered(functools.partial(rs.step, spec), state, inputs, device="NVIDIA H200")
    assert "mosaic_gpu" not in text
    with pytest.raises(ValueError, match="key_dim must be a multiple of 16 from 32 to 256"):
        lowered(
            functools.partial(rs.step, spec, implementation="mosaic_gpu"),
            state,
            inputs,
            device="NVIDIA H200",
        )


def test_a_refusal_names_the_least_that_would_do():
    """Of a cut with several tiles, with one of them in flight."""
    from pallas_kernels import configs, problem, scratch  # which older versions cannot import
    from replayssm_jax import mosaic_gpu

    dims = dict(num_heads=4, num_groups=1, value_dim=80, key_dim=256)
    spec = make_spec("mamba2", window=64, max_tokens=16, **dims)
    p, mode, cut = mosaic_gpu.problem_of(spec, 1, 16), problem.Mode(), problem.Config(4, 80, 1)
    assert f"need {scratch.shared_bytes(p, cut, mode)} bytes" in configs.why_not(p, mode)


def test_a_mesh_takes_shard_map():
    """Bare, a kernel on a mesh would gather its operands; under shard_map each device runs it."""
    spec = LAYERS["gated_delta_net"]
    state = jax.eval_shape(lambda: rs.init_state(spec, 8, ragged=True))
    one = jax.eval_shape(lambda: random_inputs(spec, 8, 1))
    step = functools.partial(rs.step, spec)
    rows = jax.sharding.PartitionSpec("rows")
    mapped = jax.shard_map(step, in_specs=rows, out_specs=rows, check_vma=False)
    on_mesh = {"device": "NVIDIA H200", "axes": ("rows",)}
    assert "mosaic_gpu" not in lowered(step, state, one, **on_mesh)
    assert "mosaic_gpu" in lowered(mapped, state, one, **on_mesh)
    with pytest.raises(ValueError, match=r"call it inside jax.shard_map"):
        lowered(functools.partial(step, implementation="mosaic_gpu"), state, one, **on_mesh)


def test_older_gpus_are_refused_by_name():
    spec = LAYERS["kda"]
    state = jax.eval_shape(lambda: rs.init_state(spec, 2))
    one = jax.eval_shape(lambda: random_inputs(spec, 2, 1))
    with pytest.raises(ValueError, match="needs a Hopper or Blackwell GPU, found 'NVIDIA A100"):
        lowered(
            functools.partial(rs.step, spec, implementation="mosaic_gpu"),
            state,
            one,
            device="NVIDIA A100-SXM4-80GB",
        )


@pytest.fixture
def beside_a_gpu(monkeypatch):
    """What decides sees an H200 as the first device of the machine."""
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    platforms = {None: [gpu], "gpu": [gpu], "cpu": jax.devices("cpu")}
    monkeypatch.setattr(jax, "devices", lambda name=None: platforms[name])


def test_a_device_that_is_named_counts(beside_a_gpu):
    """On a machine with a GPU, `jax.default_device` may send what is compiled to the CPU."""
    spec = LAYERS["kda"]
    assert dispatch.resolve(None, spec, 1) == "mosaic_gpu"
    for device in (jax.devices("cpu")[0], "cpu"):
        with jax.default_device(device):
            assert dispatch.resolve(None, spec, 1) == "xla"
            with pytest.raises(ValueError, match="needs an NVIDIA GPU, found platform 'cpu'"):
                dispatch.resolve("mosaic_gpu", spec, 1)


@pytest.mark.skipif(jax.device_count("cpu") < 2, reason="needs two devices")
def test_arrays_that_lie_on_a_mesh_are_seen(beside_a_gpu):
    """Without `jax.set_mesh`, a state is often just put on a mesh."""
    spec = make_spec("kda", value_dim=64, key_dim=32)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("rows",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    state, one = rs.init_state(spec, 2, ragged=True), random_inputs(spec, 2, 1)
    placed = jax.device_put(state, rows)
    by_kernel = {"implementation": "mosaic_gpu"}

    def refused(f, *args):
        with pytest.raises(ValueError, match=r"call it inside jax.shard_map"):
            jax.eval_shape(functools.partial(f, spec, **by_kernel), *args)

    for f in (rs.step, rs.verify):
        refused(f, placed, one)
        refused(f, state, jax.device_put(one, rows))
    refused(rs.flush, placed)
    refused(rs.recurrent_step, placed.checkpoint, one)
    for arrays, chosen in ((state, "mosaic_gpu"), (placed, "xla")):
        assert dispatch.resolve(None, spec, 1, arrays=arrays) == chosen


def test_conventional_kernels_are_not_differentiable():
    spec = dataclasses.replace(LAYERS["kda"], max_tokens=2, read_dtype="int8")
    state = jax.eval_shape(lambda: rs.init_state(spec, 2).checkpoint)
    kept = jax.eval_shape(lambda: Snapshots.zeros(spec, 2))
    one = jax.eval_shape(lambda: random_inputs(spec, 2, 1))

    def step(state, one, implementation=None):
        return rs.recurrent_step(spec, state, one, implementation=implementation)[0].sum()

    def snapshots(kept, one, implementation=None):
        position = jnp.zeros(2, jnp.int32)
        output, _ = verify_snapshots(spec, kept, one, position, implementation=implementation)
        return output.sum()

    for f, held in ((step, state), (snapshots, kept)):
        assert "mosaic_gpu" in lowered(f, held, one, device="NVIDIA H200")
        with pytest.raises(TypeError, match='kernels have no derivative: pass implementation="xla'):
            lowered(jax.grad(f), held, one, device="NVIDIA H200")
        by_xla = jax.grad(functools.partial(f, implementation="xla"))
        assert "mosaic_gpu" not in lowered(by_xla, held, one, device="NVIDIA H200")
