"""What the public API refuses, the words it uses, and what traced values do instead."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from oracle import make_spec, random_inputs, tokens

import replayssm_jax as rs
from replayssm_jax.arguments import as_int32, concrete

SPEC = make_spec("mamba2", window=5, max_tokens=3)
CHANNEL_SPEC = make_spec("gla", window=5, max_tokens=3)
ROWS = 3


def cases(table):
    """Parameters with the first column as their ids."""
    return [pytest.param(*values, id=name) for name, *values in table]


def ints(values, dtype=np.int32):
    return np.asarray(values, dtype)


def bools(*values):
    return np.asarray(values, bool)


@functools.cache
def setting():
    """What the cases work on: states with two drafts pending, and tokens."""
    inputs = jax.tree.map(np.asarray, random_inputs(SPEC, ROWS, 4))
    scalar = rs.init_state(SPEC, ROWS)
    ragged = rs.init_state(SPEC, ROWS, ragged=True)
    drafted = rs.verify(SPEC, scalar, tokens(inputs, 0, 2))[1]
    return {
        "scalar": drafted,
        "committed": rs.commit(SPEC, drafted, 2),
        "ragged": rs.verify(SPEC, ragged, tokens(inputs, 0, 2))[1],
        "one": tokens(inputs, 0, 1),
        "three": tokens(inputs, 0, 3),
        "four": inputs,
        "recurrent": np.zeros(SPEC.state_shape(ROWS), np.float32),
    }


class Setting(dict):
    """A setting whose entries are attributes."""

    __getattr__ = dict.__getitem__


def refuses(call, exception, match, *, traced):
    """The call raises, eagerly and in a trace, and changes nothing.

    Static facts (`traced`) raise on traced states, values where a trace closes over what it knows.
    """
    before = jax.tree.map(np.array, setting())
    with pytest.raises(exception, match=match):
        call(Setting(setting()))
    with pytest.raises(exception, match=match):
        if traced:
            jax.eval_shape(lambda s: call(Setting(s)), setting())
        else:
            jax.eval_shape(lambda: call(Setting(setting())))
    jax.tree.map(np.testing.assert_array_equal, setting(), before)


# Specs


@pytest.mark.parametrize(
    "field", ["num_heads", "num_groups", "value_dim", "key_dim", "window", "max_tokens"]
)
@pytest.mark.parametrize(
    "value, exception, match",
    [
        (0, ValueError, "must be at least 1, found 0"),
        (-2, ValueError, "must be at least 1, found -2"),
        (2.0, TypeError, "must be an int, found 2.0"),
        (True, TypeError, "must be an int, found True"),
        (None, TypeError, "must be an int, found None"),
        ("4", TypeError, "must be an int, found '4'"),
    ],
)
def test_sizes_of_a_spec(field, value, exception, match):
    with pytest.raises(exception, match=f"{field} {match}"):
        make_spec("mamba2", **{field: value})


@pytest.mark.parametrize(
    "fields, exception, match",
    cases(
        [
            (
                "groups that do not divide heads",
                {"num_groups": 3},
                ValueError,
                "num_groups must divide num_heads, found num_groups=3 and num_heads=4",
            ),
            (
                "more groups than heads",
                {"num_groups": 8},
                ValueError,
                "num_groups must divide num_heads, found num_groups=8 and num_heads=4",
            ),
            (
                "max_tokens above window",
                {"window": 5, "max_tokens": 6},
                ValueError,
                "max_tokens must be at most window, found max_tokens=6 and window=5",
            ),
            ("rule", {"rule": "gated"}, ValueError, "rule must be one of .*'delta'.*found 'gated'"),
            (
                "decay",
                {"decay": "vector"},
                ValueError,
                "decay must be one of .*'channel'.*found 'vector'",
            ),
            (
                "precision",
                {"precision": "fp32"},
                ValueError,
                "precision must be one of .*'highest'.*found 'fp32'",
            ),
            (
                "integer keys",
                {"key_dtype": jnp.int8},
                TypeError,
                "key_dtype must be a floating dtype, found int8",
            ),
            (
                "integer values",
                {"value_dtype": "int32"},
                TypeError,
                "value_dtype must be a floating dtype, found int32",
            ),
            *(
                (f"{field} {no}", {field: no}, TypeError, f"{field} must .*dtype.*, found {no!r}")
                for field in ("key_dtype", "value_dtype", "state_dtype")
                for no in (None, "nope")
            ),
            (
                "boolean state",
                {"state_dtype": bool},
                ValueError,
                "state_dtype must be one of float32, .*found bool",
            ),
            (
                "an integer state",
                {"state_dtype": jnp.int16},
                ValueError,
                "state_dtype must be one of float32, float64, .*int8, found int16",
            ),
            (
                "a read copy in the checkpoint's own dtype",
                {"read_dtype": jnp.float32},
                ValueError,
                "read_dtype must be one of bfloat16, .*int8, found float32",
            ),
        ]
    ),
)
def test_choices_of_a_spec(fields, exception, match):
    with pytest.raises(exception, match=match):
        make_spec("mamba2", **fields)


def test_family_constructors_check_as_well():
    with pytest.raises(ValueError, match="num_groups=3 and num_heads=4"):
        rs.ReplaySpec.mamba2(num_heads=4, head_dim=8, state_dim=8, num_groups=3)
    with pytest.raises(ValueError, match="num_groups=3 and num_heads=4"):
        rs.ReplaySpec.gated_delta_net(num_value_heads=4, num_key_heads=3, key_dim=8, value_dim=8)
    with pytest.raises(ValueError, match="window must be at least 1, found 0"):
        rs.ReplaySpec.kda(num_heads=4, key_dim=8, value_dim=8, window=0)
    with pytest.raises(TypeError, match="positional"):
        rs.ReplaySpec(4, 2, 8, 8, "delta", "scalar")


# Inputs


CALLS = {
    "step": lambda s, spec, inputs: rs.step(spec, s.ragged, inputs),
    "verify": lambda s, spec, inputs: rs.verify(spec, s.ragged, inputs),
    "prefill": lambda s, spec, inputs: rs.prefill(spec, s.ragged, inputs),
    "recurrent_step": lambda s, spec, inputs: rs.recurrent_step(spec, s.recurrent, inputs),
    "recurrent_scan": lambda s, spec, inputs: rs.recurrent_scan(spec, s.recurrent, inputs),
}


def replaced(inputs, **changes):
    return dataclasses.replace(
        inputs, **{name: change(getattr(inputs, name)) for name, change in changes.items()}
    )


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "change, exception, match",
    cases(
        [
            (
                "a tuple",
                lambda x: (x.q, x.k, x.v, x.g, x.beta),
                TypeError,
                "inputs must be TokenInputs, found tuple",
            ),
            (
                "no time axis",
                lambda x: jax.tree.map(lambda a: a[:, 0], x),
                ValueError,
                r"v must have shape \[B, T, H, P\], found \(3, 4, 12\): add .*x\[:, None\]",
            ),
            (
                "no batch axis",
                lambda x: jax.tree.map(lambda a: a[0, 0], x),
                ValueError,
                r"v must have shape \[B, T, H, P\], found \(4, 12\)",
            ),
            (
                "another batch size",
                lambda x: jax.tree.map(lambda a: a[:2], x),
                ValueError,
                r"v must have shape \(3, 1, 4, 12\), found \(2, 1, 4, 12\)",
            ),
            (
                "value dim",
                lambda x: replaced(x, v=lambda a: a[..., :11]),
                ValueError,
                r"v must have shape \(3, 1, 4, 12\), found \(3, 1, 4, 11\)",
            ),
            (
                "no beta",
                lambda x: dataclasses.replace(x, beta=None),
                TypeError,
                "beta must be an array, found None",
            ),
            (
                "values in a list",
                lambda x: dataclasses.replace(x, v=np.zeros(x.v.shape).tolist()),
                TypeError,
                "v must be an array, found list",
            ),
            (
                "queries of every head",
                lambda x: replaced(x, q=lambda a: a.repeat(2, axis=2)),
                ValueError,
                r"q must have shape \(3, 1, 2, 10\), found \(3, 1, 4, 10\)",
            ),
            (
                "key dim",
                lambda x: replaced(x, k=lambda a: a[..., :9]),
                ValueError,
                r"k must have shape \(3, 1, 2, 10\), found \(3, 1, 2, 9\)",
            ),
            (
                "decay per channel",
                lambda x: replaced(x, g=lambda a: a[..., None].repeat(10, axis=3)),
                ValueError,
                r"g must have shape \(3, 1, 4\), found \(3, 1, 4, 10\)",
            ),
            (
                "beta per group",
                lambda x: replaced(x, beta=lambda a: a[..., :2]),
                ValueError,
                r"beta must have shape \(3, 1, 4\), found \(3, 1, 2\)",
            ),
            (
                "keys of two tokens",
                lambda x: replaced(x, k=lambda a: a.repeat(2, axis=1)),
                ValueError,
                r"k must have shape \(3, 1, 2, 10\), found \(3, 2, 2, 10\)",
            ),
            *(
                (
                    f"{name} in bf16",
                    lambda x, name=name: replaced(x, **{name: lambda a: a.astype(jnp.bfloat16)}),
                    TypeError,
                    f"{name} must be float32, found bfloat16: {fix}",
                )
                for name, fix in {
                    "q": r"pass q.astype\(jnp.float32\) or .* key_dtype=jnp.bfloat16",
                    "k": r"pass k.astype\(jnp.float32\) or .* key_dtype=jnp.bfloat16",
                    "v": r"pass v.astype\(jnp.float32\) or .* value_dtype=jnp.bfloat16",
                    "g": r"compute gates in float32 and pass them so, e.g. g.astype\(jnp.float32\)",
                    "beta": r"compute gates in float32 .* beta.astype\(jnp.float32\)",
                }.items()
            ),
        ]
    ),
)
def test_inputs(call, change, exception, match):
    refuses(lambda s: CALLS[call](s, SPEC, change(s.one)), exception, match, traced=True)


def test_inputs_of_a_decay_per_channel():
    match = r"g must have shape \(3, 1, 4, 10\), found \(3, 1, 4\)"
    state = rs.init_state(CHANNEL_SPEC, ROWS)
    refuses(lambda s: rs.step(CHANNEL_SPEC, state, s.one), ValueError, match, traced=True)


@pytest.mark.parametrize(
    "call, inputs, match",
    cases(
        [
            ("step", "step", "three", "T must be between 1 and 1, found T=3: several .*verify"),
            ("verify", "verify", "four", "T must be between 1 and 3, found T=4: .*prefill"),
            ("recurrent_step", "recurrent_step", "four", "T must be between 1 and 1, found T=4"),
        ]
    ),
)
def test_too_many_tokens(call, inputs, match):
    refuses(lambda s: CALLS[call](s, SPEC, s[inputs]), ValueError, match, traced=True)


@pytest.mark.parametrize("call", ["step", "verify", "recurrent_step"])
def test_no_tokens(call):
    refuses(
        lambda s: CALLS[call](s, SPEC, jax.tree.map(lambda a: a[:, :0], s.one)),
        ValueError,
        r"T must be between 1 and [13], found T=0(?!:)",
        traced=True,
    )


def test_no_tokens_is_a_prefill():
    s = Setting(setting())
    output, state = rs.prefill(SPEC, s.ragged, jax.tree.map(lambda a: a[:, :0], s.one))
    assert output.shape == (ROWS, 0, 4, 12)
    jax.tree.map(np.testing.assert_array_equal, state, s.ragged)


def test_no_tokens_fold_rows_that_move_together():
    """What the drafts of a scalar pointer are to any other prefill: dropped."""
    s = Setting(setting())
    state = rs.commit(SPEC, s.scalar, 1)
    _, state = rs.verify(SPEC, state, s.one)
    output, after = rs.prefill(SPEC, state, jax.tree.map(lambda a: a[:, :0], s.one))
    assert output.shape == (ROWS, 0, 4, 12)
    assert (after.pointer.length, after.pointer.pending) == (0, 0)
    np.testing.assert_array_equal(after.checkpoint, rs.materialize(SPEC, state))


def raw(family):
    """A constructor's arguments, of as many heads as key channels."""
    wide, narrow = np.ones((1, 3, 4, 4), np.float32), np.ones((1, 3, 4), np.float32)
    arguments = {"A_log": np.zeros(4, np.float32)}
    if family == "mamba2":
        return arguments | {"x": wide, "dt": narrow, "B": wide, "C": wide}
    arguments |= {"q": wide, "k": wide, "v": wide, "b": narrow}
    return arguments | {"a": wide if family == "kda" else narrow}


RAW_FAMILIES = ["mamba2", "gated_delta_net", "kda"]


@pytest.mark.parametrize("family", RAW_FAMILIES)
@pytest.mark.parametrize("wrong", [None, [0.0, 0.0]])
def test_raw_activations_are_arrays(family, wrong):
    constructor, arguments = getattr(rs.TokenInputs, family), raw(family)
    constructor(**arguments)
    for name in arguments:
        with pytest.raises(TypeError, match=f"^{name} must be an array, found (None|list)$"):
            constructor(**{**arguments, name: wrong})
    if wrong:
        with pytest.raises(TypeError, match="dt_bias must be an array, found list"):
            constructor(**arguments, dt_bias=wrong)


@pytest.mark.parametrize("family", RAW_FAMILIES)
def test_shapes_and_dtypes_of_raw_activations(family):
    constructor = getattr(rs.TokenInputs, family)
    bias = (4, 4) if family == "kda" else (4,)
    arguments = raw(family) | {"dt_bias": np.zeros(bias, np.float32)}
    constructor(**arguments)
    for name, array in arguments.items():
        with pytest.raises(TypeError, match=f"^{name} must be of a floating dtype, found int32$"):
            constructor(**arguments | {name: array.astype(np.int32)})
        with pytest.raises(TypeError, match=f"^{name} .* found float64 without jax_enable_x64"):
            constructor(**arguments | {name: array.astype(np.float64)})
        for wrong in (array[..., None], array[..., 0]):
            found = ", ".join(map(str, wrong.shape))
            with pytest.raises(
                ValueError, match=rf"^{name} must have shape .*, found \({found},?\)($|: add the)"
            ):
                constructor(**arguments | {name: wrong})
    for name, shape, wanted in (
        ("A_log", (3, 1), r"\[H=4\]"),
        ("A_log", (), r"\[H=4\]"),
        ("A_log", (16,), r"\[H=4\]"),
        ("dt_bias", (16,), r"\[H=4, N=4\]" if family == "kda" else r"\[H=4\]"),
        ("dt_bias", (4,) if family == "kda" else (4, 4), r"\[H=4(, N=4)?\]"),
    ):
        with pytest.raises(ValueError, match=f"{name} must have shape {wanted}, found"):
            constructor(**arguments | {name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize("limits", [(1.0, 0.1), (0.0, np.nan), (-2.0, -1.0), (0.0,)])
def test_the_limits_of_mamba2(limits):
    with pytest.raises(ValueError, match=r"dt_limits must be \(lower, upper\), .*, found \("):
        rs.TokenInputs.mamba2(**raw("mamba2"), dt_limits=limits)


def test_gates_as_wide_as_a_parameter_name_it():
    spec = make_spec("gated_delta_net")
    with jax.enable_x64(True):
        x = random_inputs(spec, 1, 1)
        inputs = rs.TokenInputs.gated_delta_net(x.q, x.k, x.v, x.g, x.beta, A_log=jnp.zeros(4))
        with pytest.raises(TypeError, match=r"g must be float32, found float64: .*A_log.*float32"):
            rs.step(spec, rs.init_state(spec, 1), inputs)


@pytest.mark.parametrize("field", ["state_dtype", "key_dtype", "value_dtype"])
def test_float64_needs_x64(field):
    spec = dataclasses.replace(SPEC, **{field: jnp.float64})
    match = f"{field}=float64 needs jax_enable_x64, found it off"
    for call in (
        lambda s: rs.init_state(spec, ROWS),
        lambda s: rs.step(spec, s.ragged, s.one),
        lambda s: rs.recurrent_scan(spec, s.recurrent, s.one),
    ):
        refuses(call, ValueError, match, traced=True)
    with jax.enable_x64(True):
        rs.init_state(spec, ROWS)


@pytest.mark.parametrize(
    "lower_bound, error, match",
    [
        (0.0, ValueError, "must be negative and finite, found 0.0"),
        (5, ValueError, "must be negative and finite, found 5.0"),
        (-np.inf, ValueError, "must be negative and finite, found -inf"),
        ("-5", TypeError, "must be a number, found '-5'"),
    ],
)
def test_the_lower_bound_of_kda(lower_bound, error, match):
    x = jnp.ones((1, 1, 2, 4))
    with pytest.raises(error, match=f"lower_bound {match}"):
        rs.TokenInputs.kda(x, x, x, x, jnp.ones((1, 1, 2)), jnp.zeros(2), lower_bound=lower_bound)


# States


@pytest.mark.parametrize(
    "arguments, exception, match",
    cases(
        [
            *(
                (f"batch size {size}", (size,), exception, f"batch_size must .* found {size}")
                for sizes, exception in (((0, -1), ValueError), ((2.0, True, None), TypeError))
                for size in sizes
            ),
            (
                "no layout",
                (2, np.zeros(SPEC.state_shape(2), np.float32)),
                ValueError,
                'layout="vk" .* or layout="kv" .* found layout=None and initial=an array',
            ),
            (
                "no initial",
                (2, None, "vk"),
                ValueError,
                "together with initial, found layout='vk' and initial=None",
            ),
            (
                "unknown layout",
                (2, np.zeros(SPEC.state_shape(2), np.float32), "nv"),
                ValueError,
                'layout must be "vk" or "kv", found \'nv\'',
            ),
            (
                "initial in bf16",
                (2, np.zeros(SPEC.state_shape(2), jnp.bfloat16), "vk"),
                TypeError,
                r"initial must be float32, found bfloat16: pass initial.astype\(jnp.float32\)",
            ),
            (
                "initial in float64",
                (2, np.zeros(SPEC.state_shape(2)), "vk"),
                TypeError,
                r"initial must be float32, found float64: pass initial.astype\(jnp.float32\)",
            ),
            (
                "initial in a list",
                (2, np.zeros(SPEC.state_shape(2)).tolist(), "vk"),
                TypeError,
                "initial must be an array, found list",
            ),
            ("ragged", (2, None, None, "no"), TypeError, "ragged must be a bool, found 'no'"),
            (
                "kv for vk",
                (2, np.zeros((2, 4, 10, 12), np.float32), "vk"),
                ValueError,
                r"shape \(2, 4, 12, 10\) with layout=\"vk\", found \(2, 4, 10, 12\)",
            ),
            (
                "vk for kv",
                (2, np.zeros((2, 4, 12, 10), np.float32), "kv"),
                ValueError,
                r"shape \(2, 4, 10, 12\) with layout=\"kv\", found \(2, 4, 12, 10\)",
            ),
            (
                "another batch",
                (3, np.zeros((2, 4, 12, 10), np.float32), "vk"),
                ValueError,
                r"shape \(3, 4, 12, 10\) .*found \(2, 4, 12, 10\)",
            ),
        ]
    ),
)
def test_init_state(arguments, exception, match):
    keywords = dict(zip(("initial", "layout", "ragged"), arguments[1:], strict=False))
    with pytest.raises(exception, match=match):
        rs.init_state(SPEC, arguments[0], **keywords)


RECURRENT = (rs.recurrent_step, rs.recurrent_scan)
STATE_CALLS = {
    "step": lambda spec, state, s: rs.step(spec, state, s.one),
    "verify": lambda spec, state, s: rs.verify(spec, state, s.three),
    "prefill": lambda spec, state, s: rs.prefill(spec, state, s.four),
    "commit": lambda spec, state, s: rs.commit(spec, state, 0),
    "flush": lambda spec, state, s: rs.flush(spec, state),
    "materialize": lambda spec, state, s: rs.materialize(spec, state),
    "reset": lambda spec, state, s: rs.reset(spec, state, bools(1, 0, 0)),
    "insert": lambda spec, state, s: rs.insert(spec, state, ints([0, 1, 2]), s.ragged),
    "insert of": lambda spec, state, s: rs.insert(spec, s.ragged, ints([0, 1, 2]), state),
    "take": lambda spec, state, s: rs.take(spec, state, ints([0])),
}


def with_pointer(state, **fields):
    return dataclasses.replace(state, pointer=dataclasses.replace(state.pointer, **fields))


@pytest.mark.parametrize("call", STATE_CALLS)
@pytest.mark.parametrize(
    "change, exception, match",
    cases(
        [
            (
                "an array",
                lambda state: state.checkpoint,
                TypeError,
                "state must be a ReplayState, found ",
            ),
            (
                "no batch axis",
                lambda state: jax.tree.map(lambda x: x[0], state),
                ValueError,
                r"of the state must have shape \('B', 4, 12, 10\), found \(4, 12, 10\): .*vmap",
            ),
            (
                "another number of heads",
                lambda state: dataclasses.replace(state, checkpoint=state.checkpoint[:, :2]),
                ValueError,
                r"checkpoint of the state must have shape \(3, 4, 12, 10\), found \(3, 2, 12, 10\)",
            ),
            (
                "a checkpoint in bf16",
                lambda state: dataclasses.replace(
                    state, checkpoint=state.checkpoint.astype(jnp.bfloat16)
                ),
                TypeError,
                "checkpoint of the state must be float32, found bfloat16",
            ),
            (
                "another window",
                lambda state: rs.init_state(
                    dataclasses.replace(SPEC, window=16), ROWS, ragged=True
                ),
                ValueError,
                r"log_decay of the state must have shape \(3, 16, 4\), found \(3, 24, 4\)",
            ),
            (
                "another rule",
                lambda state: rs.init_state(
                    dataclasses.replace(SPEC, rule="delta"), ROWS, ragged=True
                ),
                ValueError,
                "value of the state must be present for rule='additive': .*another spec",
            ),
            (
                "another decay",
                lambda state: rs.init_state(CHANNEL_SPEC, ROWS, ragged=True),
                ValueError,
                r"log_decay of the state must have shape \(3, 16, 4\), found \(3, 16, 4, 10\)",
            ),
            (
                "other record dtypes",
                lambda state: rs.init_state(
                    dataclasses.replace(SPEC, key_dtype=jnp.bfloat16), ROWS, ragged=True
                ),
                TypeError,
                "key of the state must be float32, found bfloat16",
            ),
            (
                "a pointer of two rows",
                lambda state: with_pointer(state, length=state.pointer.length[:2]),
                ValueError,
                r"length of the state must have shape \(3,\), found \(2,\)",
            ),
            (
                "a float pointer",
                lambda state: with_pointer(state, start=state.pointer.start.astype(np.float32)),
                TypeError,
                "start of the state must be int32, found float32",
            ),
        ]
    ),
)
def test_states(call, change, exception, match):
    if call == "insert of":
        match = match.replace("of the state", "of other").replace("state must", "other must")
    refuses(lambda s: STATE_CALLS[call](SPEC, change(s.ragged), s), exception, match, traced=True)


def test_what_is_no_spec():
    calls = [lambda s, call=call: call(None, s.ragged, s) for call in STATE_CALLS.values()]
    calls += [lambda s, f=f: f(None, s.recurrent, s.one) for f in RECURRENT]
    for call in (*calls, lambda s: rs.init_state(None, ROWS)):
        refuses(call, TypeError, "^spec must be a ReplaySpec, found NoneType", traced=True)


def test_the_state_of_a_delta_rule_where_values_are_kept():
    delta = dataclasses.replace(SPEC, rule="delta")
    match = "value of the state must be absent for rule='delta'"
    refuses(lambda s: rs.step(delta, s.ragged, s.one), ValueError, match, traced=True)


@pytest.mark.parametrize(
    "change, exception, match",
    cases(
        [
            (
                "kv",
                lambda x: x.swapaxes(2, 3),
                ValueError,
                r"recurrent state must have shape \('B', 4, 12, 10\), found \(3, 4, 10, 12\)",
            ),
            (
                "no batch axis",
                lambda x: x[0],
                ValueError,
                r"recurrent state must have shape \('B', 4, 12, 10\), found \(4, 12, 10\)",
            ),
            (
                "bf16",
                lambda x: x.astype(jnp.bfloat16),
                TypeError,
                "recurrent state must be float32, found bfloat16",
            ),
            (
                "a ReplayState",
                lambda x: setting()["scalar"],
                TypeError,
                r"recurrent state must be an array, found ReplayState: .*rs.materialize\(",
            ),
            ("none", lambda x: None, TypeError, "recurrent state must be an array, found None"),
        ]
    ),
)
@pytest.mark.parametrize("function", RECURRENT)
def test_recurrent_states(function, change, exception, match):
    refuses(lambda s: function(SPEC, change(s.recurrent), s.one), exception, match, traced=True)


# Arguments


@pytest.mark.parametrize(
    "call, match",
    cases(
        [
            ("verify", lambda s: rs.verify(SPEC, s.scalar, s.one, ints([1, 1, 0])), "lengths"),
            ("prefill", lambda s: rs.prefill(SPEC, s.scalar, s.four, ints([4, 1, 0])), "lengths"),
            ("commit", lambda s: rs.commit(SPEC, s.scalar, ints([1, 1, 0])), "accepted of shape"),
            ("flush", lambda s: rs.flush(SPEC, s.scalar, bools(1, 0, 0)), "where"),
            ("reset", lambda s: rs.reset(SPEC, s.scalar, bools(1, 0, 0)), "reset"),
            ("insert", lambda s: rs.insert(SPEC, s.scalar, ints([0, 1, 2]), s.ragged), "insert"),
        ]
    ),
)
def test_rows_of_a_scalar_pointer(call, match):
    """What needs a pointer for every row says so, and how to get one."""
    match = rf"{match}.* needs a pointer for every row, found a scalar .*ragged=True"
    refuses(call, ValueError, match, traced=True)


ARGUMENTS = {
    "lengths of verify": lambda s, x: rs.verify(SPEC, s.ragged, s.three, x),
    "lengths of prefill": lambda s, x: rs.prefill(SPEC, s.ragged, s.four, x),
    "accepted": lambda s, x: rs.commit(SPEC, s.ragged, x),
    "where of flush": lambda s, x: rs.flush(SPEC, s.ragged, x),
    "where of reset": lambda s, x: rs.reset(SPEC, s.ragged, x),
    "slots": lambda s, x: rs.insert(SPEC, s.ragged, x, s.ragged),
    "valid": lambda s, x: rs.prefill(SPEC, s.ragged, s.four, valid=x),
    "resets": lambda s, x: rs.prefill(SPEC, s.ragged, s.four, resets=x),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_shapes_of_arguments(argument):
    name = argument.split()[0]
    grid = name in ("valid", "resets")
    kind = bool if name in ("where", "valid", "resets") else np.int32
    wrong = np.ones((ROWS, 3) if grid else (ROWS + 1,), kind)
    expected = (ROWS, 4) if grid else (ROWS,)
    found = ",? ?".join(map(str, wrong.shape))
    match = rf"{name} must have shape \({', '.join(map(str, expected))},?\), found \({found},?\)"
    refuses(lambda s: ARGUMENTS[argument](s, wrong), ValueError, match, traced=True)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_dtypes_of_arguments(argument):
    name = argument.split()[0]
    shape = (ROWS, 4) if name in ("valid", "resets") else (ROWS,)
    kind, wrong = ("bool", np.int32) if name in ("where", "valid", "resets") else ("integer", bool)
    for dtype in (wrong, np.float32):
        match = f"{name} must be (an )?{kind}, found {np.dtype(dtype).name}"
        arrays = np.ones(shape, dtype)
        refuses(lambda s, a=arrays: ARGUMENTS[argument](s, a), TypeError, match, traced=True)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_what_is_no_array(argument):
    name = argument.split()[0]
    kind = "bool" if name in ("where", "valid", "resets") else "integer"
    optional = name in ("lengths", "valid", "resets") or argument == "where of flush"
    for wrong in ("two", [None] * ROWS, [[0], [0, 1]], 1j, {}, *[None] * (not optional)):
        match = f"{name} must be {kind}, found {re.escape(repr(wrong))}"
        refuses(lambda s, x=wrong: ARGUMENTS[argument](s, x), TypeError, match, traced=True)


@pytest.mark.parametrize(
    "argument", [a for a in ARGUMENTS if a.split()[0] in ("lengths", "accepted", "slots")]
)
def test_integers_do_not_wrap_around(argument):
    """2**32 + 1 would be 1 in int32."""
    match = f"{argument.split()[0]} must fit in int32, found .*4294967297"
    for array in (np.full(ROWS, 2**32 + 1), [2**32 + 1] * ROWS):
        refuses(lambda s, a=array: ARGUMENTS[argument](s, a), ValueError, match, traced=True)


@pytest.mark.parametrize(
    "call, exception, match",
    cases(
        [
            (
                "lengths and valid",
                lambda s: rs.prefill(
                    SPEC, s.ragged, s.four, ints([1, 2, 3]), valid=np.ones((ROWS, 4), bool)
                ),
                ValueError,
                "give lengths or valid, found both",
            ),
            (
                "chunk_size",
                lambda s: rs.prefill(SPEC, s.ragged, s.four, chunk_size=0),
                ValueError,
                "chunk_size must be at least 1, found 0",
            ),
            *(
                (
                    f"chunk_size {size!r}",
                    lambda s, size=size: rs.prefill(SPEC, s.ragged, s.four, chunk_size=size),
                    TypeError,
                    "chunk_size must be an int, found ",
                )
                for size in (2.5, True, jnp.int32(4))
            ),
            (
                "a float number of drafts",
                lambda s: rs.commit(SPEC, s.scalar, 1.0),
                TypeError,
                "accepted must be integer, found float64",
            ),
            (
                "a boolean number of drafts",
                lambda s: rs.commit(SPEC, s.ragged, True),
                TypeError,
                "accepted must be integer, found bool",
            ),
            (
                "no number of drafts",
                lambda s: rs.commit(SPEC, s.ragged, None),
                TypeError,
                "accepted must be integer, found None",
            ),
            (
                "no mask",
                lambda s: rs.reset(SPEC, s.ragged, None),
                TypeError,
                "where must be bool, found None",
            ),
            (
                "a matrix of rows",
                lambda s: rs.take(SPEC, s.ragged, ints([[0, 1]])),
                ValueError,
                r"rows must have shape \(B',\) with B' >= 1, found \(1, 2\)",
            ),
            (
                "one row without an axis",
                lambda s: rs.take(SPEC, s.ragged, 0),
                ValueError,
                r"rows must have shape \(B',\) with B' >= 1, found \(\)",
            ),
            (
                "no rows",
                lambda s: rs.take(SPEC, s.ragged, ints([])),
                ValueError,
                r"rows must have shape \(B',\) with B' >= 1, found \(0,\)",
            ),
            (
                "rows as a mask",
                lambda s: rs.take(SPEC, s.ragged, bools(1, 0, 1)),
                TypeError,
                "rows must be integer, found bool",
            ),
            (
                "slots for other rows",
                lambda s: rs.insert(SPEC, s.ragged, ints([0, 1]), s.ragged),
                ValueError,
                r"slots must have shape \(3,\), found \(2,\)",
            ),
            (
                "layout",
                lambda s: rs.materialize(SPEC, s.ragged, layout="pn"),
                ValueError,
                'layout must be "vk" or "kv", found \'pn\'',
            ),
        ]
    ),
)
def test_arguments(call, exception, match):
    refuses(call, exception, match, traced=True)


@pytest.mark.parametrize(
    "name, match",
    [
        ("mosaic_gpu", "implementation='mosaic_gpu' cannot run: it needs (an NVIDIA|jax 0.11.2)"),
        ("triton", "implementation='triton' cannot run: it needs (an NVIDIA|jax 0.11.2)"),
        ("cuda", "implementation must be None or one of .*'xla'.*found 'cuda'"),
    ],
)
@pytest.mark.parametrize("function", ["step", "verify", "flush"])
def test_implementations(function, name, match):
    arguments = () if function == "flush" else ("one",)
    refuses(
        lambda s: getattr(rs, function)(
            SPEC, s.ragged, *(s[a] for a in arguments), implementation=name
        ),
        ValueError,
        match,
        traced=True,
    )


def test_decoding_is_not_differentiable():
    s = Setting(setting())
    for function in (rs.step, rs.verify):

        def loss(v, function=function):
            inputs = dataclasses.replace(s.one, v=v)
            return function(SPEC, s.ragged, inputs)[0].sum()

        with pytest.raises(TypeError, match="not differentiable; train through prefill"):
            jax.grad(loss)(s.one.v)
    for where in (None, bools(1, 0, 0)):

        def folded(checkpoint, where=where):
            state = dataclasses.replace(s.ragged, checkpoint=checkpoint)
            return rs.flush(SPEC, state, where).checkpoint.sum()

        with pytest.raises(TypeError, match="not differentiable; train through prefill"):
            jax.grad(folded)(s.ragged.checkpoint)


# Loops


def step_once(state, inputs):
    output, state = rs.step(SPEC, state, jax.tree.map(lambda x: x[:, None], inputs))
    return state, output


def steps(s, state="scalar", **keywords):
    xs = jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), 1, 0), s.four)
    return rs.scan_steps(step_once, s[state], xs, **{"window": 5, **keywords})


@pytest.mark.parametrize(
    "call, exception, match",
    cases(
        [
            (
                "scan without a state",
                lambda s: rs.scan_steps(lambda c, x: (c, x), jnp.zeros(()), None, 3),
                ValueError,
                "found no ReplayState in the carry",
            ),
            (
                "while without a state",
                lambda s: rs.while_loop(lambda c: c < 3, lambda c: c + 1, 0),
                ValueError,
                "found no ReplayState in the carry",
            ),
            (
                "scan window 0",
                lambda s: steps(s, window=0),
                ValueError,
                "window must be at least 1, found 0",
            ),
            (
                "while window 0",
                lambda s: rs.while_loop(lambda c: True, lambda c: c, s.scalar, window=0),
                ValueError,
                "window must be at least 1, found 0",
            ),
            (
                "window above that of the spec",
                lambda s: steps(s, window=6),
                ValueError,
                "a loop with window=6 .*window=5: pass window=5 to the loop",
            ),
            (
                "window left at its default",
                lambda s: rs.while_loop(
                    lambda c: True,
                    lambda c: rs.step(SPEC, c, s.one)[1],
                    s.scalar,
                ),
                ValueError,
                "a loop with window=16 .*window=5: pass window=5 to the loop",
            ),
            (
                "two lengths",
                lambda s: steps(s, length=3),
                ValueError,
                "must give one number of steps, found .*3.*4",
            ),
            (
                "a body that returns its state alone",
                lambda s: rs.scan_steps(
                    lambda c, x: rs.step(SPEC, c, s.one)[1], s.scalar, length=3, window=5
                ),
                TypeError,
                r"f must return \(carry, y\), found ReplayState",
            ),
            (
                "a body that returns three",
                lambda s: rs.scan_steps(lambda c, x: (c, x, x), s.scalar, length=3, window=5),
                TypeError,
                r"f must return \(carry, y\), found tuple of 3",
            ),
            (
                "a body that forgets y beside a carry of two",
                lambda s: rs.scan_steps(lambda c, x: c, (s.scalar, 0), length=3, window=5),
                TypeError,
                r"f must return .* its own, found one without \[0\].checkpoint,.* and more",
            ),
            (
                "a body that adds to its carry",
                lambda s: rs.scan_steps(
                    lambda c, x: (c | {"n": 0}, None), {"s": s.scalar}, length=3, window=5
                ),
                TypeError,
                r"f must return a carry like its own, found one with \['n'\]",
            ),
            (
                "a body that returns a list for a tuple",
                lambda s: rs.scan_steps(lambda c, x: ([*c], x), (s.scalar, 0), length=3, window=5),
                TypeError,
                "f must return a carry like its own: PyTreeDef.*, found PyTreeDef",
            ),
            (
                "a carry of another shape, in less than a window",
                lambda s: rs.scan_steps(
                    lambda c, x: ((c[0], c[1][:1]), x), (s.scalar, jnp.zeros(3)), length=3, window=5
                ),
                TypeError,
                r"f must return a carry like its own at \[1\]: \(3,\), found \(1,\)",
            ),
            (
                "a carry of another dtype, in less than a window",
                lambda s: rs.scan_steps(
                    lambda c, x: ((c[0], c[1] > 0), x), (s.scalar, jnp.zeros(3)), length=3, window=5
                ),
                TypeError,
                r"f must return a carry like its own at \[1\]: float32, found bool",
            ),
            (
                "a body of no steps that returns its state alone",
                lambda s: rs.scan_steps(lambda c, x: c, s.scalar, length=0, window=5),
                TypeError,
                r"f must return \(carry, y\), found ReplayState",
            ),
            (
                "a body of a while loop that returns a y",
                lambda s: rs.while_loop(lambda c: True, lambda c: (c, None), s.scalar, window=5),
                TypeError,
                "body_fun must return a carry like its own, found one without .checkpoint,",
            ),
            (
                "no length",
                lambda s: rs.scan_steps(lambda c, x: (c, None), s.scalar),
                ValueError,
                r"must give one number of steps, found .*\[\]",
            ),
            (
                "a negative length",
                lambda s: rs.scan_steps(lambda c, x: (c, None), s.scalar, length=-1),
                ValueError,
                "length must be at least 0, found -1",
            ),
            (
                "a float length",
                lambda s: rs.scan_steps(lambda c, x: (c, None), s.scalar, length=2.0),
                TypeError,
                "length must be an int, found 2.0",
            ),
            (
                "a traced length",
                lambda s: jax.jit(
                    lambda n: rs.scan_steps(lambda c, x: (c, None), s.scalar, length=n)[0]
                )(2),
                TypeError,
                "length must be an int, found .*Tracer",
            ),
            *(
                (
                    f"window {window}",
                    lambda s, window=window: steps(s, window=window),
                    TypeError,
                    f"window must be an int, found {window}",
                )
                for window in (2.0, True, None)
            ),
            (
                "a scalar to scan over",
                lambda s: rs.scan_steps(step_once, s.scalar, 1.0, window=5),
                TypeError,
                "xs must be arrays with a leading axis to scan over, found 1.0",
            ),
            (
                "a loop in a loop",
                lambda s: rs.scan_steps(
                    lambda c, _: rs.scan_steps(lambda c, _: (c, None), c, None, 2),
                    s.scalar,
                    None,
                    2,
                ),
                ValueError,
                "a windowed loop cannot run inside the body of another",
            ),
        ]
    ),
)
def test_loops(call, exception, match):
    refuses(call, exception, match, traced=True)


def test_lists_are_masks_and_indices():
    """Everywhere: what has no dtype to keep need not be an array."""
    s = Setting(setting())
    lists = {"lengths": [3, 0, 1], "accepted": [1, 0, 2], "slots": [2, -1, 0]}
    for argument, call in ARGUMENTS.items():
        name = argument.split()[0]
        value = lists.get(name, [True, False, True])
        if name in ("valid", "resets"):
            value = [[True] * 4, [False] * 4, [False, True] * 2]
        found, expected = call(s, value), call(s, np.asarray(value))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_sizes_may_be_numpy_integers():
    s = Setting(setting())
    assert rs.init_state(SPEC, np.int64(2)).checkpoint.shape[0] == 2
    found = rs.prefill(SPEC, s.ragged, s.four, chunk_size=np.int32(2))
    expected = rs.prefill(SPEC, s.ragged, s.four, chunk_size=2)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# Facts that live in arrays: known ones raise, traced ones are total and checkify finds them

COMMIT = ARGUMENTS["accepted"]
INSERT = ARGUMENTS["slots"]
TAKE = lambda s, x: rs.take(SPEC, s.ragged, x)  # noqa: E731


@pytest.mark.parametrize(
    "call, value, match",
    cases(
        [
            (
                "lengths above T in verify",
                ARGUMENTS["lengths of verify"],
                ints([0, 4, 3]),
                r"lengths must lie in \[0, 3\], found \[0, 4, 3\]",
            ),
            (
                "negative lengths in verify",
                ARGUMENTS["lengths of verify"],
                ints([0, -1, 3]),
                r"lengths must lie in \[0, 3\], found \[0, -1, 3\]",
            ),
            (
                "lengths above T in prefill",
                ARGUMENTS["lengths of prefill"],
                ints([0, 5, 3]),
                r"lengths must lie in \[0, 4\], found \[0, 5, 3\]",
            ),
            (
                "accepted above pending",
                COMMIT,
                ints([2, 3, 0]),
                r"accepted must lie in \[0, pending\], found .*\[2, 3, 0\] and .*\[2, 2, 2\]",
            ),
            (
                "negative accepted",
                COMMIT,
                ints([2, -1, 0]),
                r"accepted must lie in \[0, pending\], found .*\[2, -1, 0\] and .*\[2, 2, 2\]",
            ),
            (
                "accepted of all rows",
                COMMIT,
                3,
                r"accepted must lie in \[0, pending\], found accepted=3 and .*\[2, 2, 2\]",
            ),
            (
                "accepted by a scalar pointer",
                lambda s, x: rs.commit(SPEC, s.scalar, x),
                3,
                r"accepted must lie in \[0, pending\], found accepted=3 and pending=2",
            ),
            (
                "a second commit",
                lambda s, x: rs.commit(SPEC, s.committed, x),
                1,
                r"accepted must lie in \[0, pending\], found accepted=1 and pending=0",
            ),
            (
                "slots above B",
                INSERT,
                ints([0, 1, 3]),
                r"slots must lie in \[-1, 3\), found \[0, 1, 3\]",
            ),
            (
                "slots below -1",
                INSERT,
                ints([0, 1, -2]),
                r"slots must lie in \[-1, 3\), found \[0, 1, -2\]",
            ),
            ("a slot twice", INSERT, ints([2, 1, 2]), r"slots must be distinct, found \[2, 1, 2\]"),
            (
                "a parent after its child",
                lambda s, x: rs.verify(SPEC, s.ragged, s.three, parents=x),
                [[-1, 0, 2]] * ROWS,
                r"smaller than its token's own, found parents=\[\[-1, 0, 2\]",
            ),
            (
                "a path that falls",
                lambda s, x: rs.commit(SPEC, s.ragged, 2, path=x),
                [[1, 0]] * ROWS,
                r"in rising order, found path=\[\[1, 0\]",
            ),
            ("rows above B", TAKE, ints([3]), r"rows must lie in \[-1, 3\), found \[3\]"),
            ("rows below -1", TAKE, ints([0, -2]), r"rows must lie in \[-1, 3\), found \[0, -2\]"),
        ]
    ),
)
@pytest.mark.parametrize("kind", ["list", "numpy", "jax"])
def test_known_values(call, value, match, kind):
    known = np.asarray(value)
    known = {"list": known.tolist(), "numpy": known, "jax": jnp.asarray(value)}[kind]
    refuses(lambda s: call(s, known), ValueError, match, traced=False)


def test_numbers_of_which_some_are_traced():
    """A list of them is traced as a whole."""
    s = Setting(setting())
    commit = quick(lambda n: rs.commit(SPEC, s.ragged, [n, 9, 0]))
    np.testing.assert_array_equal(commit(1).pointer.length, [1, 2, 0])


def test_integers_are_int32_under_x64():
    with jax.enable_x64(True):
        for value in (3, [3], np.int64(3), np.full(1, 3), jnp.full(1, 3, jnp.int64)):
            for found in (as_int32("n", value), jax.eval_shape(lambda v=value: as_int32("n", v))):
                assert (found.dtype, found.shape) == (jnp.int32, np.shape(value))
            assert concrete(as_int32("n", value)) == 3
        for value in (2**40, [2**70], jnp.full(1, 2**40)):
            for run in (as_int32, lambda n, v: jax.eval_shape(lambda: as_int32(n, v))):
                with pytest.raises(ValueError, match="n must fit in int32, found"):
                    run("n", value)


@pytest.mark.parametrize("gate", [0.5, np.nan, -np.inf, np.inf])
@pytest.mark.parametrize(
    "call, masks",
    [
        ("step", {}),
        ("verify", {}),
        ("verify", {"lengths": [0, 1, 1]}),
        ("prefill", {}),
        ("prefill", {"lengths": [0, 1, 1]}),
        ("prefill", {"valid": [[False], [True], [True]]}),
    ],
)
def test_known_gates(call, masks, gate):
    def run(s, row=1):
        g = s.one.g.copy()
        g[row, 0, 2] = gate
        return getattr(rs, call)(SPEC, s.ragged, dataclasses.replace(s.one, g=g), **masks)

    match = rf"g must be a finite log-decay of at most 0, found values from .*{gate}.*reset"
    refuses(run, ValueError, match, traced=False)
    if masks:
        run(Setting(setting()), row=0)  # of a token that is not real


def quick(function):
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def test_traced_acceptances_are_clipped():
    """A second commit does nothing; negative and excessive numbers count as 0 and pending."""
    s = Setting(setting())
    commit = quick(lambda state, n: rs.commit(SPEC, state, n))
    after = commit(s.ragged, ints([5, -3, 1]))
    np.testing.assert_array_equal(after.pointer.length, [2, 0, 1])
    np.testing.assert_array_equal(after.pointer.pending, [0, 0, 0])
    jax.tree.map(np.testing.assert_array_equal, commit(after, ints([2, 2, 2])), after)
    both = commit(s.scalar, 7)
    assert (both.pointer.length, both.pointer.pending) == (2, 0)
    jax.tree.map(np.testing.assert_array_equal, commit(both, 7), both)
    assert commit(s.scalar, -1).pointer.length == 0


def test_traced_lengths_are_clipped():
    s = Setting(setting())
    verify = quick(lambda state, inputs, n: rs.verify(SPEC, state, inputs, n))
    found = verify(s.ragged, s.three, ints([9, -9, 2]))
    expected = verify(s.ragged, s.three, ints([3, 0, 2]))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    prefill = quick(lambda state, inputs, n: rs.prefill(SPEC, state, inputs, n))
    found = prefill(s.ragged, s.four, ints([9, -9, 2]))
    expected = prefill(s.ragged, s.four, ints([4, 0, 2]))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_traced_gates_stay_in_their_row():
    s = Setting(setting())
    step = quick(lambda state, inputs: rs.step(SPEC, state, inputs))
    g = s.one.g.copy()
    g[1] = np.nan
    found = step(s.ragged, dataclasses.replace(s.one, g=g))
    expected = step(s.ragged, s.one)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[[0, 2]], np.asarray(b)[[0, 2]])
    assert np.isnan(found[0][1]).all()


@functools.partial(jax.jit, static_argnums=0)
def run_scan(spec, state, inputs):
    def body(state, token):
        output, state = rs.step(spec, state, jax.tree.map(lambda x: x[:, None], token))
        return state, output

    return jax.lax.scan(body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs))


def bad_gates(gate):
    s = Setting(setting())
    g = s.four.g.copy()
    g[2, 1, 3] = gate
    return dataclasses.replace(s.four, g=g)


def three(inputs):
    return tokens(inputs, 0, 3)


GATE_CALLS = {
    "verify": lambda s, x: rs.verify(SPEC, s.ragged, three(x)),
    "verify of some": lambda s, x: rs.verify(SPEC, s.ragged, three(x), ints([0, 1, 2])),
    "prefill": lambda s, x: rs.prefill(SPEC, s.ragged, x),
    "prefill in chunks": lambda s, x: rs.prefill(SPEC, s.scalar, x, chunk_size=1),
    "scan of steps": lambda s, x: run_scan(SPEC, s.ragged, x),
}


@pytest.mark.parametrize(
    "call, good, bad, match",
    cases(
        [
            ("accepted", COMMIT, ints([2, 0, 1]), [ints([2, 0, 3]), ints([2, -1, 1])], "accepted"),
            (
                "accepted of all rows",
                COMMIT,
                ints(2),
                [ints(3), ints(-1)],
                "accepted must lie in",
            ),
            (
                "slots",
                INSERT,
                ints([-1, 2, 0]),
                [ints([-1, 3, 0]), ints([-2, 2, 0])],
                "slots out of",
            ),
            ("slots twice", INSERT, ints([-1, -1, 0]), [ints([2, 0, 2])], "named twice"),
            *(
                (
                    f"lengths of {name}",
                    ARGUMENTS[f"lengths of {name}"],
                    ints([0, 3, 1]),
                    [ints([0, 5, 1]), ints([0, 3, -1])],
                    r"lengths must lie in \[0, T\]",
                )
                for name in ("verify", "prefill")
            ),
            (
                "parents",
                lambda s, x: rs.verify(SPEC, s.ragged, s.three, parents=x),
                ints([[-1, 0, 0]] * ROWS),
                [ints([[-1, 1, 0]] * ROWS), ints([[-1, 0, -2]] * ROWS)],
                "a parent must be -1 or",
            ),
            (
                "path",
                lambda s, x: rs.commit(SPEC, s.ragged, ints([2, 0, 1]), path=x),
                ints([[0, 1], [5, 5], [1, 0]]),
                [ints([[1, 0]] * ROWS), ints([[0, 2]] * ROWS), ints([[0, 1], [0, 1], [-1, 0]])],
                "pending and in rising order",
            ),
            ("rows", TAKE, ints([-1, 2, 0]), [ints([-1, 3, 0]), ints([-2, 2, 0])], "rows out of"),
            (
                "records",
                lambda s, x: rs.step(SPEC, with_pointer(s.ragged, length=x), s.one),
                ints([5, 2, 0]),
                [ints([6, 2, 0])],
                "more than its window",
            ),
            *(
                (
                    f"gates of {name}",
                    call,
                    bad_gates(-1.0),
                    [bad_gates(0.5), bad_gates(np.nan)],
                    "g must",
                )
                for name, call in GATE_CALLS.items()
            ),
        ]
    ),
)
def test_checkify_finds_traced_values(call, good, bad, match):
    """Without `debug_checks` the same call neither raises nor holds anything of the check."""
    function = jax.jit(lambda s, x: call(Setting(s), x))
    assert not jax.make_jaxpr(function)(setting(), good).effects  # one would slow every call
    plain = function.lower(setting(), good).compile()
    with rs.debug_checks():
        checked = jax.jit(checkify.checkify(function)).lower(setting(), good).compile()
    assert "reduce_and" not in plain.as_text()
    assert "reduce_and" in checked.as_text()
    errors, expected = checked(setting(), good)
    errors.throw()
    jax.tree.map(np.testing.assert_array_equal, plain(setting(), good), expected)
    for value in bad:
        errors, _ = checked(setting(), value)
        with pytest.raises(checkify.JaxRuntimeError, match=match):
            errors.throw()
        jax.block_until_ready(plain(setting(), value))
