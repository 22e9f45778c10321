"""Models of other libraries, and odd ones, built without a download: small, with fresh weights."""

import contextlib
import functools
import importlib
import json
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.conftest import SmallNet, small_net

CLASSES, FEATURES = 10, 32  # of every model here; of image encoders
ODD: dict[str, Callable[[], object]] = {}


def build(library: str, name: str, side: int, options: str) -> object:
    """Return a model of a row of the listing."""
    given = json.loads(options or "{}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LIBRARIES[library](name, side, given)


def allow_torchvision() -> None:
    """PyPI's torchvision beside CPU torch misses the schemas of two operators that are not called here."""
    with contextlib.suppress(ImportError):
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            keep_schemas()


@functools.cache
def keep_schemas() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def timm(name: str, side: int, options: dict[str, object]) -> nn.Module:
    create = importlib.import_module("timm").create_model
    with contextlib.suppress(TypeError):  # convolutional networks take any size
        return create(name, num_classes=CLASSES, img_size=side, **options)
    return create(name, num_classes=CLASSES, **options)


def torchvision(name: str, side: int, options: dict[str, object]) -> nn.Module:
    return importlib.import_module("torchvision.models").get_model(name, num_classes=CLASSES, **options)


def transformers(name: str, side: int, options: dict[str, object]) -> nn.Module:
    """Build `Prefix:Class`, or `PrefixForImageClassification`, from its configuration."""
    library = importlib.import_module("transformers")
    prefix, _, kind = name.partition(":")
    options = {"image_size": side, "num_labels": CLASSES, **options}
    config = getattr(library, f"{prefix}Config")(**options)
    return getattr(library, kind or f"{prefix}ForImageClassification")(config)


def open_clip(name: str, side: int, options: dict[str, dict[str, object]]) -> nn.Module:
    """Build a CLIP model of open_clip from the sizes of its towers."""
    made = importlib.import_module("open_clip.model").CLIP
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    return made(FEATURES, {"image_size": side, **options}, text)


def own(name: str, side: int, options: dict[str, object]) -> object:
    return ODD[name]()


LIBRARIES = {
    "timm": timm, "torchvision": torchvision, "transformers": transformers, "open_clip": open_clip, "own": own,
}  # fmt: skip


def odd(make: Callable[[], object]) -> Callable[[], object]:
    ODD[make.__name__.replace("_", " ")] = make
    return make


class After(nn.Module):
    """A network, and a function of its scores."""

    def __init__(self, function: Callable[[Tensor], object], classes: int = CLASSES) -> None:
        super().__init__()
        self.net, self.function = small_net(classes), function

    def forward(self, x: Tensor) -> object:
        return self.function(self.net(x))


@odd
def a_softmax_behind() -> nn.Module:
    return After(lambda scores: scores.softmax(dim=1))


@odd
def a_sigmoid_behind() -> nn.Module:
    return After(torch.sigmoid)


@odd
def a_log_softmax_behind() -> nn.Module:
    return After(lambda scores: scores.log_softmax(dim=1))


@odd
def a_temperature_behind() -> nn.Module:
    return After(lambda scores: scores / 2.5)


@odd
def a_tanh_behind() -> nn.Module:
    return After(torch.tanh)


@odd
def a_tuple() -> nn.Module:
    return After(lambda scores: (None, scores))


@odd
def a_dict() -> nn.Module:
    return After(lambda scores: {"loss": None, "scores": scores})


@odd
def a_dict_with_logits() -> nn.Module:
    return After(lambda scores: {"logits": scores})


@odd
def one_score() -> nn.Module:
    return small_net(classes=1)


@odd
def one_score_squeezed() -> nn.Module:
    return After(lambda scores: scores.squeeze(1), classes=1)


@odd
def an_unused_linear_layer() -> nn.Module:
    net = small_net(CLASSES)
    net.auxiliary = nn.Linear(16, CLASSES)
    return net


class TwoHeads(SmallNet):
    def __init__(self) -> None:
        super().__init__(CLASSES)
        self.other = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))).mean(dim=(2, 3))
        return (self.fc(x) + self.other(x)) / 2


odd(TwoHeads)


class Cosine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 16))

    def forward(self, x: Tensor) -> Tensor:
        return 16 * nn.functional.linear(nn.functional.normalize(x), nn.functional.normalize(self.weight))


def with_head(head: nn.Module) -> nn.Module:
    net = small_net(CLASSES)
    net.fc = head
    return net


@odd
def a_cosine_head() -> nn.Module:
    return with_head(Cosine())


@odd
def a_1x1_convolution() -> nn.Module:
    body = [nn.Conv2d(3, 16, 3, stride=4), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*body, nn.Conv2d(16, CLASSES, 1), nn.Flatten())


@odd
def a_1x1_convolution_before_pooling() -> nn.Module:
    body = [nn.Conv2d(3, 16, 3, stride=4), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*body, nn.Conv2d(16, CLASSES, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, 16, 8, stride=8), nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.patches(x).flatten(2).transpose(1, 2))).mean(dim=1)


odd(Tokens)


@odd
def a_lazy_head() -> nn.Module:
    return with_head(nn.LazyLinear(CLASSES))


@odd
def an_old_weight_norm() -> nn.Module:
    return with_head(torch.nn.utils.weight_norm(nn.Linear(16, CLASSES)))


@odd
def a_new_weight_norm() -> nn.Module:
    return with_head(torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, CLASSES)))


@odd
def a_spectral_norm() -> nn.Module:
    return with_head(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(16, CLASSES)))


@odd
def a_lock_in_the_model() -> nn.Module:
    import threading

    net = small_net(CLASSES)
    net.lock = threading.Lock()
    return net


@odd
def an_own_normalisation_layer() -> nn.Module:
    class Normalize(nn.Module):
        mean, std = 0.4, 0.2

        def forward(self, x: Tensor) -> Tensor:
            return (x - self.mean) / self.std

    return nn.Sequential(Normalize(), small_net(CLASSES))


@odd
def an_image_encoder() -> nn.Module:
    body = [nn.Conv2d(3, FEATURES, 3, stride=4), nn.BatchNorm2d(FEATURES), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*body, nn.Flatten())


@odd
def a_data_parallel_model() -> nn.Module:
    return nn.DataParallel(small_net(CLASSES))


@odd
def a_compiled_model() -> nn.Module:
    return torch.compile(small_net(CLASSES))


@odd
def a_graph_module() -> nn.Module:
    return torch.fx.symbolic_trace(small_net(CLASSES))


@odd
def a_double_precision_model() -> nn.Module:
    return small_net(CLASSES).double()


@odd
def no_norm_layer() -> nn.Module:
    return small_net(CLASSES, norm="none")


@odd
def a_group_norm() -> nn.Module:
    return small_net(CLASSES, norm="group")


@odd
def a_recurrent_network() -> nn.Module:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.norm, self.fc = nn.LSTM(3 * 32, 16, batch_first=True), nn.LayerNorm(16), nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            rows, _ = self.lstm(x.transpose(1, 2).flatten(2))
            return self.fc(self.norm(rows[:, -1]))

    return Rows()


@odd
def auxiliary_scores_in_training() -> nn.Module:
    class Auxiliary(TwoHeads):
        def forward(self, x: Tensor) -> object:
            return (SmallNet.forward(self, x), None) if self.training else SmallNet.forward(self, x)

    return Auxiliary()


def with_channels(count: int) -> nn.Module:
    net = small_net(CLASSES)
    net.conv1 = nn.Conv2d(count, 8, 3, stride=2, padding=1)
    return net


@odd
def one_channel() -> nn.Module:
    return with_channels(1)


@odd
def twelve_channels() -> nn.Module:
    return with_channels(12)


@odd
def a_traced_model() -> nn.Module:
    return torch.jit.trace(small_net(CLASSES).eval(), torch.rand(2, 3, 32, 32))


@odd
def a_quantised_model() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(small_net(CLASSES), {nn.Linear})


@odd
def an_exported_program() -> nn.Module:
    return torch.export.export(small_net(CLASSES).eval(), (torch.rand(2, 3, 32, 32),)).module()
