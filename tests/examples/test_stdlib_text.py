import numpy as np
import pytest
import stdlib_text
from stdlib_text import Document


@pytest.fixture(scope="module")
def corpus():
    return stdlib_text.load_corpus()


def test_split_is_disjoint_and_both_sides_are_real(corpus):
    sides = corpus.train, corpus.held_out
    train, held_out = ({document.name for document in side} for side in sides)
    assert train.isdisjoint(held_out)
    assert sum(len(document.text) for document in corpus.train) > 2_000_000
    assert sum(len(document.text) for document in corpus.held_out) > 200_000
    assert not any(name.startswith(("test/", "site-packages/")) for name in train | held_out)


def test_split_depends_on_the_module_name_alone():
    # Written down: a change would put held-out text of shipped weights into the training set.
    held_out = ["copy.py", "random.py", "json/__init__.py", "unittest/mock.py", "uuid.py"]
    train = ["argparse.py", "json/decoder.py", "collections/__init__.py", "typing.py", "ast.py"]
    assert all(map(stdlib_text.is_held_out, held_out))
    assert not any(map(stdlib_text.is_held_out, train))
    module_name = stdlib_text.module_name
    assert module_name("sysconfig.py") == module_name("sysconfig/__init__.py") == "sysconfig"


def test_documents_are_ordered_and_unusable_files_are_left_out(source_tree):
    (source_tree / "latin.py").write_bytes(b"# \xe9\n")
    (source_tree / "nul.py").write_bytes(b"x = 1\0\n")
    (source_tree / "empty.py").write_bytes(b"")
    (source_tree / "tests").mkdir()
    (source_tree / "tests" / "test_it.py").write_text("assert True\n")
    names = [document.name for document in stdlib_text.read_documents(source_tree)]
    assert names == sorted(names)
    assert len(names) == 60


def test_missing_source_is_an_error_that_names_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        stdlib_text.load_corpus(tmp_path)


def test_windows_score_every_byte_once_with_enough_context():
    rng = np.random.default_rng(0)
    documents = [
        Document(str(size), rng.integers(1, 256, size, dtype=np.uint8).tobytes())
        for size in (1, 7, 8, 9, 30)
    ]
    windows = stdlib_text.held_out_windows(documents, 8)
    targets = windows.tokens[:, 1:][windows.scored]
    assert targets.tobytes() == b"".join(document.text for document in documents)
    starts_document = windows.tokens[:, 0] == stdlib_text.DOCUMENT_START
    assert starts_document.sum() == len(documents)
    assert not windows.scored[~starts_document, :4].any()


def test_chosen_documents_are_whole_and_fit():
    documents = [Document(f"m{i}.py", b"x" * (10 + i)) for i in range(20)]
    chosen = stdlib_text.choose_documents(documents, 100)
    assert set(chosen) < set(documents)
    assert 50 < sum(len(document.text) for document in chosen) <= 100
    assert len(stdlib_text.choose_documents(documents, 1)) == 1
