"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.scoring._bytes import (
    ByteScorer as ByteScorer,
    ByteScores as ByteScores,
    ByteTeacher as ByteTeacher,
)
from torchrl_llm_kl.scoring._critic import (
    TokenCritic as TokenCritic,
)
from torchrl_llm_kl.scoring._explain import (
    Explanation as Explanation,
)
from torchrl_llm_kl.scoring._options import (
    DEFAULT_MEMORY as DEFAULT_MEMORY,
    Sampling as Sampling,
    ScoreOptions as ScoreOptions,
)
from torchrl_llm_kl.scoring._plans import (
    plan_micro_batches as plan_micro_batches,
)
from torchrl_llm_kl.scoring._protocol import (
    Scorer as Scorer,
)
from torchrl_llm_kl.scoring._reference import (
    prepare_reference as prepare_reference,
)
from torchrl_llm_kl.scoring._remembered import (
    RememberedModel as RememberedModel,
    fingerprint_of as fingerprint_of,
)
from torchrl_llm_kl.scoring._request import (
    ScoreRequest as ScoreRequest,
)
from torchrl_llm_kl.scoring._scorer import (
    LogProbScorer as LogProbScorer,
)
from torchrl_llm_kl.scoring._scores import (
    Scores as Scores,
)
from torchrl_llm_kl.scoring._store import (
    ScoreStore as ScoreStore,
)
from torchrl_llm_kl.scoring._updater import (
    ReferenceUpdater as ReferenceUpdater,
)
from torchrl_llm_kl.scoring._versions import (
    VersionedScorer as VersionedScorer,
    VersionLostError as VersionLostError,
    WeightHistory as WeightHistory,
)
from torchrl_llm_kl.scoring._wrapper import (
    SamplerMismatchWarning as SamplerMismatchWarning,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.scoring._extras import (
    Adapters as Adapters,
    AfterPrompt as AfterPrompt,
    Entropy as Entropy,
    EntrySpec as EntrySpec,
    ExactKL as ExactKL,
    Extra as Extra,
    Images as Images,
    KeptTokens as KeptTokens,
    Moments as Moments,
    Of as Of,
    PolicyVersions as PolicyVersions,
    RoutedExperts as RoutedExperts,
    SamplerLogProbs as SamplerLogProbs,
    ScoredStep as ScoredStep,
    ScoringContext as ScoringContext,
    ScoringJob as ScoringJob,
    TopK as TopK,
    asked_of as asked_of,
    check_extras as check_extras,
    fill as fill,
    read_fields as read_fields,
    with_defaults as with_defaults,
)
from torchrl_llm_kl.scoring._model import (
    evaluating as evaluating,
    output_size as output_size,
    placeholders as placeholders,
    position_limit as position_limit,
    trains_with as trains_with,
    vocab_size as vocab_size,
)
from torchrl_llm_kl.scoring._options import (
    Changes as Changes,
    as_sampling as as_sampling,
    truncate as truncate,
)
from torchrl_llm_kl.scoring._protocol import (
    FEATURES as FEATURES,
    Model as Model,
    check_offers as check_offers,
)
from torchrl_llm_kl.scoring._remembered import (
    Lookup as Lookup,
)
from torchrl_llm_kl.scoring._request import (
    NotTextError as NotTextError,
    RequestFields as RequestFields,
    Sequences as Sequences,
    TokenMask as TokenMask,
    not_text as not_text,
)
from torchrl_llm_kl.scoring._routing import (
    Routers as Routers,
)
from torchrl_llm_kl.scoring._scorer import (
    ModelOrScorer as ModelOrScorer,
    ScorerSlot as ScorerSlot,
)
from torchrl_llm_kl.scoring._versions import (
    score_versions as score_versions,
)
from torchrl_llm_kl.scoring._wrapper import (
    check_distributions as check_distributions,
    check_replays as check_replays,
    check_vocabularies as check_vocabularies,
    inner_module as inner_module,
    is_wrapper as is_wrapper,
    log_probs_only as log_probs_only,
    repair_padding as repair_padding,
    unwrap as unwrap,
    warn_of_chatml as warn_of_chatml,
    warn_of_mismatch as warn_of_mismatch,
)
from torchrl_llm_kl.scoring._wrapping import (
    Ranks as Ranks,
    collective_device as collective_device,
    is_zero3 as is_zero3,
)
