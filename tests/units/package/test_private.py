"""Each private name of another library, removed in turn: an error that names it, or a slower route to the same numbers."""

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torchrl._utils
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from transformers import PreTrainedModel

from checkpointed import enable
from scoring_reference import plain_log_probs
from torchrl_llm_kl import LogProbScorer, Ragged, _private
from torchrl_llm_kl._private import PrivateNameError
from torchrl_llm_kl.scoring import ReferenceUpdater, _attention, _updater
from torchrl_llm_kl.transforms import _base
from toy_models import tiny_model, with_lora

ROWS = [[5, 6, 7, 8, 9], [5, 6, 7, 3], [4, 2, 1]]
Patch = pytest.MonkeyPatch


def fresh(module: ModuleType) -> ModuleType:
    """The module, executed again beside the one that is imported."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_again", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return again


def gone(patch: Patch, owner: type, name: str) -> None:
    """Let instances of a class lack an attribute that cannot be deleted from it."""

    def missing(_: object) -> Any:
        raise AttributeError(name)

    patch.setattr(owner, name, property(missing), raising=False)


def scores(model: nn.Module, **options: Any) -> list[Tensor]:
    return LogProbScorer(model).score(ROWS, **options).to_list()


def deterministic() -> object:
    return LogProbScorer(tiny_model("qwen2"), deterministic=True).score(ROWS)


def checkpointed() -> tuple[Tensor, ...]:
    model = tiny_model("qwen2").train()
    enable(model)
    total = LogProbScorer(model).score(ROWS, grad=True).values.sum()
    return torch.autograd.grad(total, list(model.parameters()))


def named(name: str) -> nn.Module:
    """An instance of a class that torch or PEFT has under this name."""
    return type(name, (nn.Linear,), {})(2, 2)


def remote() -> object:
    wrapper = type("RemoteTransformersWrapper", (), {"__module__": "torchrl.modules.llm"})()
    return _private.is_remote(wrapper)


def delete(module: str, name: str) -> Callable[[Patch], None]:
    *path, last = name.split(".")

    def remove(patch: Patch) -> None:
        owner = importlib.import_module(module)
        for part in path:
            owner = getattr(owner, part)
        patch.delattr(owner, last)

    return remove


def rename(module: ModuleType, constant: str) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(module, constant, "_has_another_name")


def nothing(_: Patch) -> None:
    """The object that is given lacks the name."""


# ------------------------------------------------------------------ errors

TREES, RUNTIME = "torch.utils._pytree", "torch.distributed.fsdp._runtime_utils"
#: Name -> how it is removed, and a call that needs it.
ERRORS: dict[str, tuple[Callable[[Patch], None], Callable[[], object]]] = {
    name.rpartition(".")[2]: (delete("torch._C", name), call)
    for name, call in {
        "_ForceDispatchKeyGuard": lambda: _private.default_dispatch(),
        "_dispatch_tls_local_include_set": lambda: fresh(_private).default_dispatch(),
        "_dispatch_tls_local_exclude_set": lambda: fresh(_private).default_dispatch(),
        "_current_graph_task_id": _private.backward_task,
        "_autograd._get_current_graph_task_keep_graph": _private.backward_keeps_graph,
        "_autograd._top_saved_tensors_default_hooks": lambda: scores(tiny_model("qwen2")),
    }.items()
}
ERRORS |= {
    "tree_leaves": (delete(TREES, "tree_leaves"), deterministic),
    "register_pytree_node": (
        delete(TREES, "register_pytree_node"),
        lambda: fresh(importlib.import_module("torchrl_llm_kl.losses._token_loss")),
    ),
    "TorchDispatchMode": (delete("torch.utils._python_dispatch", "TorchDispatchMode"), deterministic),
    "_orig_mod": (nothing, lambda: LogProbScorer(named("OptimizedModule"))),
    "_compiled_call_impl": (
        rename(_private, "_COMPILED"),
        lambda: scores(tiny_model("qwen2")),
    ),
    "ds_process_group": (nothing, lambda: _private.deepspeed_groups(zero3())),
    "_get_active_ddp_module": (
        lambda patch: (
            patch.delattr(DistributedDataParallel, "_get_active_ddp_module"),
            patch.setattr(torch.distributed, "is_initialized", lambda: True),
        )[1],
        _private.active_ddp,
    ),
    "_reshard": (delete(RUNTIME, "_reshard"), lambda: _private.reshard_fsdp1(None)),
    "_handle": (nothing, lambda: _private.reshard_fsdp1(SimpleNamespace())),
    "_is_stateful": (
        lambda patch: patch.delattr(PreTrainedModel, "_is_stateful"),
        lambda: LogProbScorer(tiny_model("qwen2")),
    ),
    "_adapters": (nothing, lambda: _private.own_adapters(named("AuxiliaryTrainingWrapper"))),
    "_active_adapter": (
        rename(_private, "_ACTIVE_ADAPTER"),
        lambda: LogProbScorer(with_lora(tiny_model("qwen2")), adapters="default").score(ROWS),
    ),
    "_remote_wrapper": (nothing, remote),
    "_container": (nothing, lambda: _private.container_of(type("Bare", (), {"set_container": None})())),
    "_CHAT_TEMPLATES": (delete("torchrl.data.llm.history", "_CHAT_TEMPLATES"), _private.chat_templates),
    "_tensordict": (nothing, lambda: _private.part_of_class(SimpleNamespace(), "_tensordict")),
    "_non_tensordict": (nothing, lambda: _private.part_of_class(SimpleNamespace(), "_non_tensordict")),
}


def zero3() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.ds_id = 1  # type: ignore[attr-defined]
    return parameter


@pytest.mark.parametrize("name", ERRORS)
def test_a_name_that_is_needed_is_named_by_the_error(name: str, monkeypatch: Patch) -> None:
    remove, call = ERRORS[name]
    remove(monkeypatch)
    with pytest.raises(RuntimeError, match=rf"has no [\w. ]*({name}|_has_another_name)"):
        call()


def test_the_error_names_the_release_and_the_page(monkeypatch: Patch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with pytest.raises(PrivateNameError) as caught:
        _private.backward_task()
    assert str(caught.value) == (
        f"torch {torch.__version__} has no torch._C._current_graph_task_id, which torchrl_llm_kl needs here. Install a release "
        "of torch that docs/versions.md lists as tested."
    )


def test_the_function_that_torch_compile_leaves(monkeypatch: Patch) -> None:
    layer = nn.Linear(2, 2)
    layer.compile()
    assert _private.compiled_call(layer) is not None
    monkeypatch.setattr(_private, "_FUNCTION", "_has_another_name")
    with pytest.raises(PrivateNameError, match="_has_another_name"):
        _private.compiled_call(layer)


def test_torchrls_metaclass(monkeypatch: Patch) -> None:
    monkeypatch.delattr(torchrl._utils, "_RayServiceMetaClass")
    with pytest.raises(ImportError, match="_RayServiceMetaClass"):
        fresh(_base)


# ------------------------------------------------------------------ slower routes, and the same numbers


def test_sizes_of_nested_tensors(monkeypatch: Patch) -> None:
    rows = [torch.arange(3.0), torch.arange(2.0)]
    strided, jagged = (torch.nested.nested_tensor(rows, layout=x) for x in (torch.strided, torch.jagged))
    gone(monkeypatch, Tensor, "_nested_tensor_size")
    for which in ("min", "max"):
        monkeypatch.delattr(type(jagged), f"_maybe_{which}_seqlen")
    assert _private.nested_sizes(strided).tolist() == [[3], [2]]
    assert _private.jagged_bounds(jagged) == (None, None)
    for nested in (strided, jagged):
        read = Ragged.from_nested(nested)
        assert [row.tolist() for row in read.to_list()] == [[0.0, 1.0, 2.0], [0.0, 1.0]]
        assert [row.tolist() for row in read.restore().unbind()] == [[0.0, 1.0, 2.0], [0.0, 1.0]]


def test_products_without_onednn(monkeypatch: Patch) -> None:
    monkeypatch.setattr(_private, "_FEWEST_PRODUCTS", 1)
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    with torch.no_grad():
        assert _private.onednn_linear(x, weight) is None
    model = tiny_model("qwen2")
    same_as_plain(model, scores(model))


def test_marks_of_dynamic_sizes(monkeypatch: Patch) -> None:
    import torch._dynamo

    marked, unmarked = torch.zeros(2, 2), torch.zeros(2, 2)
    _private.mark_dynamic(marked, 1)
    monkeypatch.delattr(torch._dynamo, "maybe_mark_dynamic")
    _private.mark_dynamic(unmarked, 1)
    assert set(vars(marked)) > set(vars(unmarked))


@pytest.mark.parametrize("name", ["ATTENTION", "FLASH"])
def test_attention_that_cannot_be_replaced_runs_in_padded_batches(name: str, monkeypatch: Patch) -> None:
    model = tiny_model("qwen2")
    assert LogProbScorer(model).shares_prefixes
    rename(_attention, name)(monkeypatch)
    scorer = LogProbScorer(model)
    assert not scorer.shares_prefixes
    same_as_plain(model, scorer.score(ROWS).to_list())


def test_checkpoints_that_cannot_be_followed_run_in_padded_batches(monkeypatch: Patch) -> None:
    want = checkpointed()
    monkeypatch.setattr(_attention, "CHECKPOINTS", ())
    with pytest.warns(UserWarning, match="Layers run in a checkpoint"):
        assert_close(checkpointed(), want, atol=1e-4, rtol=0)


def test_prefixes_of_wrapped_parameters(monkeypatch: Patch) -> None:
    reference, policy = nn.Linear(2, 2), nn.ModuleDict({"module": nn.Linear(2, 2)})
    ReferenceUpdater(reference, policy, reset_every=1).step()
    assert_close(reference.weight, policy["module"].weight)
    monkeypatch.setattr(_updater, "WRAPPED", ())
    with pytest.raises(ValueError, match="weight"):
        ReferenceUpdater(reference, policy, reset_every=1)


def same_as_plain(model: Any, found: list[Tensor]) -> None:
    rows = Ragged.from_list([torch.tensor(row) for row in ROWS])
    assert_close(torch.cat(found), plain_log_probs(model, rows).detach(), atol=1e-5, rtol=0)


# ------------------------------------------------------------------ no name is left out

#: Names that slower routes and the tests above remove.
OTHERS = {"_nested_tensor_size", "_linear_pointwise", "_attn_implementation_internal", "_supports_flash_attn"}
OTHERS |= {"_gradient_checkpointing_func", "_torchdynamo_orig_callable", "maybe_mark_dynamic"}
#: Found by the pattern, with their reason: prefixes of parameters, a private module whose function is removed, a group that
#: only some optimisers of DeepSpeed set, an attribute that the same function reads after `_handle`.
COVERED = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_runtime_utils", "_pytree", "_python_dispatch"}
COVERED |= {"_dp_group", "_local_shard", "_autograd", "_maybe_"}


def test_every_private_name_is_removed_by_a_test() -> None:
    source = Path(_private.__file__).read_text(encoding="utf-8").partition("# ----")[2]
    code = re.sub(r'""".*?"""|#.*?$', "", source, flags=re.DOTALL | re.MULTILINE)
    names = set(re.findall(r"[\"'.](_[a-zA-Z]\w+)\b", code)) - {"_C", "_dynamo"}
    assert names - COVERED <= {*ERRORS, *OTHERS}
