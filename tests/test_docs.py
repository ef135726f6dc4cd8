"""The documentation site: its blocks run, its reference is complete, its pages are reachable."""

import importlib
import inspect
import re

import pytest
from documents import ROOT, python_blocks, run_blocks

import replayssm_jax as rs
from replayssm_jax import drafters, generate, layers, models, speculative

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
REFERENCE = re.findall(r"^::: (\S+)$", TEXT, re.M)


def page_name(page):
    return page.relative_to(DOCS).with_suffix("").as_posix()


def pages_with_blocks():
    for page in PAGES:
        if python_blocks(page):
            marks = [pytest.mark.slow] if page.parent.name == "users" else []
            yield pytest.param(page, marks=marks, id=page_name(page))


@pytest.mark.parametrize("page", list(pages_with_blocks()))
def test_blocks_run_from_top_to_bottom(page):
    run_blocks(python_blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_page_is_in_the_navigation_and_says_something(page):
    assert f": {page.relative_to(DOCS)}\n" in (ROOT / "mkdocs.yml").read_text()
    if page.parent.name == "users":
        assert python_blocks(page)
        assert "## What may surprise you" in page.read_text()


def test_tests_that_pages_name_exist():
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT))
    assert len(named) > 15
    for path, name in named:
        source = (ROOT / path).read_text()
        assert not name or re.search(rf"^ *def {name}\(", source, re.M), (path, name)


def resolve(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def test_reference_names_everything_public():
    public = [getattr(rs, name) for name in rs.__all__]
    for module in (layers, models):
        public += [x for x in vars(module).values() if inspect.isclass(x) or inspect.isfunction(x)]
    public += [generate.generate, generate.stream, speculative.speculative_generate]
    public += [drafters.Drafter, drafters.NGramDrafter, drafters.ModelDrafter]
    public += [drafters.MTPDrafter, drafters.AdaptiveDrafter]
    documented = [resolve(path) for path in REFERENCE]
    assert not [x for x in public if x not in documented]
    assert not [path for path in REFERENCE if inspect.ismodule(resolve(path))]
    assert len(REFERENCE) == len(set(REFERENCE))


def documented_arguments(doc):
    """Names before the colons of an Args section; one line may name several."""
    section = re.search(r"^Args:\n((?: .*\n|\n)+)", inspect.cleandoc(doc) + "\n", re.M)
    lines = re.findall(r"^  (\S.*?):(?: |$)", section[1], re.M) if section else []
    return {name.strip().lstrip("*") for line in lines for name in line.split(",")}


@pytest.mark.parametrize("path", REFERENCE)
def test_docstrings_document_arguments_that_exist(path):
    target = resolve(path)
    assert inspect.getdoc(target)
    members = [target]
    if inspect.isclass(target):
        members += [x for n, x in vars(target).items() if inspect.isfunction(x) and n[0] != "_"]
    for member in members:
        named = documented_arguments(member.__doc__ or "")
        function = member.__init__ if inspect.isclass(member) else member
        assert named <= set(inspect.signature(function).parameters), member
