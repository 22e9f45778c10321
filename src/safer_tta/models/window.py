"""What the last answers of a stream say about how far its images can be trusted."""

import torch
from torch import Tensor, nn

WINDOW = 256  # images that a stream is known by
PRIOR = 64.0  # images that the source's statistics count for
MOST_INDEPENDENT = 64.0  # images that the stream's statistics count for at most
LEAST_DIVERSE = 4.0  # independent images that a stream must show before a method learns from it


class Window(nn.Module):
    """Counts the answers of a stream. All layers of a model share one.

    Attributes:
        answers: The share of every class among the last answers, (K,).
        images: How many images they were given to, a scalar.
        views: How many views of each image pass through the model now.
    """

    answers: Tensor
    images: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.register_buffer("answers", torch.zeros(classes))
        self.register_buffer("images", torch.zeros(()))
        self.views = 1

    def share(self, images: int) -> Tensor:
        """Return the share of so many new images in the window."""
        return images / (self.images + images).clamp(min=images, max=max(WINDOW, images))

    def after(self, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares of classes and the number of images as they will be with these answers (B,K) too."""
        shares = torch.lerp(self.answers, answers.mean(dim=0), self.share(len(answers)))
        return shares, (self.images + len(answers)).clamp(max=WINDOW)

    def trust(self) -> Tensor:
        """Return λ, the share of the stream in the statistics."""
        images = independent(self.answers, self.images)
        return images / (images + PRIOR)

    @torch.no_grad()
    def add(self, answers: Tensor) -> None:
        """Count answers (B,K)."""
        shares, images = self.after(answers)
        self.answers.copy_(shares)
        self.images.copy_(images)


def independent(answers: Tensor, images: Tensor) -> Tensor:
    """Return how many independent images so many count for, given their shares of classes (K,)."""
    seen, classes = images.clamp(min=1, max=MOST_INDEPENDENT), len(answers)
    by_chance = 1 / classes + (1 - 1 / classes) / seen
    excess = (answers.square().sum() - by_chance).clamp(min=0)
    return torch.where(images > 0, 1 / (excess + 1 / seen), 0.0)
