"""Do the steps of deploy/Dockerfile without Docker: `python tools/try_image.py FOLDER --model MODEL`.

The first stage is run as it stands, with its folders below FOLDER. Of the second one the command is started with the
given model, and the health check asks it. What needs root and what only Docker can do (users, read-only file systems)
is left out. It downloads torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

TOP = Path(__file__).parents[1]
MOVED = ("/opt/safer", "/var/lib/safer", "/src", "/models", "/run/secrets")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="an empty folder, about 2 GB")
    parser.add_argument("--model", type=Path, required=True, help="a file that safer pack or safer train wrote")
    given = parser.parse_args()
    folder = given.folder.resolve()
    for moved in MOVED:
        (folder / moved[1:]).mkdir(parents=True)
    build, final = stages()
    run_build(build, folder)
    shutil.copy(given.model, folder / "models" / "model.safetensors")
    (folder / "run/secrets/tokens.json").write_text(json.dumps({"anna": "a" * 20}))
    started = run_final(final, folder)
    sys.stdout.write(f"the service started and passed its health check after {started:.0f} s\n")


def stages() -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage."""
    lines = [line for line in (TOP / "deploy/Dockerfile").read_text().splitlines() if not line.startswith("#")]
    found: list[list[tuple[str, str]]] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        elif word:
            found[-1].append((word, rest))
    return found


def move(text: str, folder: Path) -> str:
    """Return a text whose absolute folders lie below another."""
    return re.sub(rf"(?<![\w/])({'|'.join(map(re.escape, MOVED))})\b", lambda found: f"{folder}{found[1]}", text)


def environment(stage: list[tuple[str, str]], folder: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "PIP_CONFIG_FILE", "PIP_EXTRA_INDEX_URL") if name in os.environ}
    for word, rest in stage:
        for name, value in re.findall(r"(\w+)=(\S+)", rest if word == "ENV" else ""):
            kept[name] = move(value, folder).replace("$PATH", kept["PATH"])
    return kept


def run_build(stage: list[tuple[str, str]], folder: Path) -> None:
    for word, rest in stage:
        if word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy(TOP / source, folder / "src" / (target if target != "./" else source))
        elif word == "RUN":
            sys.stdout.write(f"RUN {rest}\n")
            sys.stdout.flush()
            subprocess.run(
                move(rest, folder), shell=True, cwd=folder / "src", env=environment(stage, folder), check=True
            )


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def run_final(stage: list[tuple[str, str]], folder: Path) -> float:
    """Start the command of the image, and return how long it took until the health check passed."""
    told, env = dict(stage), environment(stage, folder)
    command = [move(word, folder) for word in (*json.loads(told["ENTRYPOINT"]), *json.loads(told["CMD"]))]
    check = json.loads(told["HEALTHCHECK"].partition("CMD ")[2])
    began = time.monotonic()
    with subprocess.Popen(command, cwd=folder / "var/lib/safer", env=env) as service:
        try:
            while subprocess.run(check, env=env, check=False, stderr=subprocess.DEVNULL).returncode:
                if service.poll() is not None or time.monotonic() - began > 120:
                    sys.exit("the service did not pass its health check")
                time.sleep(1)
            return time.monotonic() - began
        finally:
            service.terminate()


if __name__ == "__main__":
    main()
