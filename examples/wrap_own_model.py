"""Your own network: declare its normalisation, adapt it, read the report, save the state and continue later."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import safer_tta
from safer_tta.data import Batch, Dataset, Stream, StreamSpec, open_dataset
from safer_tta.models import zoo
from safer_tta.training import SHIPPED

TARGET = "painting"


class OwnNet(nn.Module):
    """A network with two linear layers, so the head must be named. Any module that ends in a linear layer works."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.backbone = zoo.create("small", weights=SHIPPED, num_classes=1)  # pretrained on letters and digits
        self.scores = nn.Linear(self.backbone.fc.in_features, classes)
        self.other_task = nn.Linear(self.backbone.fc.in_features, 4)  # forward does not use it
        self.backbone.fc = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.backbone(x))


def train(dataset: Dataset, steps: int = 80) -> tuple[OwnNet, list[float], list[float]]:
    """Train on normalised images of all domains except the target, in an ordinary loop."""
    domains = [dataset.domain(name) for name in dataset.domains if name != TARGET]
    images = torch.cat([torch.from_numpy(d.images) for d in domains]).float() / 255
    labels = torch.cat([torch.from_numpy(d.labels) for d in domains])
    mean, std = images.mean(dim=(0, 2, 3)), images.std(dim=(0, 2, 3))
    images = (images - mean[:, None, None]) / std[:, None, None]
    model = OwnNet(len(dataset.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (48,))
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), mean.tolist(), std.tolist()


def accuracy(method: safer_tta.Method, batches: list[Batch]) -> float:
    """Return the accuracy in percent of a method that adapts while it answers."""
    answers = torch.cat([prediction.labels for prediction in method.stream(batches)])
    return 100 * float((answers == torch.cat([batch.labels for batch in batches])).float().mean())


def show(prediction: safer_tta.Prediction, label: int, classes: tuple[str, ...]) -> None:
    """Print the answer to the first image of a batch and the reasons for it."""
    report = prediction.report
    answer = int(prediction.labels[0])
    answered = f"answered {classes[answer]} ({prediction.probs[0, answer]:.2f})"
    print(f"a {classes[label]}, {answered}, suspicion {report.suspicion[0]:.3f}")
    names = ["original", *(" → ".join(operators) for operators in report.pipelines)]
    for view, name in enumerate(names):
        says = classes[int(report.view_probs[view, 0].argmax())]
        figures = f"reliability {report.reliability[view]:6.3f}  weight {report.weights[view, 0]:.3f}"
        print(f"  {figures}  says {says:8}  {name}")


def main() -> None:
    torch.manual_seed(0)
    dataset = open_dataset("synthetic", count=280)
    model, mean, std = train(dataset)
    undeclared = safer_tta.Classifier(model, head="scores")
    wrapped = safer_tta.Classifier(model, head="scores", mean=mean, std=std)

    batches = list(Stream([dataset.domain(TARGET)], StreamSpec(batch=40)))
    adapted = safer_tta.adapt(wrapped, "tent", seed=0)
    print(f"accuracy on {TARGET}, %")
    print(f"  {accuracy(safer_tta.adapt(undeclared, 'none', 'plain'), batches):5.1f}  normalisation not declared")
    print(f"  {accuracy(safer_tta.adapt(wrapped, 'none', 'plain'), batches):5.1f}  declared")
    print(f"  {accuracy(adapted, batches):5.1f}  declared, and adapted with Tent on SAFER-G")

    # Pass images in [0,1] or as bytes. Normalised images are refused, so that they are not normalised twice.
    try:
        adapted(wrapped.normalise(batches[0].images / 255))
    except safer_tta.SaferError as error:
        print(f"refused: {error}\n")

    # Adapt to half of the stream and save. Another process would wrap the same model and load the file.
    adapted.reset()
    *_, prediction = adapted.stream(batches[:4])
    show(prediction, int(batches[3].labels[0]), dataset.classes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stream.safetensors"
        adapted.save(path)
        # The file contains the generator, so the seed given here does not matter.
        later = safer_tta.adapt(wrapped, "tent", seed=1).load(path)
        print(f"\nsaved {path.stat().st_size} bytes; the model itself is not in the file")
    pairs = zip(adapted.stream(batches[4:]), later.stream(batches[4:]), strict=True)
    print(f"continued, both answer the same: {all(torch.equal(one.probs, two.probs) for one, two in pairs)}")

    # Export a plain module, which takes normalised images as before. After Tent its batch norms use the statistics of
    # each batch, in eval mode too, so pass it batches and not single images.
    exported = adapted.export()
    with torch.no_grad():
        scores = exported(wrapped.normalise(batches[0].images / 255))
    print(f"exported: {type(exported).__name__}, scores {tuple(scores.shape)}")


if __name__ == "__main__":
    main()
