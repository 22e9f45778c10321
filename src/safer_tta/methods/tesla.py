"""TeSLA: a teacher's refined answers, and augmentations chosen to be hard.

Tomar et al., "TeSLA: Test-time self-learning with automatic adversarial augmentation", CVPR 2023.
The teacher (average of the student, 0.99; eval mode) answers on the image and four easy views; the mean is refined by
its ten nearest neighbours in a queue of 256 per class, into which the batch goes first. Objective on one of the five
views: Σ p̄ log p̄ of the batch's mean prediction, plus the flipped cross-entropy -Σ p_student log p_soft, plus
KL(p_soft ‖ student) on a hard view from a learned policy. The policy is trained after every batch (Adam, 0.1): it
raises the teacher's entropy while the mean inputs of the teacher's norm layers stay where the plain batch has them
(mean squared difference, averaged over layers); the choice of pairs learns by REINFORCE. All parameters of the
student learn, batch norms in train mode. The answer is the student's on the view it learnt from.

On a predictor with views of its own (SAFER), each of TeSLA's views is seen through those: it works, at the product of
both costs.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

from ..models.norm import use_train_mode
from ..predictors import Draw
from . import Cost, Method, Step, count, option, positive, register, share
from ._frame.augmentations import easy
from ._frame.losses import marginal_entropy, softmax_entropy
from ._frame.policy import Policy
from ._frame.supports import lowest_of_each_class
from ._frame.teacher import follow, make_teacher

SMALLEST = 1e-6  # probabilities are floored here before their logarithm is taken


@register("tesla")
class TeSLA(Method):
    updates = "all"
    cost = Cost(9, 3)
    by_predictor = False
    own_views = True
    lr: float = option(1e-4, positive)
    keep: float = option(0.99, share)
    easy_views: int = option(4, count)
    queue: int = option(256, count)
    neighbours: int = option(10, count)
    policy_lr: float = option(0.1, positive)

    def prepare(self) -> None:
        self.teacher = make_teacher(self.predictor, self.state)  # before train mode: the teacher stays in eval mode
        use_train_mode(self.classifier.norms())
        self.policy = Policy()
        self.state.models["policy"] = self.policy
        self.state.optimizers["policy_optimizer"] = Adam(self.policy.parameters(), lr=self.policy_lr)
        head = self.classifier.head
        self.state.memory["queue_features"] = head.weight.new_zeros(0, head.in_features)
        self.state.memory["queue_probs"] = head.weight.new_zeros(0, head.out_features)

    def forward(self, images: Tensor, draw: Draw) -> Step:
        generator = draw.generator()
        views = [images, *(easy(images, generator) for _ in range(self.easy_views))]
        chosen = int(torch.randint(len(views), (), generator=generator))
        hard = self.policy.apply_pairs(images, self.policy.draw(len(images), generator)).detach()
        with torch.no_grad():
            taught = [self.teacher.look(view, draw).lesson for view in views]
            features = torch.stack([t.features for t in taught]).mean(dim=0)
            new = {"queue_features": features, "queue_probs": torch.stack([t.probs for t in taught]).mean(dim=0)}
            queue = {name: torch.cat([self.state.memory[name], rows]) for name, rows in new.items()}
            soft = self._refined(features, queue)
        seen = self.predictor.look(views[chosen], draw)
        flipped = -(seen.lesson.probs * soft.clamp_min(SMALLEST).log()).sum(dim=1).mean()
        on_hard = self.predictor.look(hard, draw).lesson.logits.log_softmax(dim=1)
        distance = (soft * (soft.clamp_min(SMALLEST).log() - on_hard)).sum(dim=1).mean()
        loss = -marginal_entropy(seen.lesson.logits) + flipped + distance
        return Step(seen, loss, kept=queue)

    def commit(self, images: Tensor, step: Step) -> None:
        labels = step.kept["queue_probs"].argmax(dim=1)
        youngest_first = -torch.arange(len(labels), device=images.device)
        kept = lowest_of_each_class(labels, youngest_first, self.queue).sort().values
        self.state.memory.update({name: values[kept] for name, values in step.kept.items()})
        follow(self.teacher, self.predictor, self.keep)
        self._train_policy(images)

    def _refined(self, features: Tensor, queue: dict[str, Tensor]) -> Tensor:
        """The mean answer of the nearest neighbours, by cosine."""
        similarity = F.normalize(features, dim=1) @ F.normalize(queue["queue_features"], dim=1).T
        nearest = similarity.topk(min(self.neighbours, similarity.shape[1]), dim=1).indices
        return queue["queue_probs"][nearest].mean(dim=1)

    @torch.enable_grad()
    def _train_policy(self, images: Tensor) -> None:
        generator = self.predictor.generator
        draw, pairs = self.predictor.draw(images), self.policy.draw_any(len(images), generator)
        with torch.no_grad(), _input_means(self.teacher.classifier.norms()) as plain:
            self.teacher(images, draw)
        with _input_means(self.teacher.classifier.norms()) as hard:
            h = softmax_entropy(self.teacher.look(self.policy.apply_pairs(images, pairs), draw).lesson.logits)
        drift = [F.mse_loss(a, b) for a, b in zip(hard, plain, strict=True)]
        penalty = torch.stack(drift).mean() if drift else h.new_zeros(())
        preference = self.policy.choice.log_softmax(dim=0)[pairs].to(h)
        loss = penalty - h.mean() - (preference * h.detach()).mean()
        optimizer = self.state.optimizers["policy_optimizer"]
        optimizer.zero_grad()
        self.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@contextlib.contextmanager
def _input_means(norms: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the mean input of every norm layer, per channel, inside."""
    means: list[Tensor] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        means.append(x.mean(dim=[axis for axis in range(x.ndim) if axis != 1]))

    with contextlib.ExitStack() as stack:
        for norm in norms:
            stack.callback(norm.register_forward_pre_hook(note).remove)
        yield means
