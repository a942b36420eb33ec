"""`Head`: a language-model head as scoring takes it, read from a model with everything that is on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepmask.head.form import HeadForm
from keepmask.head.pair_products import wide

if TYPE_CHECKING:
    from keepmask.replay.parallel import VocabParallel

__all__ = ["Head", "LowRank"]

_checked: WeakSet[nn.Module] = WeakSet()

_TOLERANCE, _TOLERANCE_HALF = 0.01, 0.1
"""Largest difference of logits that is still rounding, in standard deviations of the logits."""

_SPREAD = 20.0
"""Standard deviation of the products that a head is checked with: so large that no softcap goes unnoticed."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """An adapter on a head: adds `up @ (scaling * (down @ dropout(h)))` to its products (LoRA, Hu et al. 2021)."""

    down: Tensor
    """[r, E]."""
    up: Tensor
    """[V, r]."""
    scaling: float = 1.0
    dropout: Callable[[Tensor], Tensor] | None = None

    def states(self, hidden: Tensor) -> Tensor:
        """[T, r], whose product with `up` is what is added. hidden: [T, E]. Differentiable."""
        dtype = torch.promote_types(hidden.dtype, self.down.dtype)
        hidden = hidden.to(dtype)
        return F.linear(hidden if self.dropout is None else self.dropout(hidden), self.down.to(dtype)) * self.scaling


@dataclass(frozen=True, eq=False)
class Head:
    """What makes logits of hidden states h: softcap * tanh(scale * (W h + bias + adapters) / softcap).

    `Head.of(model)` reads all of it from a model. The tensors are the model's own, so gradients reach them, and a head
    stays valid while the model trains.
    """

    weight: Tensor
    """W: [V, E]."""
    bias: Tensor | None = None
    """[V]."""
    softcap: float | None = None
    scale: float = 1.0
    rounding: Literal["bf16"] | None = None
    """"bf16" rounds the sum before the scale to bfloat16, as an engine with a bfloat16 head does; the gradient passes
    straight through."""
    adapters: tuple[LowRank, ...] = ()
    vocab_parallel: VocabParallel | None = None
    """How the rows of the weight are spread over processes. A DTensor sharded by rows says so itself: None then."""

    def __post_init__(self) -> None:
        self.form  # noqa: B018 - checks softcap, scale and rounding

    @classmethod
    def of(cls, model: Any, *, rounding: Literal["bf16"] | None = None) -> Head:
        """The head of a causal language model of transformers, tied or not, PEFT's adapters on it included.

        The first time, the model's own forward is asked for the logits of one random hidden state; a model that makes
        others of it is refused, so nothing about a head can be missed. (Where a weight is spread over processes, this
        is left out.)

        Raises ValueError naming what is on the head and cannot be replayed: adapters other than LoRA, DoRA and other
        variants of it, quantised weights, logits that are not the head's product and softcap, scale and bias.
        """
        model = _unwrapped(model)
        module = model.get_output_embeddings()
        if module is None:
            raise ValueError(f"{type(model).__name__} has no head: get_output_embeddings() is None")
        base, adapters = _layers(module)
        if not base.weight.is_floating_point() or base.weight.ndim != 2 or not base.weight.numel():
            raise ValueError(
                f"the head, {type(base).__name__}, has a weight of {base.weight.dtype} {list(base.weight.shape)}: "
                "needs a floating-point matrix, neither quantised nor kept on other processes"
            )
        form = HeadForm.of(model.config.get_text_config())
        head = cls(
            base.weight, getattr(base, "bias", None), form.softcap, form.scale, rounding=rounding, adapters=adapters
        )
        if module not in _checked and not any(hasattr(tensor, "device_mesh") for tensor in model.parameters()):
            _check(model, head)
            _checked.add(module)
        return head

    @property
    def form(self) -> HeadForm:
        """Softcap, scale and rounding."""
        return HeadForm(softcap=self.softcap, scale=self.scale, rounding=self.rounding)

    @property
    def vocab_size(self) -> int:
        """V, of the whole head."""
        return int(self.weight.shape[0]) if self.vocab_parallel is None else self.vocab_parallel.vocab_size

    def adapted(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """The adapters as one more product: its states [T, r] and its rows [V, r]; None where there is no adapter."""
        if not self.adapters:
            return None
        dtype = wide(hidden.dtype)
        states = [adapter.states(hidden).to(dtype) for adapter in self.adapters]
        rows = [one.up if wide(one.up.dtype) == dtype else one.up.to(dtype) for one in self.adapters]
        if len(rows) == 1:
            return states[0], rows[0]
        return torch.cat(states, 1), torch.cat(rows, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, V]: all logits of some hidden states [T, E], in their type; the definition. Differentiable."""
        products = F.linear(hidden, self.weight.to(hidden.dtype))
        for adapter in self.adapters:
            states = adapter.states(hidden)
            products = products + F.linear(states, adapter.up.to(states.dtype)).to(products.dtype)
        return self.form.apply(products if self.bias is None else products + self.bias.to(products.dtype))


def _unwrapped(model: Any) -> Any:
    """The model of transformers inside DDP, FSDP, torch.compile and PEFT."""
    while not hasattr(model, "get_output_embeddings"):
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if inner is None:
            raise ValueError(
                f"{type(model).__name__} is no language model of transformers: it has no get_output_embeddings; build "
                "the head by hand, replay.Head(weight, bias=..., softcap=..., scale=...)"
            )
        model = inner
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _layers(module: Any) -> tuple[Any, tuple[LowRank, ...]]:
    """The linear layer of a head, and the adapters that PEFT has put on it."""
    if hasattr(module, "modules_to_save"):  # a trained copy of the whole head
        if module.disable_adapters or not (
            active := [n for n in module.active_adapters if n in module.modules_to_save]
        ):
            return module.original_module, ()
        return module.modules_to_save[active[0]], ()
    if not hasattr(module, "base_layer"):
        return module, ()
    if hasattr(module.base_layer, "base_layer"):
        raise ValueError(
            f"adapters on the head: {type(module).__name__} on {type(module.base_layer).__name__}; one only"
        )
    if module.disable_adapters or module.merged:
        return module.base_layer, ()
    names = [name for name in module.active_adapters if name in getattr(module, "lora_A", ())]
    others = [name for name in module.active_adapters if name not in names]
    variants = [f"{name} ({type(module.lora_variant[name]).__name__})" for name in names if name in module.lora_variant]
    biased = [name for name in names if module.lora_bias.get(name)]
    if not hasattr(module, "lora_A") or variants or biased:
        raise ValueError(
            f"adapter on the head: {', '.join(variants or biased or others)} of {type(module).__module__}."
            f"{type(module).__name__} is not plain LoRA and cannot be replayed; merge it or leave the head out"
        )
    return module.base_layer, tuple(
        LowRank(
            module.lora_A[name].weight,
            module.lora_B[name].weight,
            float(module.scaling[name]),
            None if isinstance(module.lora_dropout[name], nn.Identity) else module.lora_dropout[name],
        )
        for name in names
    )


@torch.no_grad()
def _check(model: Any, head: Head) -> None:
    """Raise ValueError unless the model's forward makes the head's logits of a hidden state."""
    dtype, size = head.weight.dtype, head.weight.shape[1]
    state = torch.randn(1, size, generator=torch.Generator().manual_seed(0)).to(head.weight.device, dtype)
    state *= _SPREAD / F.linear(state, head.weight).std().clamp(min=1e-6)
    token = torch.zeros(1, 1, dtype=torch.int64, device=state.device)
    by_hand = "build the head by hand, replay.Head(weight, bias=..., softcap=..., scale=...)"
    with _evaluating(model), _base_giving(model, state[None]):
        try:
            own = model(input_ids=token, use_cache=False).logits[0].to(torch.float64)
        except Exception as error:  # the border to model code, which may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{type(model).__name__}: gives no logits of a hidden state ({reason}); {by_hand}"
            ) from error
        ours = replace(head, rounding=None).logits(state.double())
    off = float((own - ours).abs().max() / ours.std()) if own.shape == ours.shape else torch.inf
    if not off <= (_TOLERANCE_HALF if dtype.itemsize < 4 else _TOLERANCE):
        raise ValueError(
            f"{type(model).__name__}: its logits are not those of its head with softcap={head.softcap} and "
            f"scale={head.scale:g} (off by {off:.2g} standard deviations), so scores on them would not be its own; "
            f"{by_hand}"
        )


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without dropout."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _base_giving(model: Any, states: Tensor) -> Iterator[None]:
    """The model with a base that gives these hidden states for everything."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    base = model.base_model
    own = vars(base).get("forward")
    base.forward = lambda *_args, **_kwargs: BaseModelOutputWithPast(last_hidden_state=states)
    try:
        yield
    finally:
        del base.forward
        if own is not None:
            base.forward = own
