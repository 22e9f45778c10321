"""What the last answers of a stream say about how far its images can be trusted."""

import torch
from torch import Tensor, nn

WINDOW = 256  # images that a stream is known by
# Images that one pass counts for at most. The layers cast their votes before those above them followed the stream. If
# all follow at once, they go too far, and the second batch of a stream is answered worse than the first.
MOST_OF_PASS = 16
PRIOR = 64.0  # images that the source's statistics count for
MOST_INDEPENDENT = 64.0  # images that the stream's statistics count for at most
LEAST_DIVERSE = 4.0  # independent images that a stream must show before a method learns from it


class Window(nn.Module):
    """Counts the answers of a stream. All layers of a model share one.

    Its tensors may have a first dimension of streams, which are then counted side by side.

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

    @property
    def streams(self) -> torch.Size:
        """The first dimension of all that it and its layers know: of one stream none."""
        return self.images.shape

    def share(self, images: int) -> Tensor:
        """Return the share of so many new images in the window, to multiply what is known of a stream."""
        return _beside(images / (self.images + images).clamp(min=images, max=max(WINDOW, images)))

    def after(self, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares of classes and the number of images as they will be with these answers (B,K) too."""
        images = answers.shape[-2]
        shares = torch.lerp(self.answers, answers.mean(dim=-2), self.share(images))
        return shares, (self.images + min(images, MOST_OF_PASS)).clamp(max=WINDOW)

    def trust(self) -> Tensor:
        """Return λ, the share of the stream in the statistics, to multiply them."""
        images = independent(self.answers, self.images)
        return _beside(images / (images + PRIOR))

    def side_by_side(self, images: Tensor) -> Tensor:
        """Return what is known of every image, (V,B·G,·), with its stream first, (V,G,B,·); of one stream as it is."""
        return torch.unflatten(images, 1, (-1, *self.streams)).transpose(1, 2) if self.streams else images

    @torch.no_grad()
    def add(self, answers: Tensor) -> None:
        """Count answers (B,K)."""
        shares, images = self.after(answers)
        self.answers.copy_(shares)
        self.images.copy_(images)


def independent(answers: Tensor, images: Tensor) -> Tensor:
    """Return how many independent images so many count for, given their shares of classes (K,)."""
    seen, classes = images.clamp(min=1, max=MOST_INDEPENDENT), answers.shape[-1]
    by_chance = 1 / classes + (1 - 1 / classes) / seen
    excess = (answers.square().sum(dim=-1) - by_chance).clamp(min=0)
    return torch.where(images > 0, 1 / (excess + 1 / seen), 0.0)


def _beside(figure: Tensor) -> Tensor:
    """Shape one figure a stream so that it multiplies what is known of the streams."""
    return figure.unsqueeze(-1) if figure.ndim else figure
