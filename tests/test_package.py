"""What `import replayssm_jax as rs` gives, and what it leaves alone."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

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
    with pytest.raises(TypeError, match=r"model must be a HybridLM .*, found NoneType"):
        rs.generate(None, [], max_new_tokens=3)
    assert {"generate", "stream", "layers", "models", "step"} <= set(dir(rs))


def test_other_names_raise():
    with pytest.raises(AttributeError, match="has no attribute 'generated'"):
        _ = rs.generated


def test_the_examples_import_what_their_extra_installs():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["examples"]
    given = {re.split(r"\W", name)[0] for name in wanted}
    given |= {"absl", "replayssm_jax", *sys.stdlib_module_names}  # chex itself needs absl
    scripts = list((root / "examples").glob("*.py"))
    given |= {script.stem for script in scripts}
    for script in scripts:
        for node in ast.parse(script.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", node.names[0].name)
                assert module.split(".")[0] in given, f"{script.name} imports {module}"
