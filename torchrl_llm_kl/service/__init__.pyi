"""Names of the package: it loads them on first use, type checkers read them here."""

from torchrl_llm_kl.service._errors import (
    EngineLost as EngineLost,
    PoisonedRequest as PoisonedRequest,
    ProtocolError as ProtocolError,
    ServiceClosedError as ServiceClosedError,
    ServiceConfigError as ServiceConfigError,
    ServiceError as ServiceError,
    ServiceOverloaded as ServiceOverloaded,
    ServiceTimeout as ServiceTimeout,
    WeightVersionError as WeightVersionError,
)
from torchrl_llm_kl.service._messages import (
    PushedVersion as PushedVersion,
)
from torchrl_llm_kl.service._remote import (
    RemoteModel as RemoteModel,
    RemoteScorer as RemoteScorer,
)
from torchrl_llm_kl.service._replica import (
    app as app,
)
from torchrl_llm_kl.service._service import (
    ScoringService as ScoringService,
)
from torchrl_llm_kl.service._transforms import (
    RayKLRewardTransform as RayKLRewardTransform,
    RayRetrieveKL as RayRetrieveKL,
    RayRetrieveLogProb as RayRetrieveLogProb,
)
from torchrl_llm_kl.service._weight_sync import (
    ServiceWeightSyncScheme as ServiceWeightSyncScheme,
    ServiceWeightUpdater as ServiceWeightUpdater,
)
from torchrl_llm_kl.service.engines._gang import (
    GangEngine as GangEngine,
)
from torchrl_llm_kl.service.engines._http import (
    HTTPEngine as HTTPEngine,
)
