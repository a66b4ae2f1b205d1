"""The comparisons, by name."""

from __future__ import annotations

from benchmarks.workloads import (
    alone,
    checkpoint,
    conversation,
    imports,
    kl_computation,
    loss,
    policy_loss,
    retrieve_kl,
    trl,
)
from benchmarks.workloads.base import Settings, Workload

__all__ = ["WORKLOADS", "Settings", "Workload"]

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for module in (retrieve_kl, conversation, loss, policy_loss, checkpoint, kl_computation, imports, alone, trl)
    for workload in module.WORKLOADS
}
