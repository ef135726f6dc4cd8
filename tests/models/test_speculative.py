"""speculative_generate: the tokens of generate, the target's distribution, ragged rows."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from model_cases import FAMILIES, Own, V, compile_quickly, forward, jit, make_model, start
from random_modules import filled

import replayssm_jax as rs
from replayssm_jax.drafters import (
    AdaptiveDrafter,
    Drafts,
    ModelDrafter,
    MTPDrafter,
    NGramDrafter,
)
from replayssm_jax.generate import generate
from replayssm_jax.generation import GenerateState
from replayssm_jax.models import MTPHeads, distillation_loss
from replayssm_jax.sampling import Sampling, shape_logits
from replayssm_jax.speculative import speculative_generate
from replayssm_jax.stopping import StopReason

module = importlib.import_module("replayssm_jax.speculative")

PROMPTS = [[3], [7, 1, 4, 1, 4, 1, 4], [2, 11]]
B, N = 3, 21
SAMPLED = dict(temperature=1.0, top_k=8, top_p=0.95, min_p=0.01)


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        compile_quickly(patch)
        yield patch


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("tokens", "lengths"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Scripted:
    """Proposes what a script [B, N] says comes after each position, as many as `lengths` says.

    `lengths` [B, N] and the script start at the row's first new token; the state counts them.
    """

    tokens: jax.Array
    lengths: jax.Array
    num_drafts = 3
    reads_hidden = True  # and looks at none of it: states with and without one must go together

    def start(self, prompt, capacity):
        return jnp.zeros((self.tokens.shape[0],), jnp.int32)

    def propose(self, state, turn):
        at = state[:, None] + 1 + jnp.arange(3, dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(self.tokens, at, axis=1, mode="clip")
        lengths = jnp.take_along_axis(self.lengths, state[:, None], axis=1, mode="clip")
        return Drafts(tokens, lengths[:, 0]), state

    def observe(self, state, tokens, kept):
        return state + kept


def scripted(right, seed=0):
    """Drafts of 0 to 3 tokens, of which a random half of the tokens are wrong."""
    rng = np.random.default_rng(seed)
    wrong = rng.random(right.shape) < 0.3
    tokens = np.where(wrong, (np.asarray(right) + 1) % V, right)
    return Scripted(jnp.asarray(tokens), jnp.asarray(rng.integers(0, 4, right.shape), jnp.int32))


@functools.cache
def expected(family="gated_delta_net"):
    return generate(make_model(family), PROMPTS, max_new_tokens=N)


def assert_same(out, wanted):
    for name in ("tokens", "lengths", "stop_reason"):
        np.testing.assert_array_equal(getattr(out, name), getattr(wanted, name), err_msg=name)
    for name in ("logprobs", "sampling_logprobs"):
        found = getattr(out, name)
        np.testing.assert_allclose(found, getattr(wanted, name), atol=1e-4, err_msg=name)
    assert (np.asarray(out.accepted) <= np.asarray(out.proposed)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate_whatever_is_drafted(family):
    model, wanted = make_model(family), expected(family)
    out = speculative_generate(
        model, PROMPTS, scripted(wanted.tokens), max_new_tokens=N, return_state=True
    )
    assert_same(out, wanted)
    assert (np.asarray(out.accepted) > 0).all()
    assert (np.asarray(out.accepted) < np.asarray(out.proposed)).all()
    np.testing.assert_array_equal(out.state.cache.progress.position, [len(p) + N for p in PROMPTS])


def test_a_model_of_ones_own():
    own = Own(make_model("gated_delta_net"))
    out = speculative_generate(own, PROMPTS, scripted(expected().tokens), max_new_tokens=N)
    assert_same(out, expected())


def test_snapshots_speculate_too():
    """Conventional decoding with a state for each draft: what replay is compared with."""
    model, wanted = make_model("mamba2"), expected("mamba2")
    drafter = scripted(wanted.tokens, 2)
    options = dict(max_new_tokens=N, return_state=True)
    out = speculative_generate(model, PROMPTS, drafter, decode="snapshot", **options)
    assert_same(out, wanted)
    assert (np.asarray(out.accepted) > 0).all()
    states = out.state.cache.layers[0][0].state.states
    spec = model.blocks[0].mixers[0].spec
    assert states.shape == (B, 1 + model.config.max_tokens, *spec.state_shape(B)[1:])
    assert out.state.cache.pointer is None


def test_all_right_all_wrong_and_no_drafts():
    model, wanted = make_model("gated_delta_net"), expected()
    right = jnp.stack([wanted.tokens[0], (wanted.tokens[1] + 1) % V, wanted.tokens[2]])
    lengths = jnp.array([[3], [3], [0]], jnp.int32) * jnp.ones((B, N), jnp.int32)
    out = speculative_generate(model, PROMPTS, Scripted(right, lengths), max_new_tokens=N)
    assert_same(out, wanted)
    # Six rounds of one token and up to three drafts reach 21: the last has no room for a draft.
    np.testing.assert_array_equal(out.accepted, [15, 0, 0])
    np.testing.assert_array_equal(out.proposed, [15, sum(min(3, N - 1 - i) for i in range(N)), 0])


def test_drafts_outside_the_vocabulary_end_a_rows_drafts():
    model, wanted = make_model("gated_delta_net"), expected()
    tokens = np.array(wanted.tokens)
    tokens[0, 2::3], tokens[1, 1::2], tokens[2] = -1, V, 2**31 - 1
    drafter = Scripted(jnp.asarray(tokens), jnp.full((B, N), 3, jnp.int32))
    out = speculative_generate(model, PROMPTS, drafter, max_new_tokens=N)
    assert_same(out, wanted)
    np.testing.assert_array_equal(out.accepted, out.proposed)
    np.testing.assert_array_equal(np.asarray(out.accepted) > 0, [True, True, False])


@pytest.mark.parametrize("temperature", [1.0, 1e-30])
def test_sampled_tokens_with_fixed_drafts_are_those_of_generate(temperature):
    model = make_model("gated_delta_net")
    options = dict(
        max_new_tokens=N,
        key=jax.random.split(jax.random.key(3), B),
        repetition_penalty=np.array([1.3, 1.3, 1.0], np.float32),
        **{**SAMPLED, "temperature": np.array([temperature, 0.0, 0.7], np.float32)},
    )
    wanted = generate(model, PROMPTS, **options)
    out = speculative_generate(model, PROMPTS, scripted(wanted.tokens, 1), **options)
    assert_same(out, wanted)
    assert (np.asarray(out.accepted) > 0).all()


@pytest.mark.parametrize(
    "limits, lengths, reasons",
    [
        ([0, N, N], [0, 2, 8], ["LENGTH", "TOKEN", "SEQUENCE"]),
        ([6, N, 7], [6, 2, 7], ["LENGTH", "TOKEN", "LENGTH"]),
        ([N, 1, N], [11, 1, 8], ["LENGTH", "LENGTH", "SEQUENCE"]),
    ],
)
def test_limits_stops_and_the_end_of_the_cache_by_row(limits, lengths, reasons):
    model, tokens = make_model("gated_delta_net"), np.asarray(expected().tokens)
    options = dict(
        max_new_tokens=np.array(limits),
        capacity=32,
        cache_size=12,
        stop_tokens=[[], [int(tokens[1, 3])], []],
        stop_sequences=[tokens[2, 6:9].tolist(), [1] * 99],
        pad_token=-7,
    )
    wanted = generate(model, PROMPTS, **options)
    np.testing.assert_array_equal(wanted.lengths, lengths)
    np.testing.assert_array_equal(wanted.stop_reason, [StopReason[name] for name in reasons])
    full = jnp.full((B, N), 3, jnp.int32)
    for drafter in (Scripted(expected().tokens, full), scripted(expected().tokens)):
        out = speculative_generate(model, PROMPTS, drafter, return_state=True, **options)
        assert_same(out, wanted)
        seen = np.asarray(wanted.lengths) + [len(p) for p in PROMPTS]
        np.testing.assert_array_equal(out.state.cache.progress.position, seen)


def test_states_pass_between_generate_and_speculation():
    model, tokens = make_model("gated_delta_net"), expected().tokens
    empty = np.zeros((B, 0), np.int32)
    options = dict(return_state=True, capacity=32)
    first = generate(model, PROMPTS, max_new_tokens=9, **options)
    drafter = Scripted(jnp.roll(tokens, -9, axis=1), jnp.full((B, N), 3, jnp.int32))
    middle = speculative_generate(
        model, empty, drafter, max_new_tokens=8, state=first.state, **options
    )
    np.testing.assert_array_equal(middle.tokens, tokens[:, 9:17])
    np.testing.assert_array_equal(middle.accepted, [6] * B)
    assert middle.state.hidden.shape == (B, model.config.d_model)
    last = generate(model, empty, max_new_tokens=N - 17, state=middle.state, **options)
    assert last.state.hidden is None
    np.testing.assert_array_equal(last.tokens, tokens[:, 17:])


# Drafters


def test_n_grams_propose_what_followed_them():
    drafter = NGramDrafter(num_drafts=3, longest=3, least=2)
    prompt = module.as_prompt([[5, 1, 2, 3, 4, 9, 1, 2], [1, 2, 3, 4, 5], [8, 6, 6], [1, 2, 7, 1]])
    state = drafter.start(prompt, 8)

    def propose(state, *token):
        turn = module.Turn(jnp.array(token, jnp.int32), *[None] * 4)
        drafts, _ = drafter.propose(state, turn)
        rows, lengths = drafts.tokens.tolist(), drafts.lengths.tolist()
        return [row[:n] for row, n in zip(rows, lengths, strict=True)]

    assert propose(state, 3, 6, 6, 2) == [[4, 9, 1], [], [6, 6, 6], [7, 1, 2]]
    tokens = jnp.array([[3, 4, 9, 1], [6, 0, 0, 0], [6, 6, 0, 0], [2, 7, 1, 2]], jnp.int32)
    state = drafter.observe(state, tokens, jnp.array([3, 0, 2, 1], jnp.int32))
    np.testing.assert_array_equal(state.length, [11, 5, 5, 5])
    assert propose(state, 1, 1, 7, 7) == [[2, 3, 4], [], [], [1, 2, 7]]


def test_n_grams_of_padded_prompts():
    drafter = NGramDrafter()
    valid = jnp.array([[False, True, True, False], [True, True, True, True]])
    tokens = jnp.array([[9, 1, 2, 9], [1, 2, 3, 4]], jnp.int32)
    state = drafter.start(module.Prompt(tokens, valid), 3)
    np.testing.assert_array_equal(state.length, [2, 4])
    np.testing.assert_array_equal(state.tokens[0, :2], [1, 2])


def test_a_model_that_drafts_for_itself_is_always_right():
    """So its own state must have followed: every token accepted, over many windows and lags."""
    model, wanted = make_model("kda"), expected("kda")
    out = speculative_generate(model, PROMPTS, ModelDrafter(model), max_new_tokens=N)
    assert_same(out, wanted)
    np.testing.assert_array_equal(out.accepted, out.proposed)
    np.testing.assert_array_equal(np.asarray(out.lengths - out.accepted), [6] * B)


def test_a_drafting_model_rolls_back_what_was_wrong():
    """Its drafts are those of a full forward over the tokens that counted."""
    model = make_model("gated_delta_net")
    other = make_model("gated_delta_net", seed=1, pattern="M")
    out = speculative_generate(model, PROMPTS, ModelDrafter(other), max_new_tokens=N)
    assert_same(out, expected())
    drafter = jit_drafts(other)
    rows = [list(p) for p in PROMPTS]
    proposed = np.zeros(B, int)
    accepted = np.zeros(B, int)
    for b, row in enumerate(expected().tokens.tolist()):
        at = 0
        while at < N:
            drafts = drafter(rows[b] + row[: at + 1])[: N - at - 1]
            right = [x == y for x, y in zip(drafts, row[at + 1 :], strict=False)]
            good = right.index(False) if False in right else len(right)
            proposed[b] += len(drafts)
            accepted[b] += good
            at += 1 + good
    np.testing.assert_array_equal(out.proposed, proposed)
    np.testing.assert_array_equal(out.accepted, accepted)


@functools.cache
def make_heads(seed=0, **options):
    return filled(lambda: MTPHeads(16, **options, rngs=nnx.Rngs(0)), seed)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("model", "tokens"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Probe:
    """Proposes a right token where the newest one is the best of the hidden state's logits."""

    model: object
    tokens: jax.Array
    num_drafts = 1
    reads_hidden = True

    def start(self, prompt, capacity):
        return jnp.zeros((self.tokens.shape[0],), jnp.int32)

    def propose(self, state, turn):
        drafts = jnp.take_along_axis(self.tokens, state[:, None] + 1, axis=1, mode="clip")
        best = jnp.argmax(self.model.logits(turn.hidden), axis=-1)
        drafts = jnp.where((best == turn.token)[:, None], drafts, (drafts + 1) % V)
        return Drafts(drafts, jnp.ones_like(state)), state

    def observe(self, state, tokens, kept):
        return state + kept


def test_the_targets_hidden_state_reaches_the_drafter():
    """The one that the newest token is drawn from, after prompts of any lengths and any round."""
    model, tokens = make_model("gated_delta_net"), expected().tokens
    options = dict(return_state=True, capacity=32)
    out = speculative_generate(model, PROMPTS, Probe(model, tokens), max_new_tokens=11, **options)
    np.testing.assert_array_equal(out.tokens, tokens[:, :11])
    np.testing.assert_array_equal(out.accepted, [5] * B)
    np.testing.assert_array_equal(out.proposed, [5] * B)
    empty = np.zeros((B, 0), np.int32)
    rest = Probe(model, jnp.roll(tokens, -11, axis=1))
    out = speculative_generate(model, empty, rest, max_new_tokens=5, state=out.state, **options)
    np.testing.assert_array_equal(out.tokens, tokens[:, 11:16])
    np.testing.assert_array_equal(out.accepted, out.proposed)
    # Without one, as `generate` leaves a state, the first draft follows from zeros.
    state = dataclasses.replace(out.state, hidden=None)
    rest = Probe(model, jnp.roll(tokens, -16, axis=1))
    out = speculative_generate(model, empty, rest, max_new_tokens=5, state=state, **options)
    np.testing.assert_array_equal(out.tokens, tokens[:, 16:])
    assert (np.asarray(out.accepted) >= np.asarray(out.proposed) - 1).all()


@pytest.mark.parametrize("num_heads", [1, 2])
def test_heads_draft_what_they_are_defined_to(num_heads):
    """Greedy drafts of random heads, next to those of a plain loop."""
    model, heads = make_model("gated_delta_net"), make_heads(num_heads=num_heads, d_ff=8)
    drafter = MTPDrafter(heads, model)
    hidden = jax.random.normal(jax.random.key(0), (B, 16))
    token = jnp.array([3, 1, 2], jnp.int32)
    turn = module.Turn(token, token, token > 0, Sampling(), None, hidden)
    drafts, _ = drafter.propose((), turn)
    for k in range(3):
        head = heads.heads[min(k, len(heads.heads) - 1)]
        both = [head.hidden_norm(hidden), head.token_norm(model.embed(token))]
        x = head.in_proj(jnp.concatenate(both, -1))
        hidden = x + head.mlp(head.mlp_norm(x))
        token = jnp.argmax(model.logits(hidden), -1)
        np.testing.assert_array_equal(drafts.tokens[:, k], token)


def test_heads_learn_what_the_target_says_next():
    """Trained on the target's own continuations, they guess most of them; the target stays."""
    model = make_model("gated_delta_net")
    heads = MTPHeads(16, d_ff=32, rngs=nnx.Rngs(0))
    run = functools.partial(speculative_generate, model, PROMPTS, max_new_tokens=N)
    before = run(MTPDrafter(heads, model))
    assert_same(before, expected())
    rows = zip(PROMPTS, expected().tokens.tolist(), strict=True)
    tokens = jnp.array([[*prompt, *new][-N:] for prompt, new in rows])
    graphdef, params = nnx.split(heads)
    optimizer = optax.adam(1e-2)

    @jit
    def train(params, moments, model):
        def loss(params, model):
            return distillation_loss(nnx.merge(graphdef, params), model, tokens)

        value, (grads, of_model) = jax.value_and_grad(loss, argnums=(0, 1))(params, model)
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = optimizer.update(grads, moments)
        still = [jnp.any(g != 0) for g in jax.tree.leaves(of_model)]
        return optax.apply_updates(params, updates), moments, value, jnp.any(jnp.stack(still))

    moments, losses = optimizer.init(params), []
    for _ in range(150):
        params, moments, value, touched = train(params, moments, model)
        losses.append(float(value))
        assert not touched
    assert losses[-1] < 0.5 * losses[0]
    after = run(MTPDrafter(nnx.merge(graphdef, params), model))
    assert_same(after, expected())
    rate = [float(jnp.sum(out.accepted) / jnp.sum(out.proposed)) for out in (before, after)]
    assert rate[1] > max(0.5, 2 * rate[0]), rate


def test_rows_draft_as_much_as_pays():
    """A row that is always right goes on with all it has, one that is always wrong with few."""
    model, wanted = make_model("gated_delta_net"), expected()
    tokens = jnp.stack([wanted.tokens[0], (wanted.tokens[1] + 1) % V, wanted.tokens[2]])
    lengths = jnp.array([[3], [3], [0]], jnp.int32) * jnp.ones((B, N), jnp.int32)
    drafter = AdaptiveDrafter(Scripted(tokens, lengths), cost=0.25, memory=0.8)
    out = speculative_generate(model, PROMPTS, drafter, max_new_tokens=N)
    assert_same(out, wanted)
    np.testing.assert_array_equal(out.accepted > 0, [True, False, False])
    always = sum(min(3, N - 1 - i) for i in range(N))
    assert 0 < int(out.proposed[1]) < always / 3
    assert int(out.proposed[0]) == int(out.accepted[0]) >= 14
    assert int(out.proposed[2]) == 0


def test_the_length_that_pays():
    drafter = AdaptiveDrafter(NGramDrafter(num_drafts=4), cost=0.25, memory=0.5, prior=0.6)
    state = drafter.start(module.as_prompt([[1]] * 4), 8)
    state = state._replace(proposed=jnp.array([4, 4, 4, 0], jnp.int32))
    tokens = jnp.zeros((4, 5), jnp.int32)
    for kept in ([5, 1, 3, 1], [5, 1, 0, 1]):  # accepted 4 of 4, 0 of 4, 2 of 4 then ended, none
        state = drafter.observe(state, tokens, jnp.array(kept, jnp.int32))
    np.testing.assert_allclose(state.accepted, [6, 0, 2, 0])
    np.testing.assert_allclose(state.tested, [6, 1.5, 3, 0])
    rate = np.array([6.6 / 7, 0.6 / 2.5, 2.6 / 4, 0.6])
    drafts = np.arange(5)
    best = np.argmax(np.cumsum(rate[:, None] ** drafts, 1) / (1 + 0.25 * drafts), 1)
    np.testing.assert_array_equal(drafter.best_length(state), best)
    assert best[0] == 4 and best[1] == 0 and 0 < best[3] < 4


def test_fewer_than_no_drafts_are_none():
    script = jnp.ones((B, N), jnp.int32)
    drafter = AdaptiveDrafter(Scripted(script, -2 * script))
    state = drafter.start(module.as_prompt(PROMPTS), 8)
    drafts, state = drafter.propose(state, None)
    np.testing.assert_array_equal(drafts.lengths, [0] * B)
    state = drafter.observe(state, jnp.ones((B, 4), jnp.int32), jnp.ones(B, jnp.int32))
    np.testing.assert_array_equal(state.tested, [0] * B)


def jit_drafts(model):
    """tokens -> the three greedy tokens after them, each from a full forward."""

    def drafts(tokens):
        tokens = list(tokens)
        for _ in range(3):
            padded = np.zeros((1, 40), np.int32)
            padded[0, : len(tokens)] = tokens
            tokens.append(int(jnp.argmax(forward(model, jnp.asarray(padded))[0, len(tokens) - 1])))
        return tokens[-3:]

    return drafts


# The distribution


CHI_V, CHI_ROWS, CHI_N = 4, 6000, 4
CHI_PROMPT = [1, 2, 1, 3, 1]
CHI_MODEL = dict(vocab_size=CHI_V, replay_window=16)  # folding thousands of rows would take longest
PLAIN = dict(temperature=5.0, top_k=CHI_V, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
DISTRIBUTIONS = {  # of one structure, so that one program serves all
    "temperature": PLAIN,
    "truncated": {**PLAIN, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    "penalised": {**PLAIN, "repetition_penalty": 1.5},
}


def chi_drafter(name):
    if name == "n-gram":
        return NGramDrafter(num_drafts=2)
    if name == "adaptive heads":
        return AdaptiveDrafter(MTPDrafter(make_heads(), chi_model(), num_drafts=2), cost=0.4)
    return ModelDrafter(make_model("kda", seed=4, pattern="M", **CHI_MODEL), num_drafts=2)


@functools.cache
def chi_model():
    return make_model("mamba2", seed=3, **CHI_MODEL)


@functools.cache
def probabilities(options):
    """Of every continuation of N tokens under the target, in the order of base V numbers."""
    options = dict(options)
    rows = np.array(list(np.ndindex(*[CHI_V] * CHI_N)), np.int32)
    tokens = np.concatenate([np.tile(CHI_PROMPT, (len(rows), 1)), rows], axis=1).astype(np.int32)
    logits = forward(chi_model(), jnp.asarray(tokens))
    sampling = Sampling(**options).checked(len(rows))
    total = np.ones(len(rows))
    for i in range(CHI_N):
        before = tokens[:, : len(CHI_PROMPT) + i]
        seen = (before[:, :, None] == np.arange(CHI_V)).any(1)
        shaped = shape_logits(sampling, logits[:, before.shape[1] - 1], jnp.asarray(seen))
        p = np.asarray(jax.nn.softmax(shaped), np.float64)
        total *= p[np.arange(len(rows)), rows[:, i]]
    np.testing.assert_allclose(total.sum(), 1, rtol=1e-5)
    return total


def chi_square(drafter, options):
    """z score of the continuations' chi-square, pooled where few are expected; and acceptance."""
    out = speculative_generate(
        chi_model(),
        jnp.asarray([CHI_PROMPT] * CHI_ROWS),
        chi_drafter(drafter),
        max_new_tokens=CHI_N,
        key=jax.random.key(11),
        **options,
    )
    found = np.asarray(out.tokens) @ CHI_V ** np.arange(CHI_N)[::-1]
    counts = np.bincount(found, minlength=CHI_V**CHI_N)
    wanted = CHI_ROWS * probabilities(tuple(options.items()))
    if counts[wanted == 0].any():
        return np.inf, 0.0
    rare = wanted < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    freedom = len(wanted) - 1
    assert freedom >= 8
    statistic = ((counts - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
    accepted = float(jnp.sum(out.accepted) / jnp.sum(out.proposed))
    return (statistic - freedom) / np.sqrt(2 * freedom), accepted


@pytest.mark.parametrize("drafter", ["n-gram", "model", "adaptive heads"])
@pytest.mark.parametrize("options", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_tokens_are_distributed_as_the_targets(drafter, options):
    z, accepted = chi_square(drafter, options)
    assert abs(z) <= 3.5, z
    assert 0.1 <= accepted <= 0.9, accepted


def test_rows_depend_on_their_own_keys_alone():
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, CHI_V, (CHI_ROWS, len(CHI_PROMPT)))
    keys = jax.random.split(jax.random.key(5), CHI_ROWS)
    run = functools.partial(
        speculative_generate, chi_model(), drafter=chi_drafter("model"), max_new_tokens=CHI_N
    )
    out = run(jnp.asarray(prompts), key=keys, **PLAIN)
    order = rng.permutation(CHI_ROWS)
    moved = run(jnp.asarray(prompts[order]), key=keys[order], **PLAIN)
    np.testing.assert_array_equal(moved.tokens, out.tokens[order])
    np.testing.assert_array_equal(moved.accepted, out.accepted[order])


@pytest.mark.parametrize(
    "name, broken",
    [
        ("_uniform", lambda keys, positions: jnp.zeros(positions.shape)),
        ("_remainder", lambda p, q: p),
    ],
    ids=["accepts all", "does not subtract"],
)
def test_a_broken_acceptance_is_found(name, broken, monkeypatch):
    speculate = module._speculate.__wrapped__
    monkeypatch.setattr(module, "_speculate", jit(lambda *args: speculate(*args), static_argnums=5))
    monkeypatch.setattr(module, name, broken)
    z, _ = chi_square("model", DISTRIBUTIONS["temperature"])
    assert z > 10, z


# One loop, compiled once


def test_other_values_go_through_the_same_loop(monkeypatch):
    model = make_model("gated_delta_net")
    drafter = NGramDrafter()

    traced = []
    verify = type(model).verify_hidden
    monkeypatch.setattr(
        type(model), "verify_hidden", lambda *args, **kw: traced.append(1) or verify(*args, **kw)
    )

    def run(i):
        return speculative_generate(
            model,
            PROMPTS,
            drafter,
            max_new_tokens=np.array([N - i, N, 3]),
            capacity=32,
            key=jax.random.key(i),
            temperature=0.5 + i,
            stop_tokens=i,
        )

    run(0)
    assert len(traced) == 1  # checking the drafter before a state is donated costs no second one
    size = module._speculate._cache_size(), module._start_drafting._cache_size()
    for i in range(1, 4):
        run(i)
    assert size == (module._speculate._cache_size(), module._start_drafting._cache_size())


def test_one_trace_of_the_model_a_donated_cache_and_no_host(monkeypatch):
    model, traced = make_model("gated_delta_net"), []
    verify = type(model).verify_hidden
    monkeypatch.setattr(
        type(model), "verify_hidden", lambda *args, **kw: traced.append(1) or verify(*args, **kw)
    )
    prompt = module.as_prompt(PROMPTS)
    control, rows = start(model, prompt, 32, max_new_tokens=N, ragged=True)
    drafter = NGramDrafter()
    drafting = module._start_drafting(drafter, prompt, 32, True)
    lowered = module._speculate.lower(model, drafter, rows, drafting, control, True)
    assert len(traced) == 1
    size = sum(x.nbytes for x in jax.tree.leaves((rows.state.cache, drafting)))
    compiled = lowered.compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    text = compiled.as_text()
    assert "callback" not in text and "infeed" not in text and "outfeed" not in text
    out = compiled(model, drafter, rows, drafting, control)
    np.testing.assert_array_equal(out.rows.tokens[:, :N], expected().tokens)
    assert (np.asarray(out.proposed) > 0).any()


def test_stacked_models():
    stacked = make_model("mamba2", pattern="MM", scan_layers=True)
    prompt = jnp.asarray([PROMPTS[1]] * B)
    out = speculative_generate(stacked, prompt, ModelDrafter(stacked), max_new_tokens=N)
    np.testing.assert_array_equal(out.accepted, out.proposed)
    logits = forward(stacked, jnp.concatenate([prompt, out.tokens], axis=1))
    wanted = jnp.argmax(logits[:, prompt.shape[1] - 1 : -1], axis=-1)
    np.testing.assert_array_equal(out.tokens, wanted)


# Arguments


def test_an_empty_batch_gives_empty_arrays():
    model = make_model("gated_delta_net")
    out = speculative_generate(model, [], NGramDrafter(), max_new_tokens=4)
    assert out.tokens.shape == (0, 4)
    assert out.proposed.shape == out.accepted.shape == (0,)


def test_impossible_arguments_raise():
    model = make_model("gated_delta_net")
    with pytest.raises(ValueError, match="4 drafts need a model with max_tokens=5, found max_tok"):
        speculative_generate(model, PROMPTS, NGramDrafter(num_drafts=4), max_new_tokens=2)
    short = make_model("gated_delta_net", max_tokens=2)
    with pytest.raises(ValueError, match="3 drafts need max_tokens=4 of the draft model, found"):
        speculative_generate(model, PROMPTS, ModelDrafter(short), max_new_tokens=2)
    for drafter in (ModelDrafter(3), AdaptiveDrafter(MTPDrafter(make_heads(), 3))):
        with pytest.raises(TypeError, match="the drafter's model must be a HybridLM, found int"):
            speculative_generate(model, PROMPTS, drafter, max_new_tokens=2)
    other = make_model("gated_delta_net", vocab_size=V + 1, pattern="M")
    for drafter in (ModelDrafter(other), AdaptiveDrafter(MTPDrafter(make_heads(), other))):
        with pytest.raises(ValueError, match=f"vocab_size={V}, found vocab_size={V + 1}"):
            speculative_generate(model, PROMPTS, drafter, max_new_tokens=2)
    with pytest.raises(TypeError, match="state must be a GenerateState, found int"):
        speculative_generate(model, PROMPTS, NGramDrafter(), max_new_tokens=2, state=3)
    with pytest.raises(ValueError, match="needs a key"):
        speculative_generate(model, PROMPTS, NGramDrafter(), max_new_tokens=2, temperature=1.0)
    for options, message in [
        (dict(num_drafts=0), "num_drafts must be"),
        (dict(least=4), "least must be at most longest"),
    ]:
        with pytest.raises(ValueError, match=message):
            NGramDrafter(**options)
    for options, message in [
        (dict(cost=0.0), "cost must be above 0, found 0.0"),
        (dict(memory=1.0), "memory must be in"),
        (dict(prior=1.0), "prior must be in"),
    ]:
        with pytest.raises(ValueError, match=message):
            AdaptiveDrafter(NGramDrafter(), **options)
    for value, found in [("a", "'a'"), (None, "None"), (True, "True"), (jnp.float32(0.1), "Array")]:
        with pytest.raises(TypeError, match=f"cost must be a number, found {found}"):
            AdaptiveDrafter(NGramDrafter(), cost=value)
    with pytest.raises(TypeError, match=r"memory must be a number, found \w+Tracer"):
        jax.eval_shape(lambda x: AdaptiveDrafter(NGramDrafter(), memory=x).start, jnp.float32(0.1))
    with pytest.raises(TypeError, match="the drafter's heads must be a MTPHeads, found NoneType"):
        speculative_generate(model, PROMPTS, MTPDrafter(None, model), max_new_tokens=2)
    with pytest.raises(ValueError, match="a target with d_model=8, found d_model=16"):
        wide = MTPDrafter(MTPHeads(8, rngs=nnx.Rngs(0)), model)
        speculative_generate(model, PROMPTS, wide, max_new_tokens=2)
    with pytest.raises(ValueError, match="num_heads must be at least 1, found 0"):
        MTPHeads(8, num_heads=0, rngs=nnx.Rngs(0))
    for drafter, message in [
        (None, "found NoneType without num_drafts, start, propose, observe"),
        (model, r"such as NGramDrafter\(\), found HybridLM without num_drafts"),
        (AdaptiveDrafter(3), r"such as NGramDrafter\(\), found int without num_drafts"),
        (NGramDrafter, r"such as NGramDrafter\(\), found the class NGramDrafter"),
        (
            type(
                "Mine", (), vars(NGramDrafter()) | dict.fromkeys(("start", "propose", "observe"))
            )(),
            "must be a pytree, found .*: register its class",
        ),
    ]:
        with pytest.raises(TypeError, match=message):
            speculative_generate(model, PROMPTS, drafter, max_new_tokens=2)
    for wrong, found in [
        (3, "int without config, init_cache, prefill_hidden, logits, verify_hidden, commit"),
        (NGramDrafter(), "NGramDrafter without"),
        (type(model), "the class HybridLM"),
    ]:
        message = f"^model must be a HybridLM or a module with its methods, found {found}"
        with pytest.raises(TypeError, match=message):
            speculative_generate(wrong, PROMPTS, NGramDrafter(), max_new_tokens=2)
    together = GenerateState(model.init_cache(B, 64, ragged=False), jnp.zeros((B, V)))
    with pytest.raises(ValueError, match="state must have a pointer for every row"):
        speculative_generate(model, PROMPTS, NGramDrafter(), max_new_tokens=2, state=together)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (
            dict(tokens=(B, 2)),
            ValueError,
            r"Drafts.tokens must have shape \(3, 3\), found \(3, 2\)",
        ),
        (
            dict(lengths=(B, 1)),
            ValueError,
            r"Drafts.lengths must have shape \(3,\), found \(3, 1\)",
        ),
        (dict(logits=(B, 3, 7)), ValueError, "found .* does the drafter have the target's vocab"),
        (dict(dtype=jnp.float32), TypeError, "Drafts.tokens must be integer, found float32"),
    ],
)
def test_drafts_of_wrong_shapes_or_dtypes_raise(options, error, message):
    @jax.tree_util.register_static
    class Wrong(Scripted):
        def __init__(self):
            pass

        def start(self, prompt, capacity):
            return ()

        def propose(self, state, turn):
            tokens = jnp.ones(options.get("tokens", (B, 3)), options.get("dtype", jnp.int32))
            lengths = jnp.ones(options.get("lengths", (B,)), jnp.int32)
            logits = jnp.zeros(options["logits"]) if "logits" in options else None
            return Drafts(tokens, lengths, logits), state

    model = make_model("gated_delta_net")
    with pytest.raises(error, match=message):
        speculative_generate(model, PROMPTS, Wrong(), max_new_tokens=N)


def test_what_raises_does_not_cost_the_state():
    """It is donated, but to a loop that runs."""
    model, empty = make_model("gated_delta_net"), np.zeros((B, 0), np.int32)

    def state(decode="replay"):
        cache = model.init_cache(B, 64, decode=decode)
        return GenerateState(cache, jnp.zeros((B, V)))

    short = make_model("gated_delta_net", max_tokens=2)
    wrong = Drafts(np.ones((B, 1), np.int32), np.ones(B, np.int32))
    heads = MTPDrafter(MTPHeads(8, rngs=nnx.Rngs(0)), model)
    for held, drafter in [
        (state(), ModelDrafter(short)),
        (state(), heads),
        (state("recurrent"), NGramDrafter()),
    ]:
        with pytest.raises(ValueError, match=r"max_tokens=4|d_model=8|cannot roll back"):
            speculative_generate(model, empty, drafter, max_new_tokens=2, state=held)
        assert not any(x.is_deleted() for x in jax.tree.leaves(held))
    held = state()
    for broken, message in [
        (dict(propose=lambda *_: 1 / 0), "division by zero"),
        (dict(propose=lambda self, state, turn: (wrong, state)), r"\(3, 3\), found \(3, 1\)"),
        (dict(propose=lambda *_: wrong), r"propose must return \(Drafts, state\), found Drafts"),
        (dict(propose=lambda *_: [wrong, 1]), r"\(Drafts, state\), found list"),
        (dict(propose=lambda *_: (1, wrong)), r"\(Drafts, state\), found \(int, Drafts\)"),
        (dict(observe=lambda self, state, tokens, kept: state.tokens), "pytree structure"),
    ]:
        drafter = jax.tree_util.register_static(type("Broken", (NGramDrafter,), broken))()
        with pytest.raises((ArithmeticError, TypeError, ValueError), match=message):
            speculative_generate(model, empty, drafter, max_new_tokens=2, state=held)
        assert not any(x.is_deleted() for x in jax.tree.leaves(held))
    wide = make_model("gated_delta_net", vocab_size=V + 1)
    with pytest.raises(ValueError, match=r"state.logits must be array\[3, 25\], found"):
        speculative_generate(wide, empty, NGramDrafter(), max_new_tokens=2, state=held)
    assert not any(x.is_deleted() for x in jax.tree.leaves(held))


def test_heads_of_another_target_raise():
    """Also where they fit the model that they were given."""
    model = make_model("gated_delta_net")
    heads = filled(lambda: MTPHeads(8, rngs=nnx.Rngs(0)), 0)
    other = make_model("gated_delta_net", d_model=8)
    with pytest.raises(ValueError, match=r"d_model=8, found .* hidden states of 16"):
        speculative_generate(model, PROMPTS, MTPDrafter(heads, other), max_new_tokens=2)
    with pytest.raises(ValueError, match="d_model=8, found a model with d_model=16"):
        distillation_loss(heads, model, jnp.ones((1, 6), jnp.int32))
    with pytest.raises(TypeError, match="heads must be a MTPHeads, found HybridLM"):
        distillation_loss(other, heads, jnp.ones((1, 6), jnp.int32))
    for call, name in [
        (lambda: distillation_loss(heads, other, [[1] * 6]), "tokens"),
        (lambda: heads(other, [[1.0] * 8], jnp.ones(1, jnp.int32)), "hidden"),
        (lambda: heads(other, jnp.ones((1, 8)), [1]), "tokens"),
    ]:
        with pytest.raises(TypeError, match=f"{name} must be an array, found list"):
            call()
    with pytest.raises(ValueError, match="num_drafts must be at least 1, found 0"):
        distillation_loss(heads, other, jnp.ones((1, 6), jnp.int32), num_drafts=0)


def test_it_is_reached_through_the_package():
    assert rs.speculative_generate is speculative_generate
    assert "speculative_generate" in dir(rs)
