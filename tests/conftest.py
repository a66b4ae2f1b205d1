from __future__ import annotations

import torch

# The models of the tests are tiny: threads only wait for each other.
torch.set_num_threads(1)
