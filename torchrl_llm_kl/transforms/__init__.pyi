"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.scoring import (
    Adapters as Adapters,
    AfterPrompt as AfterPrompt,
    Entropy as Entropy,
    EntrySpec as EntrySpec,
    ExactKL as ExactKL,
    Extra as Extra,
    Images as Images,
    KeptTokens as KeptTokens,
    Moments as Moments,
    PolicyVersions as PolicyVersions,
    RoutedExperts as RoutedExperts,
    SamplerLogProbs as SamplerLogProbs,
    ScoredStep as ScoredStep,
    ScoringContext as ScoringContext,
    TopK as TopK,
)
from torchrl_llm_kl.transforms._kl import (
    KLComputation as KLComputation,
    KLRewardTransform as KLRewardTransform,
)
from torchrl_llm_kl.transforms._record_kept import (
    RecordKept as RecordKept,
)
from torchrl_llm_kl.transforms._retrieve_kl import (
    RetrieveKL as RetrieveKL,
)
from torchrl_llm_kl.transforms._retrieve_log_prob import (
    RetrieveLogProb as RetrieveLogProb,
    RetrieveValue as RetrieveValue,
)

# isort: split
# For the layers above, not public:
from torchrl_llm_kl.transforms._base import (
    RAY_VARIANTS as RAY_VARIANTS,
    RayVariant as RayVariant,
)
