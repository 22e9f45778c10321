"""Adapt in three lines and read the report: how suspicion and the weights of views change when images are perturbed.

Nothing is trained here. A pretrained network with a new head has features to compare views by, which is enough.
"""

import torch
from torch import Tensor

import safer_tta
from safer_tta.data import open_dataset
from safer_tta.models import zoo
from safer_tta.training import SHIPPED

BATCH = 32


def perturbed(images: Tensor) -> Tensor:
    """Move every value up or down by the same amount. Smoothing removes most of it, so only view 0 keeps it all."""
    signs = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).sign()
    return (images + 0.2 * signs).clamp(0, 1)


def show(kind: str, prediction: safer_tta.Prediction) -> None:
    report = prediction.report
    print(f"{kind}: mean suspicion {report.suspicion.mean():.3f}")
    for view, name in enumerate(["the image itself", *(" → ".join(operators) for operators in report.pipelines)]):
        figures = f"reliability {report.reliability[view]:6.3f}  weight {report.weights[view, 0]:.3f}"
        print(f"  view {view}  {figures}  {name}")


def main() -> None:
    torch.manual_seed(0)
    model = zoo.create("small", num_classes=7, weights=SHIPPED)
    pictures = open_dataset("synthetic", count=4 * BATCH).domain("photo").images
    batches = (torch.from_numpy(pictures) / 255).split(BATCH)

    adapted = safer_tta.adapt(model, seed=0)
    share: dict[str, list[float]] = {"clean": [], "perturbed": []}
    for number, images in enumerate(batches):
        kind = "clean" if number < 2 else "perturbed"
        prediction = adapted(images if kind == "clean" else perturbed(images))
        show(f"batch {number}, {kind}", prediction)
        share[kind].append(float(prediction.report.weights[0].mean()))
    clean, hit = (sum(shares) / len(shares) for shares in share.values())
    print(f"\nMean weight of the image itself: {clean:.2f} in clean batches, {hit:.2f} in perturbed ones.")


if __name__ == "__main__":
    main()
