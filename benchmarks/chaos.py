"""Disturb a running service in every way we know, and count what an honest owner notices.

`safer serve` runs with two owners. One sends a keyed batch after another, as users do. The other owner, clients without
a token and the machine itself disturb the service, one phase after another. Afterwards every answer to the honest owner
is compared with the library's own, and every acknowledged batch is looked for.

python benchmarks/chaos.py --minutes 30 --out demo/chaos.csv      # phases that have a row already are not run again
python benchmarks/chaos.py --minutes 30 --out demo/chaos.csv --phase calm flood

A full disk needs a file system of its own, and so root; clock jumps need a C compiler. A phase that cannot run here
gets a row that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import chaos_faults as faults
import httpx
import torch
from chaos_clean import Clean, library, server_errors
from chaos_service import Disk, NotStartedError, Running
from rows import Row, append, machine, read

from safer_tta.client import Client
from safer_tta.data import open_dataset
from safer_tta.errors import ServiceError
from safer_tta.training import source_recipe, train_source
from serve import pictures

FIELDS = (
    "phase", "seconds", "excused_s", "sent", "answered", "in_time", "deadline_s", "availability", "p50_ms", "p99_ms",
    "p99_ratio", "retries", "given_up", "errors_5xx", "undocumented_5xx", "lost", "doubled", "exact", "different",
    "probes", "probes_answered", "recovery_s", "rss_mb", "files", "hostile", "notes", "machine", "torch",
)  # fmt: skip
AVAILABLE, SLOWER = 99.0, 3.0  # what is promised: % of batches in time, and p99 beside a flood over p99 alone
RECOVERY = 60.0  # seconds after a phase in which the service is given time to become as fast as before
SETTLE = 3.0  # seconds that an attack has before anything is measured


@dataclass(frozen=True)
class Phase:
    attack: str = ""  # of chaos_attacks.py
    fault: faults.Fault = faults.nothing


PHASES = {
    "calm": Phase(),
    "flood": Phase("flood"),
    "stalled uploads": Phase("stalled_uploads"),
    "slow uploads": Phase("slow_uploads"),
    "decode bombs": Phase("decode_bombs"),
    "idle connections": Phase("idle_connections"),
    "half headers": Phase("half_headers"),
    "malformed requests": Phase("malformed"),
    "kills": Phase("load", faults.kills),
    "stops": Phase("load", faults.stops),
    "full disk": Phase("load", faults.full_disk),
    "read-only folder": Phase("load", faults.read_only),
    "damaged page": Phase("load", faults.damaged_page),
    "damaged state": Phase("load", faults.damaged_state),
    "clock jumps": Phase("load", faults.clock_jumps),
    "calm again": Phase(),
}


class Watch:
    """Asks for the service's health twice a second, and reads how much memory and how many files it uses."""

    def __init__(self, service: Running) -> None:
        self.service, self.stop = service, threading.Event()
        self.asked = self.answered = self.files = 0
        self.most_mb = 0.0
        self.statuses: Counter[int] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.stop.wait(0.5):
            for path in ("/healthz", "/readyz"):
                begun = time.monotonic()
                with contextlib.suppress(httpx.HTTPError):
                    status = httpx.get(f"{self.service.url}{path}", timeout=2, trust_env=False).status_code
                    self.statuses[status] += 1
                    self.answered += path == "/healthz" and status == 200 and not self._excused(begun)
                self.asked += path == "/healthz" and not self._excused(begun)
            megabytes, files = self.service.usage()
            self.most_mb, self.files = max(self.most_mb, megabytes), files or self.files

    def _excused(self, begun: float) -> bool:
        return self.service.excuses.cover(begun) or self.service.excuses.cover(time.monotonic())


@contextlib.contextmanager
def attacking(service: Running, name: str) -> Iterator[dict[str, int]]:
    """Attack in a process of its own, which also ends if this one dies. Give what it was answered, at the end."""
    told: dict[str, int] = {}
    if not name:
        yield told
        return
    script = Path(__file__).with_name("chaos_attacks.py")
    # Its computing time would be spent on other machines, so it gets what the service leaves over.
    command = ["nice", "-n", "19", sys.executable, str(script), name, str(service.port), service.tokens["hostile"]]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield told
        told.update(json.loads(process.communicate(timeout=60)[0]))
    finally:
        process.kill()
        process.wait()


class Run:
    """One run of all phases on one machine."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.batches = [pictures(options.batch, number) for number in range(16)]
        self.model = folder / "source.safetensors"
        train_source(open_dataset("synthetic", count=200), "sketch", source_recipe("synthetic", steps=30), self.model)
        self.disk = Disk(folder / "disk")
        self.service = Running(self.model, self.disk.folder / "served")

    def close(self) -> None:
        self.service.kill()
        self.disk.close()

    def client(self) -> Client:
        return Client(self.service.url, self.service.tokens["clean"], timeout=20)

    def phase(self, name: str, calm: Row | None) -> Row:
        """Run a phase and return its row. calm: the row of the calm phase, which others are compared with."""
        phase, seconds = PHASES[name], 60 * self.options.minutes / len(PHASES)
        why = faults.why_not(phase.fault, self.disk)
        if why:
            return {"phase": name, "notes": f"skipped: {why}"}
        clean = Clean(self.client, self.stream(name), self.batches)

        def wait(length: float) -> None:
            until = time.monotonic() + length
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(left, 5.0))
                self.show(f"{name}: {len(clean.answered)} of {len(clean.sent)} batches answered", clean.problems)

        scene = faults.Scene(self.service, self.disk, seconds, wait, self.batches[0])
        begun, excuses = time.monotonic(), self.service.excuses
        with contextlib.ExitStack() as stack:
            watch = stack.enter_context(Watch(self.service))
            with attacking(self.service, phase.attack) as hostile:
                time.sleep(SETTLE if phase.attack else 0)
                stack.enter_context(clean)
                stack.enter_context(phase.fault(scene))
            clean.finish()
            took = time.monotonic() - begun
            row = clean.measure(excuses, calm and float(calm["deadline_s"]))
            row |= {"recovery_s": None if calm is None else self.recover(clean.name, float(calm["p50_ms"]) / 1e3)}
            row |= clean.audit()
            self.forget(clean.name)
        self.show(f"{name}: comparing {len(clean.answered)} answers with the library")
        row |= clean.compare(library(self.model, "clean", clean.name))
        statuses = clean.statuses + watch.statuses + Counter(scene.statuses)
        statuses += Counter({int(status): count for status, count in hostile.items() if status.isdecimal()})
        ratio = row["p99_ms"] / float(calm["p99_ms"]) if calm is not None and "p99_ms" in row else None
        notes = [*scene.notes, *(f"told {count} times: {what}" for what, count in clean.problems.items())]
        return {
            "phase": name, "seconds": took, "excused_s": took - excuses.counted(begun, begun + took), **row,
            "p99_ratio": ratio, **server_errors(statuses), "probes": watch.asked, "probes_answered": watch.answered,
            "rss_mb": watch.most_mb, "files": watch.files, "hostile": _listed(hostile),
            "notes": "; ".join(notes).replace(str(self.folder), ""),
        }  # fmt: skip

    def stream(self, name: str) -> str:
        """Make a stream for a phase, and one beside it, which takes the first batch: that is slow in a new process."""
        stream = f"{name.replace(' ', '-')}-{os.getpid()}"
        with self.client() as client:
            client.create(stream)
            client.create(f"{stream}-beside")
            client.send(f"{stream}-beside", self.batches[0])
        return stream

    def forget(self, stream: str) -> None:
        """Delete the streams of a phase; owners may have only so many."""
        with self.client() as client, contextlib.suppress(ServiceError):
            for name in (stream, f"{stream}-beside"):
                client.delete(name)

    def recover(self, stream: str, calm_s: float) -> float:
        """Return how long it takes until a batch is answered in at most three times the calm median."""
        begun, fast = time.monotonic(), False
        with self.client() as client:
            while not fast and time.monotonic() - begun < RECOVERY:
                asked = time.monotonic()
                with contextlib.suppress(ServiceError):
                    client.send(f"{stream}-beside", self.batches[0])
                    fast = time.monotonic() - asked <= 3 * calm_s
        return time.monotonic() - begun

    def show(self, what: str, problems: Counter[str] | None = None) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {what}", *list(problems or ())[-1:], flush=True)

    def all(self) -> None:
        """Run the phases that have no row yet."""
        self.service.start()
        done = {row["phase"]: row for row in read(self.options.out)}
        for name in [name for name in PHASES if name in {"calm", *self.options.phase} and name not in done]:
            try:
                row = self.phase(name, done.get("calm"))
            except (NotStartedError, ServiceError) as error:  # nothing is left of what was acknowledged
                row = {"phase": name, "availability": 0.0, "notes": f"the service did not come back: {error}"}
                self.service.kill()
                self.service.folder = self.disk.folder / f"served-after-{name.replace(' ', '-')}"
            if not self.service.alive:
                row["notes"] += "; the service has ended"
                self.service.start()
            append(self.options.out, FIELDS, {**row, "machine": machine(), "torch": torch.__version__})
            done[name] = read(self.options.out)[-1]
            self.show(" ".join(f"{field}={value}" for field, value in done[name].items() if value))


def _listed(answers: dict[str, int]) -> str:
    return " ".join(f"{answer}:{count}" for answer, count in sorted(answers.items()))


def verdicts(rows: list[dict[str, str]]) -> dict[str, bool]:
    """Return what was promised, with what was found, and whether it holds. Skipped phases promise nothing."""
    ran = [row for row in rows if not row["notes"].startswith("skipped")]

    def total(field: str) -> int:
        return sum(int(row[field] or 0) for row in ran)

    worst = min((float(row["availability"]), row["phase"]) for row in ran)
    counts = {
        "acknowledged batches lost": total("lost"), "batches applied twice": total("doubled"),
        "answers that differ from the library's": total("different"),
        "errors of the server other than 503 and 507": total("undocumented_5xx"),
    }  # fmt: skip
    found = {f"{what}: {count}": count == 0 for what, count in counts.items()}
    found[f"availability to the honest owner: at least {worst[0]:.1f} % ({worst[1]})"] = worst[0] >= AVAILABLE
    for row in ran:
        if row["phase"] == "flood":
            ratio = float(row["p99_ratio"] or "inf")
            found[f"99th percentile beside a flood: {ratio:.1f} times that of a calm service"] = ratio <= SLOWER
    unstarted = [row["phase"] for row in ran if not row["sent"]]
    return found | ({f"the service did not come back in: {', '.join(unstarted)}": False} if unstarted else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=30.0, help="of all phases together")
    parser.add_argument("--phase", nargs="*", choices=PHASES, default=list(PHASES), help="only calm and these")
    parser.add_argument("--batch", type=int, default=2, help="images of the honest owner's batches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the service inherits it
    for number in (signal.SIGINT, signal.SIGTERM):  # in both cases it leaves no process and no mount
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Run(options, Path(folder))) as run:
        run.all()
    kept = verdicts(read(options.out))
    print(*(f"{'holds ' if holds else 'BROKEN'}  {what}" for what, holds in kept.items()), sep="\n")
    if not all(kept.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
