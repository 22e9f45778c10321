"""Print the shape of the package, and fail if it breaks a rule: `python tests/house.py`, a part of `make lint`."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

TOP = Path(__file__).parents[1]
SRC = TOP / "src" / "safer_tta"
FILE_LINES, BODY_LINES, ROOT_MODULES, DATA_KB, RESULTS_KB = 400, 40, 9, 2048, 1024
# Measurements, weights and pictures are what makes a checkout large without anybody noticing.
DATA = {".csv", ".ipynb", ".json", ".png", ".safetensors", ".svg"}
REPEATED_LINES = 6  # a run of so many equal lines of code in two places is a copy


def main() -> None:
    sources = {path: path.read_text() for path in sorted(SRC.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    rules = {
        f"files over {FILE_LINES} lines": list(_long_files()),
        f"function bodies over {BODY_LINES} lines": list(_long_bodies(trees)),
        f"modules in the root beyond {ROOT_MODULES}": sorted(SRC.glob("*.py"))[ROOT_MODULES:],
        "modules in methods/ that register no method": list(_not_methods(trees)),
        "private names used across packages": list(_private_uses(trees)),
        f"runs of {REPEATED_LINES} equal lines in two places": list(_copies(sources)),
        f"data in the checkout over {DATA_KB} kB": [f"{kb} kB" for kb in [_kilobytes(".", DATA)] if kb > DATA_KB],
        f"docs/results over {RESULTS_KB} kB": [f"{kb} kB" for kb in [_kilobytes("docs/results")] if kb > RESULTS_KB],
    }
    report = [f"lines of Python in {folder}: {_lines(TOP / folder)}" for folder in ("src", "tests")]
    sizes = {
        "checkout": _kilobytes("."),
        "data in it": _kilobytes(".", DATA),
        "docs/results": _kilobytes("docs/results"),
    }
    report.append(", ".join(f"{what}: {kb} kB" for what, kb in sizes.items()))
    for rule, found in rules.items():
        report += [f"{rule}: {len(found)}", *(f"    {one}" for one in found)]
    sys.stdout.write("\n".join(report) + "\n")
    sys.exit(any(rules.values()))


def _long_files() -> Iterator[str]:
    for folder in ("src", "tests", "benchmarks", "examples", "docs"):
        for path in (TOP / folder).rglob("*.py"):
            lines = len(path.read_text().splitlines())
            if lines > FILE_LINES:
                yield f"{path.relative_to(TOP)}: {lines}"


def _long_bodies(trees: dict[Path, ast.Module]) -> Iterator[str]:
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if lines > BODY_LINES:
                    yield f"{path.relative_to(TOP)}:{node.lineno} {node.name}: {lines}"


def _not_methods(trees: dict[Path, ast.Module]) -> Iterator[str]:
    for path, tree in trees.items():
        if path.parent == SRC / "methods" and path.name != "__init__.py":
            decorators = [d for node in tree.body if isinstance(node, ast.ClassDef) for d in node.decorator_list]
            if not any(isinstance(d, ast.Call) and getattr(d.func, "id", "") == "register" for d in decorators):
                yield path.name


def _private_uses(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Yield imports of names with an underscore from other modules, and such attributes of imported modules."""
    for path, tree in trees.items():
        modules = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level + (node.module or "").startswith("safer_tta"):
                modules |= {alias.asname or alias.name for alias in node.names}
                for alias in node.names:
                    if alias.name.startswith("_") and alias.name not in ("_internal", "_frame", "__version__"):
                        yield f"{path.relative_to(TOP)}: {alias.name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                private = node.attr.startswith("_") and not node.attr.startswith("__")
                yield from [f"{path.relative_to(TOP)}: {node.value.id}.{node.attr}"] * private


def _lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def _copies(sources: dict[Path, str]) -> Iterator[str]:
    seen: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for path, text in sources.items():
        lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), start=1)]
        code = [(n, line) for n, line in lines if len(line) > 3 and not line.startswith(("#", "import ", "from ", '"'))]
        for i in range(len(code) - REPEATED_LINES + 1):
            window = code[i : i + REPEATED_LINES]
            seen[tuple(line for _, line in window)].append(f"{path.relative_to(TOP)}:{window[0][0]}")
    for places in seen.values():
        if len(places) > 1:
            yield " ~ ".join(places)


def _kilobytes(folder: str, kinds: Collection[str] = ()) -> int:
    """Return the size of the files of these kinds, or of all, that git tracks below a folder."""
    listed = subprocess.run(["git", "ls-files", "-z", folder], cwd=TOP, capture_output=True, check=True).stdout
    files = [TOP / name for name in listed.decode().split("\0") if name and (not kinds or Path(name).suffix in kinds)]
    return round(sum(path.stat().st_size for path in files if path.exists()) / 1024)


if __name__ == "__main__":
    main()
