import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def source_tree(tmp_path):
    """A small source tree with files on both sides of the split."""
    from stdlib_text import is_held_out

    root = tmp_path / "lib"
    names = [f"package/module_{i}.py" for i in range(60)]
    assert {is_held_out(name) for name in names} == {True, False}
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def function_{i}(x):\n    return x + {i}\n\n\nprint(function_{i}({i}))\n")
    return root
