"""What the documents promise: the quick start runs, the file tree is the tree, links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.fast
def test_the_quick_start_runs_as_printed():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "doctest", str(ROOT / "README.md")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n>>> bool(" in (ROOT / "README.md").read_text()


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
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target


@pytest.mark.fast
def test_make_targets_that_the_documents_name_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        for target in re.findall(r"^ +make ([\w-]+)", document.read_text(), re.MULTILINE):
            assert target in targets, f"{document.name} names make {target}"
