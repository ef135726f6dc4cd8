"""Random schedules of a model's cache: drafts, acceptances, aborts, forks and slots.

Whatever came before, logits are those of the training forward over what the row holds: its
committed tokens, and its drafts up to the one looked at.
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import (
    FAMILIES,
    V,
    assert_close,
    commit,
    forward,
    insert,
    make_model,
    prefill,
    reset,
    state_of,
    step,
    take,
    verify,
)

B, SIZE, DRAFTS, PROMPT = 3, 48, 4, 5
CASES = [(family, "replay", None) for family in FAMILIES]
CASES += [("gated_delta_net", "snapshot", None), ("kda", "replay", "int8")]


@dataclasses.dataclass
class Row:
    tokens: list[int]
    drafts: list[int]


class Schedule:
    """A cache and, for each of its rows, the tokens that it must hold."""

    def __init__(self, family, decode, seed, read_dtype=None):
        self.model = make_model(family, read_dtype=read_dtype)
        self.limit = 2e-2 if read_dtype else 3e-5  # what outputs see of a copy's rounding
        self.rng = np.random.default_rng(seed)
        self.cache = self.model.init_cache(B, SIZE, decode=decode)
        self.rows = [Row([], []) for _ in range(B)]
        self.saved, self.saved_rows = self.cache, copy.deepcopy(self.rows)

    def run(self, operations):
        for name, values in operations:
            getattr(self, name)(np.asarray(values))
            position = [len(row.tokens) for row in self.rows]
            pending = [len(row.drafts) for row in self.rows]
            np.testing.assert_array_equal(self.cache.progress.position, position)
            np.testing.assert_array_equal(self.cache.progress.pending, pending)
        self.step(np.ones(B, int))  # nothing that was dropped has left a trace
        if self.cache.decode == "replay":
            self.check_state()

    def draw(self, counts, width):
        """Tokens [B, width], of each row as many as there is room for; the rest would be wrong."""
        room = [SIZE - len(row.tokens) for row in self.rows]
        counts = np.clip(counts, 0, np.minimum(room, width)).astype(np.int32)
        return self.rng.integers(0, V, (B, width)).astype(np.int32), counts

    def check(self, logits, new, counts):
        """`logits` [B, T, V] of the first `counts` of `new` behind the committed tokens."""
        padded = np.zeros((B, SIZE), np.int32)
        for row, line, tokens, n in zip(self.rows, padded, new, counts, strict=True):
            held = [*row.tokens, *tokens[:n]]
            line[: len(held)] = held
        expected = forward(self.model, jnp.asarray(padded))
        for b, (row, n) in enumerate(zip(self.rows, counts, strict=True)):
            at = len(row.tokens)
            assert_close(logits[b, :n], expected[b, at : at + n], self.limit)
            assert not np.asarray(logits[b, n:]).any()

    def check_state(self):
        """The first layer's, which no read copy has a part in, equals that of a prefill."""
        padded, counts = np.zeros((B, SIZE), np.int32), np.zeros(B, np.int32)
        for b, row in enumerate(self.rows):
            counts[b] = len(row.tokens)
            padded[b, : counts[b]] = row.tokens
        _, fresh = prefill(self.model, padded, self.model.init_cache(B, SIZE), counts)
        found, expected = (state_of(self.model, cache) for cache in (self.cache, fresh))
        for b in range(B):
            assert_close(found[b], expected[b])

    def verify(self, lengths):
        new, counts = self.draw(lengths, DRAFTS)
        logits, self.cache = verify(self.model, new, self.cache, counts)
        self.check(logits, new, counts)
        for row, tokens, n in zip(self.rows, new.tolist(), counts, strict=True):
            row.drafts = tokens[:n] if n else row.drafts

    def commit(self, accepted):
        self.cache = commit(self.model, self.cache, jnp.asarray(accepted, jnp.int32))
        for row, n in zip(self.rows, accepted, strict=True):
            row.tokens, row.drafts = row.tokens + row.drafts[:n], []

    def step(self, lengths):
        new, counts = self.draw(np.minimum(lengths, 1), 1)
        logits, self.cache = step(self.model, new[:, 0], self.cache, counts)
        self.check(logits[:, None], new, counts)
        for row, tokens, n in zip(self.rows, new.tolist(), counts, strict=True):
            row.tokens, row.drafts = row.tokens + tokens[:n], []

    def prefill(self, lengths):
        new, counts = self.draw(lengths, PROMPT)
        logits, self.cache = prefill(self.model, new, self.cache, counts)
        self.check(logits, new, counts)
        for row, tokens, n in zip(self.rows, new.tolist(), counts, strict=True):
            row.tokens, row.drafts = row.tokens + tokens[:n], [] if n else row.drafts

    def fork(self, values):
        """Every row becomes a copy of its source; -1 gives an empty row."""
        self.cache, self.rows = self.taken(values - 1)

    def save(self, values):
        self.saved, self.saved_rows = self.taken(values - 1)

    def taken(self, sources):
        sources = np.minimum(sources, B - 1)
        rows = [copy.deepcopy(self.rows[i]) if i >= 0 else Row([], []) for i in sources]
        return take(self.model, self.cache, jnp.asarray(sources)), rows

    def insert(self, values):
        """Saved rows into slots; -1 and slots out of range touch nothing."""
        again = [value in values[:i] for i, value in enumerate(values)]
        slots = np.where(again, -1, values - 1)
        self.cache = insert(self.model, self.cache, jnp.asarray(slots), self.saved)
        for slot, row in zip(slots, self.saved_rows, strict=True):
            if 0 <= slot < B:
                self.rows[slot] = copy.deepcopy(row)

    def reset(self, values):
        where = values > 2
        self.cache = reset(self.model, self.cache, jnp.asarray(where))
        self.rows = [Row([], []) if w else r for w, r in zip(where, self.rows, strict=True)]


# Drafts and what becomes of them come up most; a verify after a verify is an abort.
NAMES = ("verify", "commit") * 4 + ("step", "prefill", "fork", "save", "insert", "reset")
OPERATION = st.tuples(
    st.sampled_from(NAMES), st.lists(st.integers(0, DRAFTS), min_size=B, max_size=B)
)


@pytest.mark.parametrize("family, decode, read_dtype", CASES)
def test_any_schedule_equals_plain_decoding(family, decode, read_dtype):
    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(st.lists(OPERATION, min_size=10, max_size=24), st.integers(0, 2**31))
    def run(operations, seed):
        Schedule(family, decode, seed, read_dtype).run(operations)

    run()


@pytest.mark.parametrize("read_dtype", [None, "int8"])
def test_a_schedule_with_everything_in_it(read_dtype):
    """And that the schedules above can fail: a cache whose pointer is one off is found."""
    operations = [
        ("prefill", [5, 3, 1]),
        ("verify", [4, 4, 2]),
        ("save", [1, 2, 3]),
        ("commit", [2, 0, 1]),
        ("verify", [4, 4, 4]),
        ("fork", [1, 1, 3]),
        ("commit", [4, 1, 0]),
        ("verify", [3, 4, 0]),
        ("verify", [1, 2, 4]),
        ("commit", [1, 2, 3]),
        ("reset", [0, 0, 4]),
        ("insert", [3, 0, 4]),
        ("commit", [1, 1, 2]),
        ("step", [1, 0, 1]),
    ]
    schedule = Schedule("kda", "replay", 0, read_dtype)
    schedule.run(operations)
    pointer = schedule.cache.pointer
    moved = dataclasses.replace(pointer, length=pointer.length - 1)
    schedule.cache = dataclasses.replace(schedule.cache, pointer=moved)
    with pytest.raises(AssertionError):
        schedule.step(np.ones(B, int))


def test_rows_of_a_saved_cache_are_as_they_were():
    """Forks own what they hold: going on with the parent does not change them."""
    schedule = Schedule("mamba2", "replay", 3)
    schedule.run([("prefill", [5, 4, 3]), ("verify", [4, 2, 3]), ("save", [1, 2, 3])])
    before = jax.tree.map(np.array, schedule.saved)
    schedule.run([("commit", [4, 2, 3]), ("verify", [4, 4, 4]), ("commit", [4, 4, 4])] * 3)
    jax.tree.map(np.testing.assert_array_equal, schedule.saved, before)
