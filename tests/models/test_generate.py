"""generate and stream: against token-by-token decoding by hand, and their promises one by one."""

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from model_cases import (
    Own,
    V,
    assert_close,
    compile_quickly,
    forward,
    jit,
    make_config,
    make_model,
    random_tokens,
    start,
)

from replayssm_jax import generation
from replayssm_jax.generate import GenerateState, generate, stream
from replayssm_jax.models import HybridLM
from replayssm_jax.stopping import StopReason

module = importlib.import_module("replayssm_jax.generate")

# One batch of prompts and one capacity, so that little is compiled.
PROMPTS = [[3], [7, 1, 4, 4, 9], [2, 11]]
B, N = 3, 12
FAMILY = "gated_delta_net"
SAMPLED = dict(
    temperature=1.0, top_k=8, top_p=0.95, min_p=0.01, repetition_penalty=1.1, stop_tokens=-1
)


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        compile_quickly(patch)
        yield patch


@pytest.fixture(scope="module")
def model():
    return make_model(FAMILY)


@functools.cache
def greedy(decode="replay"):
    return generate(make_model("gated_delta_net"), PROMPTS, max_new_tokens=N, decode=decode)


@functools.cache
def by_hand():
    """Greedy tokens and their log-probabilities, each from a full forward."""
    model = make_model("gated_delta_net")
    rows = [list(p) for p in PROMPTS]
    logprobs = [[] for _ in rows]
    for _ in range(N):
        padded = np.zeros((B, 20), np.int32)
        for b, r in enumerate(rows):
            padded[b, : len(r)] = r
        logits = forward(model, jnp.asarray(padded))
        for b, r in enumerate(rows):
            at = logits[b, len(r) - 1]
            r.append(int(np.argmax(at)))
            logprobs[b].append(float(jax.nn.log_softmax(at)[r[-1]]))
    tokens = np.array([r[len(p) :] for r, p in zip(rows, PROMPTS, strict=True)])
    return tokens, np.array(logprobs)


def padded(side):
    width = 6
    tokens, valid = np.full((B, width), V - 1, np.int32), np.zeros((B, width), bool)
    for b, p in enumerate(PROMPTS):
        first = width - len(p) if side == "left" else 0
        tokens[b, first : first + len(p)] = p
        valid[b, first : first + len(p)] = True
    return jnp.asarray(tokens), jnp.asarray(valid)


@pytest.mark.parametrize("decode", ["replay", "recurrent"])
def test_greedy_tokens_and_logprobs(decode):
    out = greedy(decode)
    tokens, logprobs = by_hand()
    np.testing.assert_array_equal(out.tokens, tokens)
    np.testing.assert_allclose(out.logprobs, logprobs, atol=1e-4)
    np.testing.assert_array_equal(out.lengths, [N] * B)
    np.testing.assert_array_equal(out.stop_reason, [StopReason.LENGTH] * B)
    assert not np.asarray(out.sampling_logprobs).any()


def test_padding_on_either_side(model):
    left, valid = padded("left")
    right, _ = padded("right")
    lengths = [len(p) for p in PROMPTS]
    for out in (
        generate(model, left, valid=valid, max_new_tokens=N),
        generate(model, right, lengths=lengths, max_new_tokens=N),
    ):
        np.testing.assert_array_equal(out.tokens, greedy().tokens)


@pytest.mark.parametrize("decode", ["replay", "recurrent"])
def test_limits_stop_tokens_and_sequences_by_row(model, decode):
    tokens = np.asarray(greedy(decode).tokens)
    stop, sequence = int(tokens[1, 3]), tokens[2, 2:5].tolist()
    out = generate(
        model,
        PROMPTS,
        decode=decode,
        max_new_tokens=np.array([0, N, 9]),
        stop_tokens=[[], [stop], []],
        stop_sequences=[sequence, [1] * (N + 1)],
        pad_token=-7,
    )
    reasons = [StopReason.LENGTH, StopReason.TOKEN, StopReason.SEQUENCE]
    np.testing.assert_array_equal(out.stop_reason, reasons)
    ends = [n for n in range(3, 9) if tokens[2, n - 3 : n].tolist() == sequence]
    lengths = [0, tokens[1].tolist().index(stop) + 1, ends[0]]
    np.testing.assert_array_equal(out.lengths, lengths)
    for b, n in enumerate(lengths):
        np.testing.assert_array_equal(out.tokens[b, :n], tokens[b, :n])
        assert (np.asarray(out.tokens[b, n:]) == -7).all()
        assert not np.asarray(out.logprobs[b, n:]).any()


def test_tokens_outside_the_vocabulary_raise_unless_they_are_padding(model):
    for wrong in (-1, V):
        with pytest.raises(ValueError, match=rf"tokens must lie in \[0, {V}\), found {wrong}"):
            generate(model, [[1, wrong]], max_new_tokens=2)
    left, valid = padded("left")
    out = generate(model, jnp.where(valid, left, -1), valid=valid, max_new_tokens=N)
    np.testing.assert_array_equal(out.tokens, greedy().tokens)


def test_a_stop_at_the_first_token(model):
    first = np.asarray(greedy().tokens[:, :1])
    never = [[1] * (N + 1), [2] * (N + 2)]  # longer than what is generated
    out = generate(model, PROMPTS, max_new_tokens=N, stop_tokens=first, stop_sequences=never)
    np.testing.assert_array_equal(out.lengths, [1] * B)
    np.testing.assert_array_equal(out.stop_reason, [StopReason.TOKEN] * B)
    for padding in ([[], never[1]], jnp.full((2, 7), -1)):
        options = dict(stop_tokens=np.full((B, 1), -1), stop_sequences=padding)
        out = generate(model, PROMPTS, max_new_tokens=N, **options)
        np.testing.assert_array_equal(out.tokens, greedy().tokens)


def test_resuming_equals_going_on(model):
    """From a returned state, and from prompt plus output; greedy and sampled."""
    keys = jax.random.split(jax.random.key(5), B)
    whole = generate(model, PROMPTS, max_new_tokens=N, key=keys, return_state=True, **SAMPLED)
    start = generate(model, PROMPTS, max_new_tokens=5, key=keys, return_state=True, **SAMPLED)
    np.testing.assert_array_equal(start.tokens, whole.tokens[:, :5])
    longer = [p + t for p, t in zip(PROMPTS, start.tokens.tolist(), strict=True)]
    again = generate(model, longer, max_new_tokens=N - 5, key=keys, return_state=True, **SAMPLED)
    np.testing.assert_array_equal(again.tokens, whole.tokens[:, 5:])
    rest = generate(
        model,
        np.zeros((B, 0), np.int32),
        max_new_tokens=N - 5,
        key=keys,
        state=start.state,
        return_state=True,
        **SAMPLED,
    )
    np.testing.assert_array_equal(rest.tokens, whole.tokens[:, 5:])
    assert_close(rest.logprobs, whole.logprobs[:, 5:], limit=1e-4)
    assert isinstance(rest.state, GenerateState)
    lengths = [len(p) + N for p in PROMPTS]
    np.testing.assert_array_equal(rest.state.cache.progress.position, lengths)


def test_a_state_that_was_donated_is_refused_by_name():
    model = make_model("mamba2")
    state = generate(model, PROMPTS, max_new_tokens=2, return_state=True).state
    more = [[]] * len(PROMPTS)
    generate(model, more, max_new_tokens=2, state=state)
    with pytest.raises(ValueError, match="state was donated to an earlier call: pass the state"):
        generate(model, more, max_new_tokens=2, state=state)


def test_ended_rows_stay_where_they_are(model):
    key = jax.random.key(9)
    whole = generate(model, PROMPTS, max_new_tokens=N, key=key, return_state=True, **SAMPLED)
    stop = int(whole.tokens[0, 2])
    options = {**SAMPLED, "stop_tokens": stop}
    out = generate(model, PROMPTS, max_new_tokens=N, key=key, return_state=True, **options)
    lengths = np.asarray(out.lengths)
    assert lengths[0] <= 3
    np.testing.assert_array_equal(out.tokens[0, : lengths[0]], whole.tokens[0, : lengths[0]])
    seen = lengths + [len(p) for p in PROMPTS]
    np.testing.assert_array_equal(out.state.cache.progress.position, seen)


def test_samples_do_not_depend_on_neighbours_or_place(model):
    keys = jax.random.split(jax.random.key(7), B)
    out = generate(model, PROMPTS, max_new_tokens=N, key=keys, return_state=True, **SAMPLED)
    order = np.array([2, 0, 1])
    moved = generate(
        model,
        [PROMPTS[i] for i in order],
        max_new_tokens=N,
        key=keys[order],
        return_state=True,
        **SAMPLED,
    )
    np.testing.assert_array_equal(moved.tokens, out.tokens[order])
    crowd = [PROMPTS[0], [5] * 5, [6, 6]]
    beside = generate(model, crowd, max_new_tokens=N, key=keys, return_state=True, **SAMPLED)
    np.testing.assert_array_equal(beside.tokens[0], out.tokens[0])
    twice = generate(model, PROMPTS, max_new_tokens=N, key=keys, return_state=True, **SAMPLED)
    np.testing.assert_array_equal(twice.tokens, out.tokens)
    other = generate(
        model, PROMPTS, max_new_tokens=N, key=jax.random.key(8), return_state=True, **SAMPLED
    )
    assert not np.array_equal(other.tokens, out.tokens)


@pytest.mark.parametrize("chunk", [1, 8])
def test_streaming_gives_the_same_tokens(model, chunk):
    stop = int(by_hand()[0][0, 4])
    limits = np.array([N, 3, N])
    expected = generate(model, PROMPTS, max_new_tokens=limits, stop_tokens=stop)
    streamed = stream(model, PROMPTS, max_new_tokens=limits, stop_tokens=stop, chunk=chunk)
    columns = np.stack(list(streamed), axis=1)
    longest = int(np.max(expected.lengths))
    np.testing.assert_array_equal(columns, expected.tokens[:, :longest])


def test_new_weights_and_options_go_through_the_same_loop():
    """Five optimiser steps, other limits, keys and stops: nothing is traced again."""
    model = make_model("gated_delta_net")
    tokens = random_tokens(B, 9)
    optimiser = optax.sgd(1e-2)
    graphdef, params = nnx.split(model)
    opt_state = optimiser.init(params)

    @jax.jit
    def train(params, opt_state):
        def loss(params):
            logits = nnx.merge(graphdef, params)(tokens[:, :-1])
            labels = jax.nn.one_hot(tokens[:, 1:], V)
            return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * labels, -1))

        grads = jax.grad(loss)(params)
        updates, opt_state = optimiser.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    def run(model, i):
        return generate(
            model,
            PROMPTS,
            max_new_tokens=N - i,
            key=jax.random.key(i),
            return_state=True,
            **{**SAMPLED, "temperature": 1.0 + i, "stop_tokens": i},
        )

    run(model, 0)
    sizes = generation._prefill._cache_size(), module._decode._cache_size()
    for i in range(1, 6):
        params, opt_state = train(params, opt_state)
        run(nnx.merge(graphdef, params), i)
    assert sizes == (generation._prefill._cache_size(), module._decode._cache_size())


@pytest.mark.parametrize("kept", [False, True])
def test_conventional_decoding_copies_states_of_ended_rows_only_to_keep_them(model, kept):
    prompt = module.as_prompt(PROMPTS)
    control, carry = start(model, prompt, N, decode="recurrent", ragged=kept)
    text = module._decode.lower(model, carry, control, True, kept).as_text()
    shape = "x".join(map(str, carry.state.cache.layers[0][0].state.shape))
    selects = [line for line in text.splitlines() if "stablehlo.select" in line]
    assert bool([line for line in selects if f"tensor<{shape}xf32>" in line]) == kept


def test_prompts_of_length_zero(model):
    out = generate(model, [[], [7, 1, 4, 4, 9], []], max_new_tokens=N, bos_token=3)
    np.testing.assert_array_equal(out.tokens[0], greedy().tokens[0])
    np.testing.assert_array_equal(out.tokens[1], greedy().tokens[1])
    empty = generate(model, np.zeros((B, 0), np.int32), max_new_tokens=N, bos_token=3)
    np.testing.assert_array_equal(empty.tokens, np.stack([greedy().tokens[0]] * B))
    with pytest.raises(ValueError, match="pass bos_token"):
        generate(model, [[1], []], max_new_tokens=2)
    with pytest.raises(ValueError, match="pass bos_token"):
        generate(model, np.zeros((2, 0), np.int32), max_new_tokens=2)


def test_a_temperature_of_zero_needs_no_key(model):
    out = generate(model, PROMPTS, max_new_tokens=N, temperature=[0.0] * B, top_k=2)
    np.testing.assert_array_equal(out.tokens, greedy().tokens)
    with pytest.raises(ValueError, match="needs a key"):
        generate(model, PROMPTS, max_new_tokens=N, temperature=[0.0, 1.0, 0.0])


def test_an_empty_batch_gives_empty_arrays(model):
    for prompt in ([], np.zeros((0, 5), np.int32)):
        out = generate(model, prompt, max_new_tokens=4)
        assert out.tokens.shape == out.logprobs.shape == (0, 4)
        assert out.lengths.shape == out.stop_reason.shape == (0,)
        assert list(stream(model, prompt, max_new_tokens=4)) == []


def test_a_full_cache_ends_a_row_and_a_longer_prompt_raises(model):
    out = generate(model, PROMPTS, max_new_tokens=N, cache_size=9)
    np.testing.assert_array_equal(out.lengths, [8, 4, 7])
    np.testing.assert_array_equal(out.stop_reason, [StopReason.LENGTH] * B)
    for b, n in enumerate([8, 4, 7]):
        np.testing.assert_array_equal(out.tokens[b, :n], greedy().tokens[b, :n])
    with pytest.raises(ValueError, match="the tokens need 5 positions, the cache holds 4"):
        generate(model, PROMPTS, max_new_tokens=2, cache_size=4)


def test_under_the_callers_jit(model, monkeypatch):
    for part, name in ((generation, "_init"), (generation, "_prefill"), (module, "_decode")):
        monkeypatch.setattr(part, name, getattr(part, name).__wrapped__)
    left, valid = padded("left")

    @jit
    def run(model, tokens, valid, limits):
        return generate(model, tokens, valid=valid, max_new_tokens=limits, capacity=N)

    out = run(model, left, valid, jnp.array([N, 2, 0], jnp.int32))
    np.testing.assert_array_equal(out.lengths, [N, 2, 0])
    np.testing.assert_array_equal(out.tokens[0], greedy().tokens[0])
    # What is known stays known: the width of the output.
    known = dict(stop_tokens=[[1], [], []], stop_sequences=[[1, 2]], pad_token=-7)
    run = functools.partial(generate, model, max_new_tokens=[2, 0, 7], **known)
    assert jax.eval_shape(lambda x, valid: run(x, valid=valid), left, valid).tokens.shape == (B, 7)


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([[1], [V]], {}, rf"tokens must lie in \[0, {V}\), found {V}"),
        (np.full((2, 3), V), dict(lengths=[0, 1], bos_token=1), rf"\), found {V}"),
        (np.full((2, 3), V), dict(valid=[[False, True, True]] * 2), rf"\), found {V}"),
        ([[1], []], {}, "a row has no prompt: pass bos_token"),
        ([[1], []], dict(bos_token=V), rf"\), found {V}"),
        (np.ones((2, 0), int), dict(bos_token=V), rf"\), found {V}"),
        (np.ones((2, 3), int), dict(lengths=[4, 1]), r"lengths must lie in \[0, 3\], found \[4, 1"),
        (np.ones((2, 5), int), dict(cache_size=4), "need 5 positions, the cache holds 4"),
        (np.ones((2, 5), int), dict(cache_size=4, lengths=[1, 5]), "need 5 positions"),
        ([[1], [2]], dict(temperature=[-1, 0]), r"temperature must be .* found \[-1, 0\]"),
        ([[1], [2]], dict(temperature=1.0, top_k=[1, 0]), "top_k must be at least 1"),
    ],
)
def test_what_is_known_is_checked_under_the_callers_jit(
    model, monkeypatch, prompt, options, message
):
    monkeypatch.setattr(generation, "_init", generation._init.__wrapped__)
    key = jax.random.key(0) if "temperature" in options else None

    def run():
        return generate(model, prompt, max_new_tokens=2, key=key, **options)

    for call in (run, lambda: jax.eval_shape(run)):
        with pytest.raises(ValueError, match=message):
            call()


def test_impossible_arguments_raise(model):
    left, _ = padded("left")
    for options, message in [
        (dict(temperature=1.0), "needs a key"),
        (dict(lengths=[1, 1, 1]), "has its own lengths"),
        (dict(max_new_tokens=[1, 2]), "max_new_tokens must be an int or"),
        (dict(max_new_tokens=-1), "at least 0"),
        (dict(max_new_tokens=0, capacity=0), "capacity must be at least 1, found 0"),
        (dict(stop_tokens=np.zeros((2, 1), int)), "stop_tokens must be"),
        (dict(max_new_tokens=2**32 + 1), "max_new_tokens must fit in int32, found 4294967297"),
        (dict(stop_tokens=[2**40]), "stop_tokens must fit in int32"),
        (dict(stop_tokens=V), rf"stop_tokens must lie in \[-1, {V}\), found {V}"),
        (dict(stop_sequences=[[1, -2]]), rf"stop_sequences must lie in \[-1, {V}\), found -2"),
        (dict(stop_sequences=[[2**40]]), "stop_sequences must fit in int32"),
        (dict(pad_token=2**40), "pad_token must fit in int32, found 1099511627776"),
        (dict(bos_token=[1]), r"bos_token must have shape \(\), found \(1,\)"),
        (dict(stop_sequences=[1, 2]), "stop_sequences must hold lists of tokens"),
        (dict(stop_sequences=jnp.array([1, 2])), r"must be \[Q, L\], found \(2,\)"),
        (dict(cache_size=0), "cache_size must be at least 1, found 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            generate(model, PROMPTS, **{"max_new_tokens": 2, **options})
    for name, value in [
        ("stop_tokens", [1.5]),
        ("stop_sequences", [[1.5]]),
        ("max_new_tokens", 2.5),
        ("max_new_tokens", True),
        ("pad_token", 1.7),
        ("bos_token", 1.5),
        ("top_k", 2.5),
    ]:
        with pytest.raises(TypeError, match=f"^{name} must be integer, found (float|bool)"):
            generate(model, PROMPTS, **{"max_new_tokens": 2, name: value})
    for value, found in ((5, "5"), (np.array(5), r"array\(5\)"), ("", "''")):
        message = f"stop_sequences must be a list of token sequences, found {found}"
        with pytest.raises(TypeError, match=message):
            generate(model, PROMPTS, max_new_tokens=2, stop_sequences=value)
    for name in ("return_state", "unstack"):
        with pytest.raises(TypeError, match=f"{name} must be a bool, found 1"):
            generate(model, PROMPTS, max_new_tokens=2, **{name: 1})
    with pytest.raises(ValueError, match=r"prompt must have shape \[B, T\]"):
        generate(model, np.zeros(3, np.int32), max_new_tokens=2)
    for prompt in (np.zeros((3, 2), np.float32), [[1.0, 2.0]]):
        with pytest.raises(TypeError, match="prompt must be integer, found float"):
            generate(model, prompt, max_new_tokens=2)
    for prompt in (np.full((3, 2), 2**32 + 1), [[1, 2**32 + 1]]):
        with pytest.raises(ValueError, match="prompt must fit in int32, found 4294967297"):
            generate(model, prompt, max_new_tokens=2)
    for name, mask, wanted in (("lengths", [1.7, 2, 2], "integer"), ("valid", left, "bool")):
        with pytest.raises(TypeError, match=f"{name} must be {wanted}, found (float64|int32)"):
            generate(model, left, max_new_tokens=2, **{name: mask})
    with pytest.raises(ValueError, match="a list of tokens for each row, found the row 1"):
        generate(model, [1, 2, 3], max_new_tokens=2)
    with pytest.raises(TypeError, match=r"such as jax.random.key\(0\), found 0"):
        generate(model, PROMPTS, max_new_tokens=2, temperature=1.0, key=0)
    with pytest.raises(ValueError, match="lengths must lie in"):
        generate(model, np.zeros((3, 2), np.int32), lengths=[0, 1, 3], max_new_tokens=2)
    with pytest.raises(ValueError, match="repetition penalty cannot start in the middle"):
        state = GenerateState(model.init_cache(B, 16), jnp.zeros((B, V)))
        generate(model, PROMPTS, max_new_tokens=1, state=state, repetition_penalty=2.0)
    for name, value in ("cache_size", 32), ("decode", "recurrent"):
        with pytest.raises(ValueError, match=f"{name} goes with new states.*found {name}="):
            generate(model, PROMPTS, max_new_tokens=1, state=state, **{name: value})
    with pytest.raises(ValueError, match="the state has 3 rows, the prompt 2"):
        generate(model, [[], [1]], max_new_tokens=1, state=state)
    with pytest.raises(TypeError, match="state must be a GenerateState, found int"):
        generate(model, PROMPTS, max_new_tokens=1, state=3)
    with pytest.raises(TypeError, match=r"state.cache must be a HybridCache, found NoneType"):
        generate(model, PROMPTS, max_new_tokens=1, state=GenerateState(None, state.logits))


def test_what_is_no_model_raises(model):
    methods = ("config", "init_cache", "prefill_hidden", "logits", "step")
    for wrong, found in [
        (3, "int without config, init_cache, prefill_hidden, logits, step"),
        (None, "NoneType without"),
        (PROMPTS, "list without"),
        (model.config, "HybridConfig without config, init_cache"),
        (model.blocks[0], "HybridBlock without config, prefill_hidden, logits, step"),
        (HybridLM, "the class HybridLM"),
    ]:
        message = f"^model must be a HybridLM or a module with its methods, found {found}"
        for call in (generate, lambda *args, **options: next(stream(*args, **options))):
            with pytest.raises(TypeError, match=message):
                call(wrong, PROMPTS, max_new_tokens=2)
    with pytest.raises(TypeError, match="model must be a pytree, found Mine: register its class"):
        generate(type("Mine", (), dict.fromkeys(methods))(), PROMPTS, max_new_tokens=2)
    for prompt, error, found in [(3, ValueError, r"\(\)"), (None, TypeError, "None")]:
        with pytest.raises(error, match=f"prompt must .*, found {found}"):
            generate(model, prompt, max_new_tokens=2)


def test_a_model_of_ones_own(model):
    stacked = make_model("mamba2", pattern="MM", scan_layers=True)
    for inner, expected in [
        (model, greedy()),
        (stacked, generate(stacked, PROMPTS, max_new_tokens=N)),
    ]:
        out = generate(Own(inner), PROMPTS, max_new_tokens=N)
        np.testing.assert_array_equal(out.tokens, expected.tokens)


def test_what_raises_does_not_cost_the_state(model):
    """It is donated, but to a loop that runs."""
    state = GenerateState(model.init_cache(B, 16), jnp.zeros((B, V)))
    for options, message in [
        (dict(beams=3), r"unknown arguments \['beams'\]"),
        (dict(return_state=True), "unknown arguments"),
        (dict(chunk=1.5), "chunk must be an int, found 1.5"),
        (dict(decode="zzz"), 'decode must be "replay", "recurrent" or "snapshot", found \'zzz\''),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            next(stream(model, PROMPTS, max_new_tokens=2, state=state, **options))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(vocab_size=V + 1), rf"state.logits must be array\[3, {V + 1}\], found .*\[3, {V}\]"),
        (dict(pattern="MM"), r"state.cache.layers\[1\]\[0\].history must be .*, found None"),
        (dict(pattern="M"), r"state.cache.layers\[1\]\[0\].key must be None, found array"),
        (dict(max_tokens=2), r"history must be array\[3, 5, \d+\], found array\[3, 7"),
        (dict(state_dtype="bfloat16"), r"checkpoint must be bfloat16\[3.*, found float32\[3"),
        (dict(pattern="MAMA", scan_layers=True), r"layers\[2\]\[0\].history must be array.* None"),
    ],
)
def test_the_state_of_another_model_raises_and_is_not_lost(model, options, message):
    state = GenerateState(model.init_cache(B, 16), jnp.zeros((B, V)))
    other = nnx.eval_shape(lambda: HybridLM(make_config(FAMILY, **options), rngs=nnx.Rngs(0)))
    empty = np.zeros((B, 0), np.int32)
    with pytest.raises(ValueError, match=message):
        generate(other, empty, max_new_tokens=2, state=state)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def compiled_loop(model, unstack=True):
    prompt = module.as_prompt(np.zeros((B, 4), np.int32))
    control, carry = start(model, prompt, 16, unstack=unstack)
    return carry, module._decode.lower(model, carry, control, unstack, False).compile().as_text()


def test_the_compiled_loop_has_no_conditional_and_copies_no_checkpoint(model):
    carry, text = compiled_loop(model)
    shape = carry.state.cache.layers[0][0].state.checkpoint.shape
    dims = ",".join(map(str, shape))
    assert f"f32[{dims}]" in text
    assert not re.findall(rf"= f32\[{dims}\]\S* copy\(", text)
    assert " conditional(" not in text


def test_stacked_layers_are_unstacked_before_the_loop():
    """Otherwise every step slices every weight out of its stack."""
    stacked = make_model("mamba2", pattern="MM", scan_layers=True)
    expected = generate(stacked, PROMPTS, max_new_tokens=N)
    scanned = generate(stacked, PROMPTS, max_new_tokens=N, unstack=False)
    np.testing.assert_array_equal(scanned.tokens, expected.tokens)
    shape = stacked.blocks[0].mixers[0].in_proj.kernel.shape
    dims = ",".join(map(str, shape))
    _, text = compiled_loop(stacked, unstack=False)
    assert f"f32[{dims}]" in loop_bodies(text)
    _, text = compiled_loop(stacked)
    assert f"f32[{dims}]" not in loop_bodies(text)


def loop_bodies(text):
    """The computations that the while loops of a compiled module run."""
    names = re.findall(r"body=%?([\w.\-]+)", text)
    computations = {}
    for block in re.split(r"\n\n", text):
        match = re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) \(", block)
        if match:
            computations[match.group(1)] = block
    return "\n".join(computations.get(name, "") for name in names)
