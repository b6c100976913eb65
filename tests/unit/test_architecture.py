"""The layer rule and the purity of every core: these tests are the architecture."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("router", "scheduler", "storage_agent", "gpu_worker")

# A core decides from values alone: no clock, no chance, no loop, no network, no device, no log.
FORBIDDEN_IN_CORE = {
    "asyncio", "time", "random", "secrets", "logging", "structlog", "socket", "threading", "subprocess", "os", "nats",
    "redis", "torch", "transformers", "starlette", "uvicorn", "httpx", "obstore", "ckptio", "uuid",
}  # fmt: skip


def python_files(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("*.py"))
    assert files, f"{folder} holds no module: the test would prove nothing"
    return files


def imported_modules(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide a layer"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def starts_with(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


CORES = [path for service in SERVICES for path in python_files(ROOT / "services" / service / "core")]
SHELLS = [path for service in SERVICES for path in python_files(ROOT / "services" / service)]


@pytest.mark.parametrize("path", CORES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_core_is_pure(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for module in imported_modules(tree):
        assert module.split(".")[0] not in FORBIDDEN_IN_CORE, f"{path} imports {module}"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith), (
            f"{path}:{node.lineno} is asynchronous"
        )


@pytest.mark.parametrize("path", CORES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_core_knows_only_the_wire_and_itself(path: Path) -> None:
    own = "services." + path.relative_to(ROOT / "services").parts[0] + ".core"
    for module in imported_modules(ast.parse(path.read_text())):
        if starts_with(module, "whimbrel"):
            assert module == "whimbrel" or starts_with(module, "whimbrel.wire"), f"{path} imports {module}"
        if starts_with(module, "services"):
            assert starts_with(module, own), f"{path} imports {module}"


@pytest.mark.parametrize("path", SHELLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_services_never_import_each_other_and_only_servers_touch_checkpoints(path: Path) -> None:
    service = path.relative_to(ROOT / "services").parts[0]
    for module in imported_modules(ast.parse(path.read_text())):
        if starts_with(module, "services"):
            assert starts_with(module, f"services.{service}"), f"{path} imports {module}"
        if starts_with(module, "ckptio"):
            assert service in ("storage_agent", "gpu_worker"), f"{path} imports {module}"
        if starts_with(module, "torch"):
            assert service == "gpu_worker", f"{path} imports {module}"
        assert not starts_with(module, "whimbrel.cli"), f"{path} imports {module}"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [("wire", ("whimbrel.wire",)), ("chassis", ("whimbrel.wire", "whimbrel.chassis"))],
)
def test_the_shared_libraries_keep_their_layer(package: str, allowed: tuple[str, ...]) -> None:
    for path in python_files(ROOT / "libs" / "whimbrel" / package):
        for module in imported_modules(ast.parse(path.read_text())):
            assert not starts_with(module, "services"), f"{path} imports {module}"
            assert not starts_with(module, "ckptio"), f"{path} imports {module}"
            if starts_with(module, "whimbrel") and module != "whimbrel":
                assert any(starts_with(module, name) for name in allowed), f"{path} imports {module}"


def test_the_wire_is_pure() -> None:
    for path in python_files(ROOT / "libs" / "whimbrel" / "wire"):
        modules = {module.split(".")[0] for module in imported_modules(ast.parse(path.read_text()))}
        # Ids are made in the wire, once; nothing else there may reach for chance or time.
        assert not modules & (FORBIDDEN_IN_CORE - {"uuid"}), path


def test_only_the_subjects_module_spells_a_subject() -> None:
    for path in python_files(ROOT / "libs" / "whimbrel") + SHELLS:
        if path.name == "subjects.py":
            continue
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                assert ".cmd." not in node.value, f"{path}:{node.lineno}"
                assert ".hb." not in node.value, f"{path}:{node.lineno}"


def test_only_config_reads_the_environment() -> None:
    """Configuration is parsed once, in `__main__`, and handed down as values."""
    for path in SHELLS:
        if path.name == "__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                pytest.fail(f"{path}:{node.lineno} reads the environment")
