"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl import (
    advantages as advantages,
    algorithms as algorithms,
    cli as cli,
    datasets as datasets,
    diagnostics as diagnostics,
    estimators as estimators,
    losses as losses,
    masks as masks,
    ragged as ragged,
    rollouts as rollouts,
    scoring as scoring,
    service as service,
    tasks as tasks,
    training as training,
    transforms as transforms,
)
from torchrl_llm_kl.advantages import (
    Advantage as Advantage,
)
from torchrl_llm_kl.algorithms import (
    from_nemo_rl as from_nemo_rl,
    from_prime_rl as from_prime_rl,
    from_slime as from_slime,
    from_trinity as from_trinity,
    from_trl as from_trl,
    from_verl as from_verl,
    make_algorithm as make_algorithm,
)
from torchrl_llm_kl.datasets import (
    from_completions as from_completions,
    from_conversations as from_conversations,
    from_pairs as from_pairs,
    load_batch as load_batch,
    read_rows as read_rows,
    save_batch as save_batch,
)
from torchrl_llm_kl.diagnostics import (
    Diagnosis as Diagnosis,
    Doctor as Doctor,
    RunMonitor as RunMonitor,
    diagnose as diagnose,
    inspect_tokens as inspect_tokens,
)
from torchrl_llm_kl.estimators import (
    AdaptiveEntropyCoefficient as AdaptiveEntropyCoefficient,
    AdaptiveKLCoefficient as AdaptiveKLCoefficient,
    DualKLCoefficient as DualKLCoefficient,
    FixedKLCoefficient as FixedKLCoefficient,
    PIKLCoefficient as PIKLCoefficient,
    ScheduledCoefficient as ScheduledCoefficient,
    get_estimator as get_estimator,
)
from torchrl_llm_kl.losses import (
    LossTerm as LossTerm,
    PolicyLoss as PolicyLoss,
    ValueLoss as ValueLoss,
    get_objective as get_objective,
)
from torchrl_llm_kl.ragged import (
    Ragged as Ragged,
)
from torchrl_llm_kl.scoring import (
    ByteTeacher as ByteTeacher,
    LogProbScorer as LogProbScorer,
    ReferenceUpdater as ReferenceUpdater,
    RememberedModel as RememberedModel,
    SamplerMismatchWarning as SamplerMismatchWarning,
    Sampling as Sampling,
    ScoreOptions as ScoreOptions,
    ScoreRequest as ScoreRequest,
    ScoreStore as ScoreStore,
    TokenCritic as TokenCritic,
    prepare_reference as prepare_reference,
)
from torchrl_llm_kl.tasks import (
    FunctionReward as FunctionReward,
    PromptError as PromptError,
    PromptOrder as PromptOrder,
    RewardError as RewardError,
    Turns as Turns,
    make_env as make_env,
    tiny_chat_model as tiny_chat_model,
)
from torchrl_llm_kl.transforms import (
    Adapters as Adapters,
    AfterPrompt as AfterPrompt,
    Entropy as Entropy,
    ExactKL as ExactKL,
    Extra as Extra,
    Images as Images,
    KeptTokens as KeptTokens,
    KLComputation as KLComputation,
    KLRewardTransform as KLRewardTransform,
    Moments as Moments,
    PolicyVersions as PolicyVersions,
    RecordKept as RecordKept,
    RetrieveKL as RetrieveKL,
    RetrieveLogProb as RetrieveLogProb,
    RetrieveValue as RetrieveValue,
    RoutedExperts as RoutedExperts,
    SamplerLogProbs as SamplerLogProbs,
    TopK as TopK,
)

__version__: str
