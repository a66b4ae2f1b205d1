"""A service without Ray: requests and replies are packed, scored in this process and unpacked."""

from torchrl_llm_kl.service import RemoteModel
from torchrl_llm_kl.service._spec import ServiceSpec
from torchrl_llm_kl.service._wire import Reply, Request
from torchrl_llm_kl.service.client import _exchange, _remote
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.replica._core import ScoringCore


class Loopback:
    """Models by name, each as two replicas that take requests of four tokens."""

    def __init__(self, monkeypatch):
        self.cores = {}
        loop = self

        class Exchange(_exchange.Exchange):
            def __init__(self, connection, router, whole, *, timeout):
                self.parts = whole.divided(router, [0, 1])
                self._layout = whole.request.scored.layout
                self._core = loop.cores[connection.spec.name]

            def replies(self):
                found = self._core.score([Request.unpack(part.request.pack()) for part in self.parts])
                for one in found:
                    if isinstance(one, Exception):
                        raise one
                return [Reply.unpack(one.pack()) for one in found]

        monkeypatch.setattr(_remote, "Exchange", Exchange)

    def serve(self, made, name="model"):
        self.cores[name] = ScoringCore(TransformersEngine(made))
        remote = RemoteModel(ServiceSpec(name, "source", {"max_tokens": 4}, num_replicas=2))
        remote._interface = self.cores[name].engine.interface()
        return remote
