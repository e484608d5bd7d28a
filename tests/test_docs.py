"""What the documents promise: their code runs, the file tree is the tree, links lead somewhere, named tests exist."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_ring_attention

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").rglob("*.md"))
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [path for path in DOCUMENTS if path.parent != ROOT and PYTHON_BLOCK.search(path.read_text())]
FAST_PAGES = ("multihost.md", "packing.md")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix().removeprefix("docs/")


@pytest.mark.fast
def test_the_quick_start_runs_as_printed():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "doctest", str(ROOT / "README.md")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    blocks = PYTHON_BLOCK.findall((ROOT / "README.md").read_text())
    assert blocks
    assert all(block.startswith(">>> ") for block in blocks)  # what doctest does not see, it does not run


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=name_of(page), marks=[pytest.mark.fast] * (page.name in FAST_PAGES)) for page in PAGES]
)
def test_the_python_blocks_of_a_page_run_in_order(page):
    text = page.read_text()
    namespace = {"__name__": "__main__"}  # a module that exists, where classes look themselves up
    for block in PYTHON_BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)


@pytest.mark.fast
def test_code_on_pages_is_python_that_runs_or_named_otherwise():
    for document in DOCUMENTS:
        opening = re.findall(r"^ *```(.*)$", document.read_text(), re.MULTILINE)[::2]
        assert set(opening) <= {"python", "shell", "text"}, f"{document.name} has blocks of {sorted(set(opening))}"


@pytest.mark.fast
def test_the_file_tree_names_what_exists_and_leaves_no_module_out():
    text = (ROOT / "README.md").read_text()
    tree = text[text.index("## Where things are") : text.index("## Limits")]
    named = set(re.findall(r"[\w/]+\.py", tree))
    modules = {path.name for path in (ROOT / "jax_ring_attention").glob("*.py")} - {"__init__.py"}
    scripts = {path.name for path in (ROOT / "scripts").glob("*.py")}
    assert named >= modules | scripts
    assert all(list(ROOT.rglob(name)) for name in named)


@pytest.mark.fast
@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_between_documents_lead_somewhere(document):
    for target, anchor in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", document.read_text()):
        if target.startswith("https://"):
            continue
        path = document.parent / target if target else document
        assert path.exists(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if anchor else []
        anchors = {"#" + re.sub(r"[^\w]+", "-", heading.lower()).strip("-") for heading in headings}
        assert not anchor or anchor in anchors, target + anchor


@pytest.mark.fast
def test_the_site_lists_every_page_once():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r": ([\w/]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(name_of(path) for path in DOCUMENTS if path.parent != ROOT)


@pytest.mark.fast
def test_the_site_documents_every_public_name():
    reference = "".join(path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    documented = re.findall(r"^::: jax_ring_attention\.([\w.]+)$", reference, re.MULTILINE)
    for name in documented:  # a module, or a name in one
        module, _, member = f"jax_ring_attention.{name}".rpartition(".")
        path = ROOT / "jax_ring_attention" / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or hasattr(importlib.import_module(module), member), name
    public = set(jax_ring_attention.__all__) - {"RESIDUAL_NAMES"}  # a constant, which has no docstring
    assert {name.rpartition(".")[2] for name in documented} >= public
    assert "`RESIDUAL_NAMES`" in reference


@pytest.mark.fast
def test_tests_that_the_documents_name_exist():
    named = 0
    for document in DOCUMENTS:
        for file, test in re.findall(r"(test_\w+\.py)::(\w+)", document.read_text()):
            assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{document.name} names {file}::{test}"
            named += 1
    assert named > 50


@pytest.mark.fast
def test_make_targets_that_the_documents_name_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        for target in re.findall(r"^ +make ([\w-]+)", document.read_text(), re.MULTILINE):
            assert target in targets, f"{document.name} names make {target}"
