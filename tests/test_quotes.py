"""Figures quoted in sentences are what the rows say: a sentence is written here with its figures computed.

(Tables are printed from rows and compared in tests/test_results.py.)
"""

from __future__ import annotations

import csv
import functools
import json
import statistics
from pathlib import Path

from safer_tta.bench.published import published
from tests.test_results import benchmark

ROOT = Path(__file__).parents[1]
TARGETS = ("art_painting", "cartoon", "photo", "sketch")


@functools.cache
def rows(name):
    return [json.loads(line) for line in (ROOT / "docs/results" / f"{name}.jsonl").read_text().splitlines()]


@functools.cache
def prose(page):
    """A page without tables and line ends."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return " ".join(" ".join(line for line in lines if not line.startswith("|")).split())


@functools.cache
def main_table():
    """{(label, target, rate): {seed: accuracy}} of the main table on PACS."""
    found = {row["run"]: row["accuracy"] for row in rows("pacs")}
    table = {}
    for name, cell in benchmark("pacs").main_runs(rows("pacs")):
        table.setdefault((cell.row.label, cell.target, cell.attack_rate), {})[cell.seed] = found[name]
    return table


def ours(label, rate, *targets):
    return statistics.mean(statistics.mean(main_table()[label, target, rate].values()) for target in targets or TARGETS)


def theirs(label, rate, target="average"):
    return published("main", "pacs", target, label, {}, rate).mean


def span(values):
    """Least to most, in whole points."""
    return f"{min(values):.0f} to {max(values):.0f}"


def below(label, *target):
    """How far we are below the paper at the three rates."""
    return span([theirs(label, rate, *target) - ours(label, rate, *target) for rate in (0, 50, 100)])


def pooled(predictor, pool=None):
    """Of the study of pooling on PACS: Art Painting, seed 0, all of it attacked, Tent."""
    (found,) = {
        round(row["accuracy"], 1)
        for row in benchmark("beyond").Kept(rows("pacs")).rows
        if (row["target"], row["method"], row["predictor"], row["seed"]) == ("art_painting", "tent", predictor, 0)
        and (row["attack_rate"], row["batch"], row["draw"], row["limit"]) == (100, 64, "exact", None)
        and round(255 * row["eps"]) == 8
        and row["predictor_options"].get("pool") == pool
        and row["predictor_options"].get("views", 4) == 4
    }
    return found


def test_what_holds_on_pacs():
    said = prose("results/pacs.md")
    for label in ("Tent", "Tent+SAFER"):
        clean, attacked = ours(label, 0), ours(label, 100)
        paper = f"the paper {theirs(label, 0):.1f} → {theirs(label, 100):.1f}"
        assert f"{label} loses {clean - attacked:.1f} points" in said
        assert f"({clean:.1f} → {attacked:.1f}; {paper})" in said
    assert f"not adapting at all keeps {ours('ERM', 100, 'sketch'):.1f} % on sketch" in said
    price = {target: ours("Tent", 0, target) - ours("Tent+SAFER", 0, target) for target in TARGETS}
    assert f"it costs {statistics.mean(price.values()):.1f} points on clean streams" in said
    assert f"{price['art_painting']:.1f} are lost on Art and {price['photo']:.1f} on photo" in said
    assert f"{-price['cartoon']:.1f} and {-price['sketch']:.1f} won on cartoon and sketch" in said
    labels = {label for label, _, _ in main_table()}
    assert max(labels, key=lambda label: ours(label, 0)) == "Tent+SAFER-A"
    assert (
        f"best of all on clean streams ({ours('Tent+SAFER-A', 0):.1f}), {ours('Tent+SAFER-A', 100):.1f} where" in said
    )


def test_pooling_on_pacs():
    said = prose("results/pacs.md")
    drop, cc, mean, entropy, top1 = (pooled("safer", rule) for rule in ("cc_drop", "cc", "mean", "entropy", "top1"))
    assert drop >= cc >= mean > max(entropy, top1)
    assert f"cc_drop ≥ cc ≥ mean where everything is attacked: {drop}, {cc}, {mean}; entropy and top1 below" in said
    assert f"(JPEG {pooled('jpeg')} on Art, FFT {pooled('fft')}, blur {pooled('blur')})" in said


def test_what_is_not_as_published():
    said = prose("results/pacs.md")
    average, sketch = below("TSD+SAFER"), below("TSD+SAFER", "sketch")
    assert f"TSD+SAFER is {average} points below the paper's averages, on sketch {sketch};" in said
    assert f"PL+SAFER is {below('PL+SAFER')} points below, on sketch {below('PL+SAFER', 'sketch')}." in said
    first, second, third = (main_table()["TSD+SAFER", "sketch", 100][seed] for seed in range(3))
    assert f"(TSD+SAFER on sketch, all of it attacked: {first:.1f}, {second:.1f} and {third:.1f})" in said
    gaps = [f"{theirs(label, 0, 'sketch') - ours(label, 0, 'sketch'):.0f}" for label in ("TSD", "PL")]
    assert f"below on clean sketch as well (TSD {gaps[0]}, PL {gaps[1]} points)" in said
    assert f"(TSD+SAFER {drawn('tsd', 'safer', 100):.1f} on sketch there, all of it attacked" in said
    robust = [f"{main_table()['RobustERM', 'sketch', 0][seed]:.0f}" for seed in range(3)]
    assert f"(on sketch {robust[0]}, {robust[1]} and {robust[2]} % with the three seeds)" in said


def test_what_surrogates_fall_to():
    least = [f for f in rows("pacs-attacks") if round(255 * f["definition"]["threat"]["eps"]) == 2]
    worst = max(fact["surrogate_attacked"] for fact in least)
    assert {(f["definition"]["surrogate"]["surrogate"], f["definition"]["seed"]) for f in least} == {
        ("art_painting", 0), ("art_painting", 1),
    }  # fmt: skip
    assert f"to {worst:.1f} % at most at a quarter of the budget (Art, two seeds)" in prose("results/pacs.md")


# --- every method, on the embedded data -----------------------------------------------------------------------------


@functools.cache
def drawn(method, predictor, rate):
    """The mean over seeds of the page of methods."""
    found = [
        row["accuracy"]
        for seed in range(3)
        for row in rows(f"methods-{seed}")
        if (row["method"], row["predictor"], row["attack_rate"]) == (method, predictor, rate)
    ]
    assert len(found) == 3
    return statistics.mean(found)


def lifted(methods, rate, predictor="safer", over="plain"):
    """How far a predictor is above another under each method."""
    return [drawn(method, predictor, rate) - drawn(method, over, rate) for method in methods]


def test_what_stands_out_among_methods():
    said = prose("results/methods.md")
    batch = ("bn", "tent", "pl", "tsd", "eata", "rdumb", "sar", "shot_im", "note", "tent+medbn")
    assert f"by {span(lifted(batch, 100))} points at 100 %" in said
    price = [-gain for gain in lifted(batch, 0)]
    assert f"costs them {min(price):.1f} to {max(price):.1f} points on clean streams" in said
    price = [-gain for gain in lifted(("none", "t3a", "memo"), 0)]
    assert f"`t3a` and `memo` {min(price):.1f} to {max(price):.1f} points when clean" in said
    assert f"lifts `none` and `t3a` by {span(lifted(('none', 't3a'), 100))} at 100 %" in said
    (cotta,) = lifted(("cotta",), 100)
    assert f"It does not help `cotta` ({cotta:.1f})" in said


def test_what_the_gate_loses_on_embedded_sketches():
    said = prose("results/methods.md")
    note = [-gain for rate in (50, 100) for gain in lifted(("note",), rate, "safer-gate", "safer")]
    assert f"it loses {note[0]:.1f} and {note[1]:.1f} points when attacked" in said
    tent = [-lifted(("tent",), rate, "safer-gate", "safer")[0] for rate in (0, 50, 100)]
    assert f"{tent[0]:.1f}, {tent[1]:.1f} and {tent[2]:.1f} points below SAFER under Tent" in prose("beyond.md")


# --- the gate on PACS -----------------------------------------------------------------------------------------------


@functools.cache
def kept():
    return benchmark("beyond").Kept(rows("pacs"))


def gap(seeds, targets, rate, to="safer", method="tent"):
    """How far the gate is above another predictor."""
    gate, other = (kept().mean(seeds, method, predictor, targets, rate) for predictor in ("safer-gate", to))
    return gate - other


def signed(value):
    return f"{value:+.2f}".replace("-", "−")


def test_how_far_the_gate_comes():
    said = prose("beyond.md")
    assert kept().seeds("tent") == [1, 2]
    clean, half, whole = gap((1, 2), TARGETS, 0, "plain"), gap((1, 2), TARGETS, 50), gap((1, 2), TARGETS, 100)
    assert f"**{signed(clean)}, {signed(half)} and {signed(whole)}**" in said
    assert f"falls {1 - half:.2f} and {-0.3 - whole:.2f} points short of the lines" in said
    three = TARGETS[:3]
    assert f"flatters it: {signed(gap((0,), three, 50))} and {signed(gap((0,), three, 100))} there" in said
    assert f"not adapting at all loses {ours('ERM', 0, 'sketch') - ours('ERM', 100, 'sketch'):.1f} points" in said
    lost = {rate: [f"{-gap((seed,), ('sketch',), rate):.1f}" for seed in (1, 2)] for rate in (50, 100)}
    assert f"{' and '.join(lost[50])} points lost at 50 %, {' and '.join(lost[100])} at 100 %" in said
    price = -statistics.mean(kept().mean((1, 2), "tsd", p, TARGETS, 0) * s for p, s in (("safer", 2), ("plain", -2)))
    assert f"under TSD, which loses {price:.0f} points to SAFER on clean streams" in said


def test_where_the_gate_is_above_safer():
    said = prose("beyond.md")
    places = [(seed, target, rate) for seed in range(3) for target in TARGETS[:3] for rate in (0, 50)]
    above = {place: gap((place[0],), (place[1],), place[2]) for place in places}
    exception = above.pop((0, "cartoon", 0))
    assert f"by {min(above.values()):.1f} to {max(above.values()):.1f} points" in said
    assert f"but for clean cartoon with seed 0 ({-exception:.1f} below)" in said
    whole = [gap((seed,), (target,), 100) for seed in range(3) for target in TARGETS[:3]]
    assert f"no more than {-min(whole):.1f} below at 100 %" in said


def test_how_well_the_gate_detects():
    found = {
        (row["target"], seed): row["detection"]
        for seed in (1, 2)
        for row in kept().usual(seed)
        if (row["method"], row["predictor"], row["attack_rate"]) == ("tent", "safer-gate", 50)
    }
    hard, easy = ([a for (target, _), a in found.items() if (target == "sketch") == wanted] for wanted in (True, False))
    assert f"(AUROC {hard[0]:.2f} and {hard[1]:.2f}, against {min(easy):.2f} to {max(easy):.2f}" in prose("beyond.md")


def test_which_view_is_dropped_on_pacs():
    """The share of batches in which it is an augmented one: of clean runs, and of sketch, all of it attacked."""
    usual = [row for seed in range(3) for row in kept().usual(seed)]
    tent = [row for row in usual if (row["method"], row["predictor"]) == ("tent", "safer")]
    clean = [100 - 100 * row["dropped_share"][0] for row in tent if row["attack_rate"] == 0]
    sketch = [
        100 - 100 * row["dropped_share"][0] for row in tent if (row["target"], row["attack_rate"]) == ("sketch", 100)
    ]
    assert (len(clean), len(sketch)) == (12, 3)
    said = (
        f"(in {min(clean):.0f} % or more of the batches of every clean run on PACS, and on sketch in {span(sketch)} %"
    )
    assert said in prose("beyond.md")


def test_how_far_originals_stray_on_the_embedded_data():
    half = [row["evidence"]["ratio"] for row in rows("evidence-synthetic") if row["attack_rate"] == 50]
    least, most = (
        [f"{choose(found[side][place] for found in half):.1f}" for side in ("clean", "attacked") for place in (0, 1)]
        for choose in (min, max)
    )
    bounds = [f"{a.replace('-', '−')} and {b}" for a, b in zip(least[::2], most[::2], strict=True)]
    widths = [f"{a} to {b}" for a, b in zip(least[1::2], most[1::2], strict=True)]
    said = f"*clean* originals is between {bounds[0]} with a deviation of {widths[0]}, that of *attacked* ones between "
    assert f"{said}{bounds[1]} with a deviation of {widths[1]}" in prose("beyond.md")


def test_what_the_next_version_gains_on_the_embedded_data():
    gaps = []
    for rate in (0, 50, 100):
        found = [row["accuracy"] for row in rows("evidence-synthetic") if row["attack_rate"] == rate]
        gaps.append(signed(statistics.mean(a["both, at most half (next)"] - a["SAFER"] for a in found)))
    assert f"it is {gaps[0]}, {gaps[1]} and {gaps[2]} points from SAFER at 0, 50 and 100 %" in prose("beyond.md")
    drawn = {row["run"]: row for row in rows("main-synthetic")}.values()
    plain, safer = (
        statistics.mean(
            row["accuracy"] for row in drawn if (row["method"], row["predictor"], row["attack_rate"]) == ("tent", p, 0)
        )
        for p in ("plain", "safer")
    )
    assert plain < safer


# --- speed ----------------------------------------------------------------------------------------------------------


def test_what_is_said_of_speed():
    said = prose("performance.md")
    gpu = rows("speed-h200")
    fast = {(r["architecture"], r["views"]): r for r in gpu if r["section"] == "accelerated" and r["compile"]}
    for architecture, text in (("resnet18", "takes {} ms through `stream()`, {} times the plain step there"),
                               ("resnet50", "{} ms through `stream()`, {} times the plain step")):  # fmt: skip
        step, plain = (fast[architecture, views]["stream_ms"] for views in (4, 0))
        assert text.format(f"{step:.2f}", f"{step / plain:.2f}") in said
    assert f"and {fast['resnet18', 4]['ms']:.2f} ms call by call" in said
    busy = {row["what"]: row["device_ms"] for row in gpu if row["section"] == "views" and row["compile"]}
    assert f"busy for {busy['step']:.2f} ms of a step, {busy['batched']:.2f} ms of them with the views" in said
    (safer,) = (row["ratio"] for row in gpu if row["section"] == "memory" and row["what"] == "SAFER")
    assert f"A SAFER step's memory is {safer:.2f} times a plain one's" in said
    found = {(r["views"], r["precision"], r["compile"]): r["accuracy"] for r in gpu if r["section"] == "accuracy"}
    tent, half, compiled = (
        f"{found[0, p, c]:.2f}" for p, c in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    )
    assert half == compiled
    assert f"Tent is at {tent} % in float32 and {half} in bfloat16, compiled or not" in said
    (same,) = {f"{value:.2f}" for (views, _, _), value in found.items() if views}
    assert f"SAFER is at {same} all three ways" in said


def test_what_a_step_costs_in_the_paper():
    with (ROOT / "src/safer_tta/bench/paper/compute_overhead.csv").open() as file:
        found = {row["method"]: row for row in csv.DictReader(file)}
    plain, safer = (float(found[name]["step_time_ms_mean"]) for name in ("Tent", "Tent+SAFER (N=4)"))
    costs = f"costs {safer / plain:.1f} plain ones ({safer:.0f} against {plain:.0f} ms"
    assert costs in prose("performance.md")


def test_what_is_said_of_the_service():
    said, found = prose("performance.md"), rows("serve-cpu")
    (ratio,) = (r["ratio"] for r in found if r["section"] == "latency" and r["what"] == "service")
    assert f"takes {ratio:.2f} times the library's time for a batch of 64" in said
    speed = {row["streams"]: row["images_per_s"] for row in found if row["section"] == "throughput"}
    assert f"as many images a second as with one, {speed[64]:.0f} against {speed[1]:.0f}" in said
