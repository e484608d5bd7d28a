"""What the code promises about itself: import direction, size, documentation, typing marker."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import jax_ring_attention

PACKAGE = Path(jax_ring_attention.__file__).parent
NAME = PACKAGE.name
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts != ("__init__.py",)
}

#: A module imports only from lower levels. A folder stands for the modules in it.
LEVELS = {
    "compat": 0,
    "stats": 0,
    "layouts": 0,
    "grid": 0,
    "schedule": 1,
    "topology": 1,
    "masks": 2,
    "kernels.contract": 3,
    "kernels": 4,
    "arguments": 4,
    "shard": 4,
    "chunk": 5,
    "ring": 5,
    "fused": 6,
    "vjp": 7,
    "sharded": 7,
    "api": 8,
    "layer": 9,
    "integrations": 9,
    "testing": 9,
    "cli.blocks": 10,
    "cli.console": 10,
    "cli.hardware": 10,
    "cli.cost": 10,
    "cli.pictures": 11,
    "cli.check": 11,
    "cli.plan": 12,
    "cli.explain": 12,
    "cli.main": 13,
    "__main__": 14,
}


def level(module: str) -> int | None:
    return LEVELS.get(module, LEVELS.get(module.split(".")[0]))


def kernel_of(module: str) -> str | None:
    """A kernel is a module of `kernels`, or a folder of them."""
    parts = module.split(".")
    return parts[1] if parts[0] == "kernels" and parts[1:] not in ([], ["__init__"], ["contract"]) else None


def imports(path: Path) -> list[str]:
    """Full dotted names of everything that a module imports, wherever in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively; write the full name"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def package_imports(path: Path) -> set[str]:
    """Modules of this package that `path` imports, the package's own `__init__` as ''."""
    found = set()
    for name in imports(path):
        if name.split(".")[0] != NAME:
            continue
        inner = name.split(".")[1:]
        while inner and ".".join(inner) not in MODULES and ".".join([*inner, "__init__"]) not in MODULES:
            inner = inner[:-1]
        found.add(".".join(inner))
    return found


def plain(module: str) -> bool:
    return module.split(".")[-1] != "__init__"


@pytest.mark.fast
def test_the_import_reader_reads_this_package():
    assert package_imports(MODULES["masks"]) == {"schedule"}
    assert "ring" in package_imports(MODULES["vjp"])
    assert package_imports(MODULES["kernels.xla"]) == {"kernels.contract", "masks", "stats"}
    assert {"arguments", "compat"} <= package_imports(MODULES["chunk"])  # imported as modules, not from them


@pytest.mark.fast
@pytest.mark.parametrize("module", [m for m in MODULES if plain(m)])
def test_imports_point_one_way(module):
    here = level(module)
    assert here is not None, f"give {module} a level in LEVELS"
    for other in package_imports(MODULES[module]):
        if module == "testing" or module.startswith("integrations"):  # they may use what users use
            assert other not in ("testing", "integrations")
            continue
        assert other, f"{module} imports the package itself; import the module that defines the name"
        assert level(other) is not None, f"give {other} a level in LEVELS"
        if kernel_of(module) is not None and kernel_of(other) == kernel_of(module):
            continue  # parts of one kernel
        if module.split(".")[0] == other.split(".")[0] == "fused":
            continue  # parts of one schedule
        assert level(other) < here, f"{module} (level {here}) must not import {other} (level {level(other)})"


@pytest.mark.fast
@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("kernels.") and plain(m)])
def test_kernels_know_the_contract_and_not_each_other(module):
    others = {m for m in package_imports(MODULES[module]) if m.split(".")[0] == "kernels" and m != "kernels.contract"}
    assert {kernel_of(m) for m in others} <= {kernel_of(module)}


@pytest.mark.fast
def test_nothing_but_the_check_command_imports_the_testing_tools():
    users = [m for m, path in MODULES.items() if "testing" in package_imports(path)]
    assert users == ["cli.check"]
    assert "testing" not in package_imports(PACKAGE / "__init__.py")


@pytest.mark.fast
@pytest.mark.parametrize("module", [*MODULES, "__init__"])
def test_jax_private_modules_stay_in_compat(module):
    path = MODULES.get(module, PACKAGE / "__init__.py")
    private = [name for name in imports(path) if name.startswith(("jax._", "jaxlib."))]
    attributes = [
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and isinstance(node.value, ast.Name)
        and node.value.id == "jax"
        and not node.attr.startswith("__")
    ]
    assert module == "compat" or not (private or attributes)


@pytest.mark.parametrize("module", MODULES)
def test_modules_hold_one_idea_on_few_screens(module):
    assert len(MODULES[module].read_text().splitlines()) <= 450


@pytest.mark.parametrize("module", MODULES)
def test_modules_say_what_they_are(module):
    assert ast.get_docstring(ast.parse(MODULES[module].read_text()))


@pytest.mark.fast
@pytest.mark.parametrize("name", jax_ring_attention.__all__)
def test_public_names_exist_and_are_documented(name):
    thing = getattr(jax_ring_attention, name)
    if isinstance(thing, tuple) and not isinstance(thing, type):  # a constant: its module says what it is
        assert name in ast.get_docstring(ast.parse(MODULES["vjp"].read_text()))
        return
    # A NamedTuple without a docstring of its own gets "Name(field, ...)", which says nothing.
    text = inspect.getdoc(thing)
    assert text
    assert not text.startswith(f"{name}(")


def test_public_names_are_listed_once_and_completely():
    names = jax_ring_attention.__all__
    assert len(names) == len(set(names))
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imported = {a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert imported == set(names)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in jax_ring_attention.__all__
        if inspect.isfunction(function := getattr(jax_ring_attention, name)) and "Args:" in inspect.getdoc(function)
    ],
)
def test_public_functions_with_an_argument_list_list_every_argument(name):
    function = getattr(jax_ring_attention, name)
    text = inspect.getdoc(function)
    if "as in `attention_chunk_stats`" in text:
        text += inspect.getdoc(jax_ring_attention.attention_chunk_stats)
    listed = set(re.findall(r"\w+", text.split("Args:", 1)[1]))
    parameters = inspect.signature(function).parameters.values()
    assert {p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD} <= listed


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").exists()
