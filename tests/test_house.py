"""The rules of the house, read from the source: who may read the environment, print, open sockets, hold SQL."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shoal"
MODULES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def names_in(path: Path) -> set[str]:
    """Every dotted name a module uses: `os.environ`, `print`, `socket.socket`."""
    return {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Attribute, ast.Name))}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_keeps_the_rules(path: Path) -> None:
    names, imports, text = names_in(path), imports_of(path), path.read_text()
    if room(path) not in ("config", "launch"):
        assert not {name for name in names if name in ("os.environ", "os.getenv")}, "only config reads the environment"
    if room(path) != "cli":
        assert not names & {"print", "sys.exit", "exit", "input"}, "only cli prints or exits"
    if room(path) not in ("transports", "serve"):
        assert not imports & {"socket", "zmq", "http"}, "only transports and serve open sockets"
    if path.parent.name != "postgres" or room(path) != "transports":
        assert not re.search(r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM|CREATE TABLE)\s+\w+", text), (
            "only the PostgreSQL transport holds SQL"
        )
    assert not imports & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, "nothing is pickled"
    assert not re.search(r"torch\.(load|save)\(|allow_pickle=True|\beval\(|\bexec\(|shell=True", text.replace(".eval()", ""))


def test_no_path_of_a_machine_is_named() -> None:
    for path in MODULES:
        assert not re.search(r"/(home|root|work|Users)/", path.read_text()), path


def warn_in(module: str, text: str, category: type[Warning]) -> list[warnings.WarningMessage]:
    """Let a line of a module cause a warning; return what was recorded, where it was no error."""
    with warnings.catch_warnings(record=True) as recorded:
        exec("import warnings\nwarnings.warn(text, category)", {"__name__": module, "text": text, "category": category})
    return recorded


@pytest.mark.parametrize("module", ["shoal", "shoal.models.gpt"])
@pytest.mark.parametrize("category", [UserWarning, DeprecationWarning, FutureWarning])
def test_a_warning_that_a_line_of_ours_causes_is_an_error(module: str, category: type[Warning]) -> None:
    with pytest.raises(category, match="do it otherwise"):
        warn_in(module, "do it otherwise", category)


def test_a_warning_of_a_library_about_itself_or_the_machine_is_none() -> None:
    assert len(warn_in("torch.nn.modules.linear", "mkldnn is slow here", UserWarning)) == 1
    assert len(warn_in("shoalish", "not ours", DeprecationWarning)) == 1
    assert not warn_in("shoal.models.gpt", "mkldnn_matmul failed, switching to BLAS gemm", UserWarning)
