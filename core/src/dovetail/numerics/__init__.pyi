from .deferred import (
    max_metric as max_metric,
    mean_metric as mean_metric,
    resolve_metrics as resolve_metrics,
    share_metric as share_metric,
)
from .finite import (
    listed as listed,
    sample_names as sample_names,
)
from .kl import estimate_kl as estimate_kl
from .loss_aggregation import sum_by_sample as sum_by_sample
from .masked import (
    EPSILON as EPSILON,
    ROUNDING as ROUNDING,
    masked_mean as masked_mean,
    masked_var as masked_var,
    whiten as whiten,
    whiten_weighted as whiten_weighted,
)
from .objective import (
    Objective as Objective,
    ObjectiveTerm as ObjectiveTerm,
)
from .preference_objective import (
    preference_scores as preference_scores,
    with_other_scores as with_other_scores,
)
from .rollout_correction import (
    Criterion as Criterion,
    bounded_weights as bounded_weights,
    importance_ratios as importance_ratios,
    kept_tokens as kept_tokens,
    log_ratios as log_ratios,
    normalized_weights as normalized_weights,
)
from .rollout_correction_metrics import (
    divergence_metrics as divergence_metrics,
    rejection_metrics as rejection_metrics,
    weight_metrics as weight_metrics,
)
from .tensor_digest import DeferredDigests as DeferredDigests
