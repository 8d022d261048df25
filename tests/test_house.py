"""The rules of the source: what each folder may do and import, names with one meaning, and nothing that is too long or not used."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
from vulture import Vulture

from shoal.config.schema.strategy import Strategy

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shoal"
PAIRS = {"socket.socketpair", "socket.socket", "socket.send_fds", "socket.recv_fds", "socket.MSG_DONTWAIT"}
MODULES = sorted(SOURCE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0]


def names_in(path: Path) -> set[str]:
    """Every name that a module uses, with the name after its first dot: `os.environ`, `print`, `socket.socket`."""
    nodes = nodes_of(path)
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        f"{node.value.id}.{node.attr}" for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def imports_of(path: Path) -> set[str]:
    """The packages that a module imports more than exceptions from."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not all(alias.name.endswith("Exception") for alias in node.names):
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_keeps_the_rules(path: Path) -> None:
    names, imports, text = names_in(path), imports_of(path), path.read_text()
    if room(path) not in ("config", "launch"):
        assert not {name for name in names if name in ("os.environ", "os.getenv")}, "only config reads the environment"
    if room(path) != "cli":
        assert not names & {"print", "sys.exit", "exit", "input"}, "only cli prints or exits"
    if path.name == "forkserver.py":
        assert {name for name in names if name.startswith("socket.")} <= PAIRS, "its sockets are pairs that no network reaches"
    elif room(path) not in ("transports", "serve", "web", "dashboard"):
        assert not imports & {"socket", "zmq", "http"}, "only transports and the servers open sockets"
    if path.parent.name != "postgres" or room(path) != "transports":
        assert not re.search(r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM|CREATE TABLE)\s+\w+", text), (
            "only the PostgreSQL transport holds SQL"
        )
    assert not imports & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, "nothing is pickled"
    assert not re.search(r"torch\.(load|save)\(|allow_pickle=True|\beval\(|\bexec\(|shell=True", text.replace(".eval()", ""))


def test_one_module_reads_models_of_others_and_runs_no_code_of_theirs() -> None:
    """`AutoModel…` and the others run what a folder brings, or ask on the terminal whether they may, unless each call says no."""
    callers = [path for path in MODULES if names_an_auto_class(path)]
    assert [path.relative_to(SOURCE).as_posix() for path in callers] == ["untrusted/huggingface.py"]
    calls = [node for node in nodes_of(callers[0]) if isinstance(node, ast.Call)]
    reading = [call for call in calls if ast.unparse(call.func).endswith((".from_pretrained", ".from_config"))]
    assert reading
    for call in reading:
        assert any(ast.unparse(keyword) == "trust_remote_code=False" for keyword in call.keywords), ast.unparse(call)


AUTO_CLASS = re.compile(r"Auto(Model|Config|Tokenizer|Processor)\w*")


def names_an_auto_class(path: Path) -> bool:
    """Whether a module uses a class of transformers that chooses a class by a file's content, by its name or as an attribute."""
    found = {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute)}
    found |= {node.value for node in nodes_of(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return any(AUTO_CLASS.fullmatch(name) for name in found)


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


# --- who knows whom -----------------------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    parts = ("shoal", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in MODULES}


def imported(path: Path) -> set[str]:
    """The modules of shoal that a module imports anywhere: at its top, for the type checker only, or inside a function."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in NAMES else node.module for alias in node.names}
    return found & set(NAMES)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which reaches all others of its group."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set[str](), list(graph[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += graph[name]
        reach[start] = seen
    groups = {tuple(sorted({name} | {other for other in reach[name] if name in reach[other]})) for name in graph if name in reach[name]}
    return sorted(map(list, groups))


def test_a_circle_is_found_where_there_is_one() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = circles({name: imported(path) for name, path in NAMES.items()})
    assert not found


# --- strategies are named by no other part -------------------------------------------------------------------------------------

STRATEGY_SECTIONS = [*Strategy.kinds.values()]
STRATEGY_KINDS = {section.fields()["kind"].default for section in STRATEGY_SECTIONS}
STRATEGY_FILES = {path.stem for path in (SOURCE / "strategies").glob("[!_]*.py")} - {"policy_set", "run_length"}


def names_a_strategy(path: Path) -> bool:
    """Whether a module has a strategy's name as a string of its own, or imports its file or its section of the settings."""
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and node.value in STRATEGY_KINDS:
            return True
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name for alias in node.names}
            if node.module == "shoal.config.schema.strategy" and names & {section.__name__ for section in STRATEGY_SECTIONS}:
                return True
            if node.module == "shoal.strategies" and names & STRATEGY_FILES:
                return True
        if isinstance(node, ast.Import | ast.ImportFrom) and {f"shoal.strategies.{name}" for name in STRATEGY_FILES} & modules_named(node):
            return True
    return False


def modules_named(node: ast.Import | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    return {node.module} if node.module else set()


@pytest.mark.parametrize(
    "line",
    [
        'if run.strategy.kind == "diloco": pass',
        "from shoal.strategies import edp",
        "from shoal.strategies.edp import policies",
        "import shoal.strategies.edp",
        "def late():\n    from shoal.config.schema.strategy import WorkUnits",
    ],
)
def test_a_module_that_names_a_strategy_is_found(line: str, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(f'"""About diloco, edp and the others."""\n{line}\n')
    assert names_a_strategy(module)


def test_words_of_people_are_no_names(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""About diloco."""\nMESSAGE = "take diloco, or async"\n')
    assert not names_a_strategy(module)


def test_only_strategies_and_config_name_a_strategy() -> None:
    others = [path for path in MODULES if room(path) not in ("strategies", "config")]
    assert not [path.relative_to(SOURCE).as_posix() for path in others if names_a_strategy(path)]


def policy_classes() -> set[str]:
    """The classes that strategies pick: what they import from the coordinator and the worker, and what they define."""
    found: set[str] = set()
    for path in (SOURCE / "strategies").glob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("shoal.coordinator", "shoal.worker", "shoal.strategies")
            ):
                found |= {alias.name for alias in node.names if alias.name[0].isupper()}
            elif isinstance(node, ast.ClassDef):
                found.add(node.name)
    return found


def asks_for_a_policy(path: Path, policies: set[str]) -> bool:
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
            asked = node.args[1]
        elif isinstance(node, ast.MatchClass):
            asked = node.cls
        else:
            continue
        if policies & set(re.findall(r"\w+", ast.unparse(asked))):
            return True
    return False


@pytest.mark.parametrize(
    "line", ["isinstance(rounds, Barrier)", "isinstance(rounds, (Every, policies.Barrier))", "match rounds:\n    case Barrier(): pass"]
)
def test_a_question_for_a_policy_is_found(line: str, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(f"{line}\nisinstance(rounds, int)\n")
    assert asks_for_a_policy(module, {"Barrier"})
    assert not asks_for_a_policy(module, {"Quorum"})


def test_no_module_asks_what_kind_a_policy_is() -> None:
    policies = policy_classes()
    assert policies, "the strategies pick no policies, so this test would see nothing"
    assert not [path.relative_to(SOURCE).as_posix() for path in MODULES if asks_for_a_policy(path, policies)]


# --- size, names, and what is not used ------------------------------------------------------------------------------------

LONGEST = 40
MOST_MODULES = 20
LARGER = {"cli": 60}
"""cli has a file for each command."""


def test_no_function_is_longer_than_forty_lines() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), node.name)
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= LONGEST
    }
    assert not found


def test_no_folder_has_more_than_twenty_modules() -> None:
    counts = Counter(path.parent.relative_to(SOURCE).as_posix() for path in MODULES if path.name != "__init__.py")
    assert not {folder: count for folder, count in counts.items() if count > LARGER.get(folder, MOST_MODULES)}


def classes_by_name() -> dict[str, set[str]]:
    """The modules that define each class name, except private classes. A config section and the class that it builds may share a name, so
    modules of the settings count only where two of them share one."""
    found: dict[str, set[str]] = {}
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(path.relative_to(SOURCE).as_posix())
    return found


def test_a_class_name_has_one_meaning() -> None:
    twice = {}
    for name, places in classes_by_name().items():
        sections = {place for place in places if place.startswith("config/schema/")}
        if len(sections) > 1 or len(places - sections) > 1:
            twice[name] = sorted(places)
    assert not twice, "give one of each another name"


MOST_PROTOCOLS = 18
MOST_VAGUE_WORDS = 4


def test_a_protocol_is_the_exception() -> None:
    """A Protocol with one implementation and no test double only hides which class is meant."""
    found = [
        f"{path.relative_to(SOURCE).as_posix()}: {node.name}"
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and any(re.match(r"(typing\.)?Protocol\b", ast.unparse(base)) for base in node.bases)
    ]
    assert len(found) <= MOST_PROTOCOLS, "\n".join(found)


def test_the_actor_of_a_sentence_is_named() -> None:
    """A reader wants to know which worker, caller or limit is meant."""
    counts = Counter({path: len(re.findall(r"\b(nobody|whoever|so many)\b", path.read_text(), re.IGNORECASE)) for path in MODULES})
    most = ", ".join(f"{path.relative_to(SOURCE).as_posix()} {count}" for path, count in counts.most_common(10))
    assert counts.total() <= MOST_VAGUE_WORDS, most


USED_BY_OTHERS = {
    "closure": "torch calls step(closure) of any optimizer",
    "HasFileno": "stands in a type alias that is a string",
}


@pytest.mark.whole
def test_vulture_finds_no_dead_code() -> None:
    finder = Vulture()
    finder.scavenge([str(SOURCE)])
    found = finder.get_unused_code(min_confidence=80)
    dead = [item.get_report() for item in found if item.name not in USED_BY_OTHERS]
    assert not dead, "\n".join(dead)
    assert {item.name for item in found} == set(USED_BY_OTHERS), "a name that is no longer reported must go from the list"


# --- the tests themselves -----------------------------------------------------------------------------------------------

TESTS = Path(__file__).resolve().parent


def defined_in(path: Path) -> set[str]:
    """The names that a module defines or imports at its top."""
    found: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= {target.id for target in ast.walk(node) if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def modules_of_tests() -> dict[str, Path]:
    return {f"tests.{path.relative_to(TESTS).with_suffix('').as_posix().replace('/', '.')}": path for path in TESTS.rglob("*.py")}


def test_what_chaos_takes_from_other_tests_is_there() -> None:
    files = modules_of_tests()
    missing = {
        (path.name, node.module, alias.name)
        for path in (TESTS / "chaos").glob("test_*.py")
        for node in tree_of(path).body
        if isinstance(node, ast.ImportFrom) and node.module in files
        for alias in node.names
        if alias.name not in defined_in(files[node.module])
    }
    assert not missing


def test_programs_in_the_text_of_tests_import_what_is_there() -> None:
    """Tests start small programs that are strings, which no linter reads."""
    missing = set()
    for path in TESTS.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "from shoal" in node.value:
                for module, names in re.findall(r"^from (shoal[\w.]*) import ([\w, ]+)$", node.value, re.MULTILINE):
                    missing |= {f"{path.name}: {module}.{name}" for name in names.split(", ") if not importable(module, name.split()[0])}
    assert not missing


def importable(module: str, name: str) -> bool:
    if f"{module}.{name}" in NAMES:
        return True
    defined = defined_in(NAMES[module]) if module in NAMES else set()
    return name in defined or ("__getattr__" in defined and hasattr(importlib.import_module(module), name))


def test_the_name_of_a_test_has_at_most_eighty_letters() -> None:
    long = {
        (path.name, node.name)
        for path in TESTS.rglob("test_*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > 80
    }
    assert not long


def test_no_test_changes_the_path_of_imports() -> None:
    assert not [path.name for path in TESTS.rglob("*.py") if "sys.path" + ".insert" in path.read_text()]


OPTIONAL = ("psycopg", "fastapi", "pydantic", "uvicorn", "segno", "transformers", "datasets", "deepspeed", "psutil", "ray", "wandb")


MODULES_OF_THE_CORE = ("shoal.launch.start", "shoal.cli.demo", "shoal.runs.worker_run", "shoal.reporters.sinks")


@pytest.mark.whole
def test_training_needs_no_optional_package() -> None:
    """`make demo` installs the core only."""
    program = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r})); import {', '.join(MODULES_OF_THE_CORE)}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


# --- the architecture page ----------------------------------------------------------------------------------------------

ARCHITECTURE = (TESTS.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_FILES_OF_A_WALK = {"contribution": 20, "configuration": 20, "chat request": 16, "student's unit": 12, "rollout": 20}


def test_the_architecture_page_is_short_and_names_files_that_exist() -> None:
    assert len(ARCHITECTURE.split()) <= 1500
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", ARCHITECTURE))
    missing = {name for name in named if not (SOURCE / name).exists() and not (TESTS.parent / name).exists()}
    assert not {name for name in missing if not list(SOURCE.rglob(name))}


def test_the_security_page_names_tests_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS.parent / "docs" / "security.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8"), f"{file}::{test}"


@pytest.mark.parametrize("walk", MOST_FILES_OF_A_WALK)
def test_a_walk_passes_few_files(walk: str) -> None:
    (text,) = [part for part in ARCHITECTURE.split("\n### ")[1:] if walk in part.splitlines()[0]]
    files = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert 10 <= len(files) <= MOST_FILES_OF_A_WALK[walk], sorted(files)
