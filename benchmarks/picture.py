"""Draw the picture of the README: an attacked image, its views, the answer of each, and the one that is dropped.

python benchmarks/picture.py --folder demo/picture --target photo --out docs/views.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

from safer_tta.bench.experiment import Experiment
from safer_tta.bench.qualitative import one_attacked_image
from safer_tta.bench.report import View
from safer_tta.bench.run import Materials
from safer_tta.data import ArrayStore, excerpt, open_dataset
from safer_tta.data.store import digest_file
from safer_tta.training import attacked_copies, source_recipe, surrogate_recipe, train_source, train_surrogate
from safer_tta.training.definitions import definition_of

IMAGES = 512
RIGHT, WRONG, QUIET = "#1a7f37", "#b42318", "#57606a"


def views(folder: Path, target: str) -> list[View]:
    """Return one attacked image and its views; models and attacked images in the folder are not made again."""
    data = open_dataset("synthetic")
    source, path = folder / f"{target}.src.safetensors", folder / f"{target}.sur.safetensors"
    train_source(data, target, source_recipe("synthetic"), source)
    surrogate = train_surrogate(data.domain(target), surrogate_recipe("synthetic"), path)
    domain = excerpt(data.domain(target), IMAGES, 0)
    attacked = attacked_copies(domain, surrogate, ArrayStore(folder / "a"), source=digest_file(path))
    experiment = Experiment(
        data=data.identity, target=target, source=definition_of(source), method="tent", predictor="safer", images=IMAGES
    )
    return one_attacked_image(experiment, Materials((domain,), source, (attacked,)))


def draw(shown: list[View], out: Path) -> None:
    figure, axes = plt.subplots(1, len(shown), figsize=(2 * len(shown), 3.1), dpi=110, facecolor="white")
    for axis, view in zip(axes, shown, strict=True):
        axis.imshow(view.image.transpose(1, 2, 0), interpolation="nearest")
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_title(view.title, fontsize=10, color=WRONG if view.dropped else "black")
        answer = f"“{view.predicted}” {100 * view.confidence:.0f} %"
        axis.set_xlabel(answer, fontsize=10, color=RIGHT if view.right else WRONG)
        for spine in axis.spines.values():
            spine.set(color=WRONG if view.dropped else QUIET, linewidth=3 if view.dropped else 1)
        below = {"transform": axis.transAxes, "ha": "center", "va": "top", "fontsize": 8, "color": QUIET}
        axis.text(0.5, -0.2, "\n".join(words(view)), **below)
    figure.savefig(out, bbox_inches="tight", metadata={"Software": None})


def words(view: View) -> list[str]:
    if view.reliability is None:
        return []
    weight = "dropped" if view.dropped else f"weight {view.weight:.2f}"
    return [f"reliability {view.reliability:.2f}, {weight}", *view.operators]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("demo/picture"))
    parser.add_argument("--target", default="photo")
    parser.add_argument("--out", type=Path, required=True)
    o = parser.parse_args()
    o.folder.mkdir(parents=True, exist_ok=True)
    shown = views(o.folder, o.target)
    if not shown:
        parser.error(f"no attacked image of {o.target} is saved by its views; choose another --target")
    draw(shown, o.out)


if __name__ == "__main__":
    main()
