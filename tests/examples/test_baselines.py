import gzip
import itertools

import numpy as np
import pytest
from baselines import NGramModel, gzip_bits_per_byte, pack
from stdlib_text import Document, as_stream

TEXT = [Document("a", b"abracadabra abracadabra " * 8), Document("b", b"the cadabra of abra\n" * 5)]


def keys_after(context: bytes) -> np.ndarray:
    keys = [int.from_bytes(context + bytes([byte]), "big") for byte in range(256)]
    return np.array(keys, np.uint64)


@pytest.mark.parametrize("order", [1, 2, 3, 6, 8])
def test_probabilities_sum_to_one_after_any_context(order):
    model = NGramModel(TEXT, order=order)
    for context in (b"abracad", b"\0\0\0\0\0\0\0", b"zzzzabr", b"qqqqqqq", b"\xff" * 7):
        probabilities = model.probabilities(keys_after(context[8 - order :]))
        assert np.all(probabilities > 0)
        np.testing.assert_allclose(probabilities.sum(), 1.0, rtol=1e-12)


def test_longer_contexts_help_on_repetitive_text_and_random_bytes_cost_eight_bits():
    unigram, trigram = (NGramModel(TEXT, order=n).bits_per_byte(TEXT) for n in (1, 3))
    assert trigram < 0.5 * unigram < 0.5 * 4
    noise = np.random.default_rng(0).integers(1, 256, 20_000, dtype=np.uint8).tobytes()
    assert 7.9 < NGramModel([Document("n", noise)], order=1).bits_per_byte(TEXT) < 8.5


def test_packed_keys_do_not_reach_into_the_document_before():
    stream = as_stream([Document("a", b"xyz"), Document("b", b"uv")])
    assert [key.item().to_bytes(4, "big") for key in pack(stream, 4)] == [
        b"\0\0\0\0", b"\0\0\0x", b"\0\0xy", b"\0xyz", b"\0\0\0\0", b"\0\0\0u", b"\0\0uv",
    ]  # fmt: skip


def test_bits_per_byte_is_the_mean_over_documents_of_the_chain_rule():
    model = NGramModel(TEXT, order=3)
    document = Document("c", b"cabra")
    padded = b"\0\0" + document.text
    expected = [
        -np.log2(model.probabilities(keys_after(padded[i : i + 2]))[padded[i + 2]])
        for i in range(len(document.text))
    ]
    np.testing.assert_allclose(model.bits_per_byte([document]), np.mean(expected), rtol=1e-12)


@pytest.mark.parametrize("order", [0, 9])
def test_order_out_of_range_is_an_error(order):
    with pytest.raises(ValueError, match=f"1 to 8, got {order}"):
        NGramModel(TEXT, order=order)


def test_gzip_counts_each_file_alone():
    sizes = [len(gzip.compress(document.text, 9)) for document in TEXT]
    total = sum(len(document.text) for document in TEXT)
    assert gzip_bits_per_byte(TEXT) == 8 * sum(sizes) / total
    pairs = list(itertools.chain(TEXT, TEXT))
    assert gzip_bits_per_byte(pairs) == gzip_bits_per_byte(TEXT)
