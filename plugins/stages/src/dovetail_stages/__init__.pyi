from .numerics.deferred import (
    max_metric as max_metric,
    mean_metric as mean_metric,
    resolve_metrics as resolve_metrics,
    share_metric as share_metric,
)
from .numerics.explained_variance import ExplainedVariance as ExplainedVariance
from .numerics.finite import (
    sample_names as sample_names,
)
from .numerics.kl import estimate_kl as estimate_kl
from .numerics.loss_aggregation import sum_by_sample as sum_by_sample
from .numerics.masked import (
    whiten as whiten,
)
from .numerics.objective_factory import (
    build_objective as build_objective,
    prepare_mini_batch as prepare_mini_batch,
)
from .numerics.objective_terms import (
    all_finite as all_finite,
    loss_denominators as loss_denominators,
    loss_share as loss_share,
    metric_weight as metric_weight,
    on_device as on_device,
    pair_rows as pair_rows,
    token_column as token_column,
)
from .numerics.plugin_results import (
    DeclaredColumns as DeclaredColumns,
    check_correction as check_correction,
    check_losses as check_losses,
)
from .numerics.rollout_correction import (
    Criterion as Criterion,
    bounded_weights as bounded_weights,
    importance_ratios as importance_ratios,
    kept_tokens as kept_tokens,
    log_ratios as log_ratios,
    normalized_weights as normalized_weights,
)
from .numerics.rollout_correction_metrics import (
    divergence_metrics as divergence_metrics,
    rejection_metrics as rejection_metrics,
    weight_metrics as weight_metrics,
)
from .standard import Standard as Standard
