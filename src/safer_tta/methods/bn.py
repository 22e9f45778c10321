"""BN: normalise with the statistics of the test batch; nothing is learnt.

Schneider et al., "Improving robustness against common corruptions by covariate shift adaptation", NeurIPS 2020;
Nado et al., "Evaluating prediction-time batch normalization for robustness under covariate shift", 2020.
"""

from ..errors import InvalidValueError
from ..models.norm import BATCH_NORMS, use_train_mode
from ..predictors import Outlook
from . import Cost, Method, register


@register("bn")
class BatchStatistics(Method):
    updates = "none"
    cost = Cost(1, 0)

    def prepare(self) -> None:
        norms = self.classifier.norms()
        if not any(isinstance(norm, BATCH_NORMS) for norm in norms):
            raise InvalidValueError(
                "bn normalises with the batch and the model has no batch-norm layer, so nothing would change; expected "
                "one that has, or method 'none'"
            )
        use_train_mode(norms)

    def objective(self, seen: Outlook) -> None:
        return None
