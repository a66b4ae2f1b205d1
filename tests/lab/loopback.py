"""A service without Ray: messages are pickled, scored in this process, and their answers are read."""

import pickle

from torchrl_llm_kl.service import RemoteModel
from torchrl_llm_kl.service._core import ScoringCore
from torchrl_llm_kl.service._messages import read
from torchrl_llm_kl.service._remote import Connection
from torchrl_llm_kl.service.engines._engine import TransformersEngine


class Withdrawable(dict):
    """A message whose answer can be withdrawn."""

    def cancel(self):
        pass


class LoopbackConnection(Connection):
    """Answers requests in this process, and collects their ``messages``."""

    def __init__(self, core):
        super().__init__("model")
        self.core, self.messages = core, []

    def connect(self):
        pass

    def send(self, method, message):
        assert method == "score"
        self.messages.append(message)
        return Withdrawable(message)

    def receive(self, response, again, deadline):
        try:
            (answer,) = self.core.score([read(pickle.loads(pickle.dumps(dict(response))))])
        except ValueError as error:  # of a message
            answer = error
        if isinstance(answer, Exception):
            raise answer
        return pickle.loads(pickle.dumps(answer))


class Loopback:
    """Serve models in this process, to a client that splits its requests after four numbers."""

    def serve(self, made):
        remote = RemoteModel("model")
        remote.connection = LoopbackConnection(ScoringCore(TransformersEngine(made)))
        remote.part_size = 4
        remote._interface = remote.connection.core.engine.interface()
        return remote
