"""What `import replayssm_jax as rs` gives, and what it leaves alone."""

import inspect
import subprocess
import sys

import pytest

import replayssm_jax as rs


def run(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_core_imports_without_flax():
    run(
        "import sys, replayssm_jax as rs; dir(rs); rs.step; "
        "found = {'flax', 'torch', 'transformers'} & set(sys.modules); assert not found, found"
    )


@pytest.mark.parametrize(
    "before", ["", "import replayssm_jax.generate", "from replayssm_jax.generate import generate"]
)
def test_generate_is_there_whatever_was_imported_before(before):
    """Also as the module of that name, which an import makes an attribute of the package."""
    run(
        f"{before}\nimport replayssm_jax as rs\n"
        "assert callable(rs.generate) and callable(rs.generate.generate)\n"
        "assert rs.stream is rs.generate.stream\n"
        "from replayssm_jax.generate import generate\n"
        "assert rs.generate.generate is generate and callable(rs.generate)\n"
        "assert rs.models.HybridLM and rs.layers.Mamba2"
    )


def test_generate_is_called_through_the_package():
    assert inspect.signature(rs.generate) == inspect.signature(rs.generate.generate)
    assert rs.generate(None, [], max_new_tokens=3).tokens.shape == (0, 3)
    assert {"generate", "stream", "layers", "models", "step"} <= set(dir(rs))


def test_other_names_raise():
    with pytest.raises(AttributeError, match="has no attribute 'generated'"):
        _ = rs.generated
