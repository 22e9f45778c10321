"""A small wrapped model on generated images: what the reliability weights do when some of them are noise."""

import torch

import safer_tta


def blobs(count: int, generator: torch.Generator) -> torch.Tensor:
    """Smooth coloured patches: low-frequency content that survives blurring, as a photograph's does."""
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    return torch.nn.functional.interpolate(coarse, size=(64, 64), mode="bicubic").clamp(0, 1)


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = safer_tta.models.zoo.create("resnet18", num_classes=7)
    adapted = safer_tta.adapt(model, "tent", seed=0)
    share = {"clean": 0.0, "perturbed": 0.0}
    print("SAFER around Tent: five views of 16 images a batch, view 0 is the image itself.\n")
    for number in range(4):
        images = blobs(16, generator)
        if number >= 2:  # a perturbation that smoothing removes: only view 0 carries it in full
            images = (images + 0.25 * torch.randn(images.shape, generator=generator).sign()).clamp(0, 1)
        report = adapted(images).report
        kind = "perturbed" if number >= 2 else "clean    "
        print(f"batch {number}, {kind}  reliability {_row(report.reliability)}  weights {_row(report.weights[:, 0])}")
        print(f"    dropped view {int(report.dropped)}; mean suspicion {report.signal.mean():.3f}")
        for view, operators in enumerate(report.pipelines, start=1):
            print(f"    view {view}: {' → '.join(operators)}")
        share["perturbed" if number >= 2 else "clean"] += float(report.weights[0].mean()) / 2
    print(
        f"\nWeight of the original view: {share['clean']:.2f} on clean batches, {share['perturbed']:.2f} on perturbed."
    )


def _row(values: torch.Tensor) -> str:
    return " ".join(f"{value:6.3f}" for value in values.tolist())


if __name__ == "__main__":
    main()
